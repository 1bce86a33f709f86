"""The memory that a model takes, as mlx-lm says it without a load, and where answers are kept.

A process of the worker finds it out (`worker/engines/mlx/estimate.py`), the supervisor plans with
it. An answer follows from config.json, the sizes of the weight files and the versions of MLX and
mlx-lm, which its key covers, so that it holds for every daemon and command of the user.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .cache_layers import CacheLayers
from .codec import DecodeError, Size, read_part, to_map
from .regular_file import MIB, read_regular

MAX_FILE_BYTES = MIB
MAX_KEPT = 1000
"""Answers in the folder; the oldest are removed beyond this."""

MAX_BYTES = 2**50
MAX_TOKEN_BYTES = 2**30
"""No model has more weights or keeps more for a token; sums of such sizes fit into 64 bits."""

MAX_GROUPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """The memory of a model.

    Attributes:
        weight_bytes: of its arrays, once they are loaded.
        layers: what its layers keep for each row.
    """

    weight_bytes: Size
    layers: tuple[CacheLayers, ...]

    @property
    def is_possible(self) -> bool:
        """True if there are models with such sizes."""
        totals = [one.layers * (one.token_bytes + one.row_bytes) for one in self.layers]
        tokens = sum(one.layers * one.token_bytes for one in self.layers)
        return (
            max(self.weight_bytes, *totals, 0) <= MAX_BYTES
            and tokens <= MAX_TOKEN_BYTES
            and len(self.layers) <= MAX_GROUPS
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """An answer as its file has it, with the key under which it is kept."""

    key: str
    memory: ModelMemory


def estimate_argv(python: str = sys.executable) -> list[str]:
    """Return the command that asks mlx-lm, to which the pid of its parent is added.

    -P keeps the working folder out of the import path.
    """
    return [python, "-P", "-m", "mlxsup.worker.engines.mlx.estimate"]


def estimates_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of kept answers, in the user's cache."""
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(cache)) / "mlxsup" / "estimates"


def find_kept(key: str, folder: Path) -> ModelMemory | None:
    """Return the answer that is kept for a key; None if there is none, or it is damaged."""
    try:
        value = json.loads(read_regular(folder / f"{key}.json", MAX_FILE_BYTES))
        kept = read_part(_Kept, value, "")
    except (OSError, ValueError, DecodeError, RecursionError):
        return None
    return kept.memory if kept.key == key and kept.memory.is_possible else None


def keep(key: str, memory: ModelMemory, folder: Path) -> None:
    """Keep an answer for the next daemon or command; it is found out again if that fails."""
    draft = folder / f"{key}.{os.getpid()}"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(to_map(_Kept(key=key, memory=memory))), encoding="utf-8")
        os.replace(draft, folder / f"{key}.json")
        files = [folder / name for name in os.listdir(folder)]
        for old in sorted(files, key=lambda file: file.stat().st_mtime_ns)[:-MAX_KEPT]:
            old.unlink(missing_ok=True)
