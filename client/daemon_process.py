"""The daemon's process as its clients see it: its pid, and whether it only lacks the CPU."""

from __future__ import annotations

from pathlib import Path

from mlxsup.protocol.folders import LOCK_NAME

SCHEME = "ipc://"


def daemon_pid(endpoint: str) -> int | None:
    """Return the pid that the lock beside a daemon's socket names; None if there is none.

    Args:
        endpoint: `ipc://…`; any other names no process of this machine.
    """
    if not endpoint.startswith(SCHEME):
        return None
    lock = Path(endpoint.removeprefix(SCHEME)).parent / LOCK_NAME
    try:
        return int(lock.read_bytes()[:256].split()[0])
    except (OSError, ValueError, IndexError):
        return None


def is_busy(endpoint: str) -> bool:
    """True if the daemon wants to run: it waits for the CPU or for a disk, or computes.

    A daemon that sleeps has done all that it had to do, so it has sent what it owed; one that was
    stopped or has ended sends nothing any more. On macOS the system calls a sleeping process
    running, too, so there only a stopped or ended one is not busy.
    """
    import psutil  # only when a daemon is silent: every command would wait for it

    pid = daemon_pid(endpoint)
    if pid is None:
        return False
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
    except (psutil.Error, ValueError):  # it has ended, or the number is no pid
        return False
