"""Identifies processes: pids are reused, a pid together with its start time is not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil

_THREADS_FIELD = 17
_START_FIELD = 19
"""The field of /proc/PID/stat, counted after the command's closing parenthesis."""


def process_identity(pid: int) -> str | None:
    """Return a text that no other process of this machine has; None for no process.

    A zombie does not count as a process: it cannot be signalled. On Linux the wall clock plays no
    part, so that setting it does not make a process look like another one (P7).
    """
    start = process_start(pid)
    if start is None:
        return None
    if sys.platform == "linux":
        # Ticks since the boot, so the boot must be part of it.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{pid}@{boot}+{start}"
    return f"{pid}@{start}"


def process_start(pid: int) -> str | None:
    """Return when a process started, which tells it from others with its pid since the boot.

    Return None for no process, or a zombie.
    """
    if sys.platform == "linux":
        return _linux_start(pid)
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return f"{process.create_time():.6f}"
    except psutil.Error:
        return None


def session_of(pid: int) -> str | None:
    """Return the session of a process, that of its terminal if it has one: the pid of its leader,
    and when that started; None for no process, or if the leader has ended."""
    try:
        leader = os.getsid(pid)
    except OSError:
        return None
    start = process_start(leader)
    return None if start is None else f"{leader}@{start}"


def _linux_start(pid: int) -> str | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat.rpartition(b")")[2].split()
    if len(fields) <= _START_FIELD:
        return None
    if fields[0] in (b"Z", b"X") and int(fields[_THREADS_FIELD]) <= 1:
        return None  # with several threads: its first has ended and another one lives
    return str(int(fields[_START_FIELD]))
