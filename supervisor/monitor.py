"""Measures the workers' processes and the machine."""

from __future__ import annotations

from collections.abc import Iterable

import psutil


def machine_bytes() -> int:
    """Memory of the machine."""
    return int(psutil.virtual_memory().total)


def measure_footprints(pids: Iterable[int]) -> dict[int, int]:
    """Resident bytes of each process, by pid; a process that is gone is left out."""
    result = {}
    for pid in pids:
        try:
            result[pid] = int(psutil.Process(pid).memory_info().rss)
        except psutil.Error:
            continue
    return result


def is_process_stopped(pid: int) -> bool:
    """Whether a process was stopped, as by SIGSTOP; false for one that is gone."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False
