"""Reads how much memory is available, again and again; what it cannot read, it does without."""

from __future__ import annotations

import ctypes
import platform
import re
from collections.abc import Callable
from pathlib import Path

import psutil

from ..core.budget import Reading, Strain
from .machine import CGROUP_ROOT, OWN_CGROUPS, limit_files, read_limit, reserve_bytes

KEPT_FREE_SHARE = 4
"""Divides the reserve of `machine.py`, which is for all that other programs hold: so much of it
must still be available."""

MAC_LEVEL = b"kern.memorystatus_vm_pressure_level"

PRESSURE = Path("/proc/pressure/memory")

STALLED_PERCENT = 5.0
"""Memory is short if all processes waited for it for more of the last ten seconds."""

_WAITED = re.compile(r"^full avg10=(\d+\.\d+)", re.MULTILINE | re.ASCII)
"""For how much of the last ten seconds, in percent."""

MAC_LEVELS = {1: Strain.EASY, 2: Strain.UNSAID, 4: Strain.STALLED}
"""What `kern.memorystatus_vm_pressure_level` says: normal, warning, critical; any other number says
nothing."""

FILE_CACHE = ("inactive_file", "active_file")
"""In `memory.stat`: what the system drops if the group needs memory; `total_` is version 1."""


Watch = Callable[[], Reading | None]
"""Returns what is available now; None: nothing limits models, as far as is known."""


def read_linux(
    root: Path = CGROUP_ROOT, groups: Path = OWN_CGROUPS, stalls: Path = PRESSURE
) -> Reading:
    """Return what is available of the machine, or of the control group that has less left.

    Args:
        root: where the file system of control groups is mounted.
        groups: lists the groups of this process.
        stalls: says how long processes have waited for memory.
    """
    memory = psutil.virtual_memory()
    total_bytes, available_bytes, place = memory.total, memory.available, "on this machine"
    for limit_file in limit_files(root, groups):
        limit_bytes = read_limit(limit_file)
        if limit_bytes is None or limit_bytes >= memory.total:
            continue
        total_bytes = min(total_bytes, limit_bytes)
        left_bytes = _left_bytes(limit_file, limit_bytes)
        if left_bytes is not None and left_bytes < available_bytes:
            available_bytes, place = left_bytes, "in this control group"
            stalls = limit_file.with_name("memory.pressure")
    return Reading(
        available_bytes=max(0, available_bytes),
        kept_free_bytes=reserve_bytes(total_bytes) // KEPT_FREE_SHARE,
        strain=_strain(stalls),
        place=place,
    )


def _left_bytes(limit_file: Path, limit_bytes: int) -> int | None:
    """Return what a control group may still take, the file cache that it holds included; None if
    its files do not say that."""
    is_first = limit_file.name == "memory.limit_in_bytes"
    used = limit_file.with_name("memory.usage_in_bytes" if is_first else "memory.current")
    try:
        used_bytes = int(used.read_text())
        statistics = limit_file.with_name("memory.stat").read_text()
    except (OSError, ValueError):
        return None
    sizes = {}
    for line in statistics.splitlines():
        name, _, number = line.partition(" ")
        if number.isdecimal():
            sizes[name] = int(number)
    dropped = sum(sizes.get(f"total_{name}", sizes.get(name, 0)) for name in FILE_CACHE)
    return limit_bytes - used_bytes + dropped


def _strain(path: Path) -> Strain:
    """Return whether all processes waited for memory; older kernels have no such file."""
    try:
        waited = _WAITED.search(path.read_text())
    except (OSError, ValueError):
        return Strain.UNSAID
    is_stalled = waited is not None and float(waited[1]) > STALLED_PERCENT
    return Strain.STALLED if is_stalled else Strain.UNSAID


def read_mac(level: int | None) -> Reading | None:
    """Return what is available on a Mac, as `Watch` says.

    Args:
        level: of memory pressure; None if the system does not say it.
    """
    if level is None:
        return None
    memory = psutil.virtual_memory()
    return Reading(
        available_bytes=memory.available,
        kept_free_bytes=reserve_bytes(memory.total) // KEPT_FREE_SHARE,
        strain=MAC_LEVELS.get(level, Strain.UNSAID),
    )


def mac_level() -> int | None:
    """Return the level of memory pressure; None if the system does not say it."""
    level, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    try:
        ask = ctypes.CDLL(None).sysctlbyname
    except (OSError, AttributeError):
        return None
    code = ask(MAC_LEVEL, ctypes.pointer(level), ctypes.pointer(size), None, 0)
    return level.value if code == 0 else None


def find_watch(backend: str) -> Watch:
    """Return what reads the memory that models live in.

    Args:
        backend: that MLX uses: `cpu`, `cuda` or `metal`.
    """
    if backend == "cuda":  # only nvidia-smi knows the memory of a GPU, and it takes too long
        return lambda: None
    if platform.system() == "Darwin":
        return lambda: read_mac(mac_level())
    return read_linux
