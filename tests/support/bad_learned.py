"""What can be wrong with the kernels that earlier workers of a model have kept; as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlxsup.worker.engines.mlx.kernels import FOLDER_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLearned:
    """A file or a folder that a worker cannot use.

    Attributes:
        name: what is wrong, for people.
        follows: what happens, for people.
        words: stand in the model's log, once.
        prepare: has it wrong in the folder of a model.
    """

    name: str
    follows: str
    words: str
    prepare: Callable[[Path], object]


def _torn_kernel(folder: Path) -> None:
    kernels = folder / FOLDER_NAME / "1-"
    kernels.mkdir(parents=True)
    (kernels / "add.ptx").write_bytes(b"half a ker")


KERNELS = (
    BadLearned(
        name="with CUDA, a compiled kernel that was not written to its end",
        follows="a line in the model's log; it is compiled anew",
        words="damaged kernels deleted model=m kernels=1",
        prepare=_torn_kernel,
    ),
    BadLearned(
        name="with CUDA, a folder of kernels that is read-only or cannot be made",
        follows="a line in the model's log; MLX keeps them where it does by itself",
        words="compiled kernels not kept model=m cause=",
        prepare=lambda folder: (folder / FOLDER_NAME).write_bytes(b"in the way"),
    ),
)
"""Of the kernels that MLX for CUDA has compiled."""
