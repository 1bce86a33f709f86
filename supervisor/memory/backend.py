"""Which backend MLX will use here, found out without importing it."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

CUDA_PACKAGES = ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda")


def find_backend() -> str:
    """`metal`, `cuda` or `cpu`, as far as the system and the installed packages say."""
    if platform.system() == "Darwin":
        return "metal" if platform.machine() == "arm64" else "cpu"
    return "cuda" if any(map(_is_installed, CUDA_PACKAGES)) else "cpu"


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True
