"""The files of a folder that decide what a model answers, and those that are none of its files."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path

MLX_ADAPTER = "adapters.safetensors"
PEFT_ADAPTER = "adapter_model.safetensors"
"""The matrices of a LoRA adapter in the layouts of mlx-lm and of peft."""

ADAPTER_CONFIG = "adapter_config.json"
"""The adapter's configuration in both layouts."""

_POINTER_START = b"version https://git-lfs.github.com/spec/"


def is_tokenizer_file(name: str) -> bool:
    """Return whether a file may decide how text becomes tokens, as config.json does."""
    return name.endswith((".json", ".jinja", ".tiktoken", ".model", ".txt", ".jsonl")) and (
        not name.endswith(".index.json")
    )


def is_weight_file(name: str) -> bool:
    """Return whether mlx-lm loads weights from a file."""
    return name.startswith("model") and name.endswith(".safetensors")


def weights_among(names: Collection[str], indexed: Collection[str]) -> list[str]:
    """Return the files that hold the weights of a model, sorted.

    A head that only speculative decoding uses lies beside them (`model-mtp.safetensors`), and
    mlx-lm refuses a model with arrays that it does not know.

    Args:
        names: the files of its folder.
        indexed: those that its index names; empty without an index.
    """
    found = sorted(filter(is_weight_file, names))
    wanted = [name for name in found if (name in indexed if indexed else "mtp" not in name)]
    return wanted or found


def is_pointer(path: Path) -> bool:
    """Return whether a file is what Git LFS leaves in the place of a large one.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return file.read(len(_POINTER_START)) == _POINTER_START


def pointer_problem(path: Path) -> tuple[str, str]:
    """Return what to say of such a file, and what to do."""
    return (
        f"{path} is a Git LFS pointer, not the file itself",
        f"fetch the files with `git -C {shlex.quote(str(path.parent))} lfs pull`",
    )
