"""Reads how much memory is available, again and again; what it cannot read, it does without."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import psutil

from ..core.memory.pressure import Reading, Strain
from .machine import CGROUP_ROOT, limit_files, read_limit, reserve_bytes
from .readings import HostMemory, group_left_bytes, host_memory, linux_strain, mac_strain

KEPT_FREE_SHARE = 4
"""Divides the reserve of `machine.py`, which is for all that other programs hold: so much of it
must still be available."""

MAC_LEVEL = b"kern.memorystatus_vm_pressure_level"

PROC = Path("/proc")

Report = Callable[[str], None]


class Watch(Protocol):
    """Reads memory."""

    def read(self) -> Reading | None:
        """What is available now; None: nothing limits models, as far as is known."""


class NoWatch:
    """For memory that cannot be read cheaply: that of a CUDA GPU, which only `nvidia-smi`
    knows."""

    def read(self) -> Reading | None:
        """Nothing is known."""
        return None


class LinuxWatch:
    """Reads the machine's memory and that of the control groups that this process is in.

    Args:
        report: called once for each file that cannot be used, with a sentence.
        proc: where the system's files are.
        cgroup_root: where the file system of control groups is mounted.
    """

    def __init__(self, report: Report, proc: Path = PROC, cgroup_root: Path = CGROUP_ROOT) -> None:
        self._report = report
        self._proc = proc
        self._root = cgroup_root
        # At most one entry for each file that is read.
        self._reported: set[Path] = set()

    def read(self) -> Reading | None:
        """See `Watch.read`."""
        host = self._host()
        if host is None:
            return None
        total_bytes, available_bytes, place = host.total_bytes, host.available_bytes, "machine"
        stalls = self._proc / "pressure" / "memory"
        for limit_file in limit_files(self._root, self._proc / "self" / "cgroup"):
            limit_bytes = read_limit(limit_file)
            if limit_bytes is None or limit_bytes >= host.total_bytes:
                continue
            total_bytes = min(total_bytes, limit_bytes)
            left_bytes = self._left(limit_file, limit_bytes)
            if left_bytes is not None and left_bytes < available_bytes:
                available_bytes, place = left_bytes, "control group"
                stalls = limit_file.with_name("memory.pressure")
        return Reading(
            available_bytes=max(0, available_bytes),
            kept_free_bytes=reserve_bytes(total_bytes) // KEPT_FREE_SHARE,
            strain=self._strain(stalls),
            place="on this machine" if place == "machine" else "in this control group",
        )

    # ------------------------------------------------------------ inside

    def _host(self) -> HostMemory | None:
        path = self._proc / "meminfo"
        try:
            return host_memory(path.read_text())
        except (OSError, ValueError) as error:
            self._complain(path, error)
            return None

    def _left(self, limit_file: Path, limit_bytes: int) -> int | None:
        is_first = limit_file.name == "memory.limit_in_bytes"
        used = limit_file.with_name("memory.usage_in_bytes" if is_first else "memory.current")
        try:
            statistics = limit_file.with_name("memory.stat").read_text()
            return group_left_bytes(limit_bytes, used.read_text(), statistics)
        except (OSError, ValueError) as error:
            self._complain(used, error)
            return None

    def _strain(self, path: Path) -> Strain:
        try:
            return linux_strain(path.read_text())
        except FileNotFoundError:  # kernels without it
            return Strain.UNSAID
        except (OSError, ValueError) as error:
            self._complain(path, error)
            return Strain.UNSAID

    def _complain(self, path: Path, error: Exception) -> None:
        if path not in self._reported:
            self._reported.add(path)
            cause = error.strerror if isinstance(error, OSError) else error
            self._report(f"{path}: {cause}")


class MacWatch:
    """Asks macOS for its level of memory pressure, and for what is available.

    Args:
        level: the level, or None if the system does not say it.
    """

    def __init__(self, level: Callable[[], int | None]) -> None:
        self._level = level

    def read(self) -> Reading | None:
        """See `Watch.read`."""
        level = self._level()
        if level is None:
            return None
        memory = psutil.virtual_memory()
        return Reading(
            available_bytes=memory.available,
            kept_free_bytes=reserve_bytes(memory.total) // KEPT_FREE_SHARE,
            strain=mac_strain(level),
        )


def mac_level() -> int | None:
    """The level of memory pressure; None if the system does not say it."""
    level, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    try:
        ask = ctypes.CDLL(None).sysctlbyname
    except (OSError, AttributeError):
        return None
    code = ask(MAC_LEVEL, ctypes.pointer(level), ctypes.pointer(size), None, 0)
    return level.value if code == 0 else None


def find_watch(backend: str, report: Report, proc: Path = PROC) -> Watch:
    """What reads the memory that models live in.

    Args:
        backend: that MLX uses: `cpu`, `cuda` or `metal`.
        report: called once for each file that cannot be used.
        proc: where the system's files are.
    """
    if backend == "cuda":
        return NoWatch()
    return MacWatch(mac_level) if platform.system() == "Darwin" else LinuxWatch(report, proc)
