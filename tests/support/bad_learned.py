"""What can be wrong with what earlier workers of a model have kept; as data.

tests/integration/test_bad_learned.py and tests/mlx/test_warm_up.py provoke each of these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlxsup.worker.engines.mlx.kernels import FOLDER_NAME
from mlxsup.worker.engines.mlx.pace import Pace
from mlxsup.worker.engines.mlx.pace_file import FILE_NAME, to_bytes

PACE = Pace(unit_s=0.001, pass_s=0.5, largest_cost=2048, decode_s=0.25, decode_rows=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLearned:
    """A file or a folder that a worker cannot use.

    Attributes:
        name: what is wrong, for people.
        follows: what happens, for people.
        words: stand in the model's log, once.
        prepare: has it wrong in the folder of a model.
        needs: a path without which it cannot be provoked.
    """

    name: str
    follows: str
    words: str
    prepare: Callable[[Path], object]
    needs: str = "/"


def _torn_kernel(folder: Path) -> None:
    kernels = folder / FOLDER_NAME / "1-"
    kernels.mkdir(parents=True)
    (kernels / "add.ptx").write_bytes(b"half a ker")


PACES = (
    BadLearned(
        name="a damaged `pace.json`",
        follows="a line in the model's log; it is begun afresh",
        words='learned pace not used model=m cause="it is damaged"',
        prepare=lambda folder: (folder / FILE_NAME).write_bytes(b'{"format": 1, "check": 7'),
    ),
    BadLearned(
        name="a `pace.json` of another machine",
        follows="the same",
        words='learned pace not used model=m cause="it is of another machine"',
        prepare=lambda folder: (folder / FILE_NAME).write_bytes(
            to_bytes(PACE, {"machine": "another one"})
        ),
    ),
    BadLearned(
        name="a `pace.json` of a later version of mlxsup",
        follows="the same",
        words='learned pace not used model=m cause="it is of another version of mlxsup"',
        prepare=lambda folder: (folder / FILE_NAME).write_bytes(b'{"format": 99}'),
    ),
    BadLearned(
        name="a `pace.json` that cannot be read",
        follows="a line in the model's log; this life keeps nothing",
        words='learned pace not used model=m cause="Is a directory"',
        prepare=lambda folder: (folder / FILE_NAME).mkdir(),
    ),
    BadLearned(
        name="a folder that is read-only, or where no file can be written",
        follows="the same",
        words='learned pace not kept model=m cause="Is a directory"',
        prepare=lambda folder: (folder / FILE_NAME).with_suffix(".new").mkdir(),
    ),
    BadLearned(
        name="a full disk",
        follows="the same",
        words='learned pace not kept model=m cause="No space left on device"',
        prepare=lambda folder: (folder / FILE_NAME).with_suffix(".new").symlink_to("/dev/full"),
        needs="/dev/full",
    ),
)
"""Of the pace."""

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

LEARNED = (*PACES, *KERNELS)
