"""Which files of a model folder decide what a model answers, and which are none of its files."""

from __future__ import annotations

import shlex
from pathlib import Path

_POINTER_START = b"version https://git-lfs.github.com/spec/"


def is_tokenizer_file(name: str) -> bool:
    """Whether a file may decide how text becomes tokens, such as config.json and the tokenizer."""
    return name.endswith((".json", ".jinja", ".tiktoken", ".model", ".txt", ".jsonl")) and (
        not name.endswith(".index.json")
    )


def is_weight_file(name: str) -> bool:
    """Whether mlx-lm loads weights from a file."""
    return name.startswith("model") and name.endswith(".safetensors")


def is_pointer(path: Path) -> bool:
    """Whether a file is what Git LFS leaves in the place of a large one.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return file.read(len(_POINTER_START)) == _POINTER_START


def pointer_problem(path: Path) -> tuple[str, str]:
    """What to say of such a file, and what to do."""
    return (
        f"{path} is a Git LFS pointer, not the file itself",
        f"fetch the files with `git -C {shlex.quote(str(path.parent))} lfs pull`",
    )
