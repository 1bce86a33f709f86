"""The machine, for reports of measurements."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil

from mlxsup.protocol.version import VERSION


def machine_facts() -> dict[str, Any]:
    """Return the machine, and the versions that decide about figures; None for a package that is
    not there."""
    versions: dict[str, str | None] = {"mlxsup": VERSION}
    for package in ("mlx", "mlx-lm", "pyzmq"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "versions": versions,
    }
