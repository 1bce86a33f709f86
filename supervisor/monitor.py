"""Measures the workers' processes and the machine."""

from __future__ import annotations

from collections.abc import Mapping

import psutil
from mlxsup.protocol.ids import ModelName


def machine_bytes() -> int:
    """Memory of the machine."""
    return int(psutil.virtual_memory().total)


def measure_footprints(pids: Mapping[ModelName, int]) -> dict[ModelName, int]:
    """Resident bytes of each process; a process that is gone is left out."""
    result = {}
    for model, pid in pids.items():
        try:
            result[model] = int(psutil.Process(pid).memory_info().rss)
        except psutil.Error:
            continue
    return result


def is_process_stopped(pid: int) -> bool:
    """Whether a process was stopped, as by SIGSTOP; false for one that is gone."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False
