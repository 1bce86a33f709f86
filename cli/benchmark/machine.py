"""Where something was measured, and with which versions: without it no figure means anything."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil

from mlxsup.protocol.version import VERSION

PACKAGES = ("mlx", "mlx-lm", "pyzmq")


def machine_facts() -> dict[str, Any]:
    """The machine, and the versions that decide about figures; None for a package that is not
    there."""
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "versions": {"mlxsup": VERSION, **{name: _version(name) for name in PACKAGES}},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
