"""Which backend MLX will use here, found out without importing it."""

from __future__ import annotations

import os
import platform
import re
import sys
from contextlib import suppress

CUDA_PACKAGES = ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda")

_FOLDER = re.compile(rf"({'|'.join(CUDA_PACKAGES).replace('-', '_')})-[^-]+\.dist-info")
"""What an installed one of them has next to its modules. `importlib.metadata` looks for the same,
but importing it takes longer than all that `mlxsup show` does besides."""


def find_backend() -> str:
    """`metal`, `cuda` or `cpu`, as far as the system and the installed packages say."""
    if platform.system() == "Darwin":
        return "metal" if platform.machine() == "arm64" else "cpu"
    return "cuda" if any(map(_has_cuda, sys.path)) else "cpu"


def _has_cuda(folder: str) -> bool:
    with suppress(OSError):  # not every entry of the path is a folder that exists
        return any(map(_FOLDER.fullmatch, os.listdir(folder or os.curdir)))
    return False
