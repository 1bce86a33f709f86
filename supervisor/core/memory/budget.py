"""How much memory all models together may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The memory that models share. What is reserved never exceeds it.

    Attributes:
        size_bytes: what the models may take together.
        machine_bytes: what the machine has of the memory that models live in: the device's with
            CUDA, otherwise its RAM or the limit of its control group.
        is_given: whether the configuration says so; otherwise it follows from the machine.
        reason: how it was found, a phrase: `15.6 GiB of RAM less a reserve of 2.0 GiB`.
        automatic_bytes: what it would be if the configuration did not say; None: it is that.
    """

    size_bytes: int
    machine_bytes: int
    is_given: bool
    reason: str
    automatic_bytes: int | None = None
