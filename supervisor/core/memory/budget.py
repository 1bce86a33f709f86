"""How much memory all models together may take."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The memory that models share. No load makes what is reserved exceed it.

    Attributes:
        size_bytes: what the models may take together now.
        machine_bytes: what the machine has of the memory that models live in: the device's with
            CUDA, otherwise its RAM or the limit of its control group.
        is_given: whether the configuration says so; otherwise it follows from the machine.
        reason: how it was found, a phrase: `15.60 GiB of RAM less a reserve of 2.00 GiB`.
        automatic_bytes: what it would be if the configuration did not say; None: it is that.
        lowered_from_bytes: what they may take together otherwise, if others need so much memory
            that it is less now; None if it is not lowered.
        shortage: why it is lowered, a phrase; empty if it is not.
        is_short: whether others lack memory at this moment, so that models must give some back. A
            budget may stay lowered for longer: models keep what they have, and no more are loaded.
    """

    size_bytes: int
    machine_bytes: int
    is_given: bool
    reason: str
    automatic_bytes: int | None = None
    lowered_from_bytes: int | None = None
    shortage: str = ""
    is_short: bool = False

    @property
    def whole_bytes(self) -> int:
        """What the models may take together while memory is not short."""
        return self.size_bytes if self.lowered_from_bytes is None else self.lowered_from_bytes

    @property
    def kept_bytes(self) -> int:
        """What may stay reserved; models that nobody uses go until it is no more."""
        return self.size_bytes if self.is_short else self.whole_bytes

    def whole(self) -> Budget:
        """The same budget, not lowered."""
        return replace(
            self,
            size_bytes=self.whole_bytes,
            lowered_from_bytes=None,
            shortage="",
            is_short=False,
        )

    def lowered(self, size_bytes: int, shortage: str, *, is_short: bool) -> Budget:
        """As much of the same budget as there is now.

        Args:
            size_bytes: what the models may take.
            shortage: why it is less.
            is_short: whether others lack memory at this moment.
        """
        return replace(
            self,
            size_bytes=size_bytes,
            lowered_from_bytes=self.whole_bytes,
            shortage=shortage,
            is_short=is_short,
        )
