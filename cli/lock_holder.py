"""The daemon that holds a runtime folder, although none answers there."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from mlxsup.protocol.discovery import socket_at
from mlxsup.protocol.folders import LOCK_NAME

BEATING_S = 10.0
"""A daemon that has not touched its lock for this long does nothing any more."""


class LockHolder(NamedTuple):
    """A live daemon.

    Attributes:
        pid: its process.
        is_stopped: whether it was stopped, by SIGSTOP or Ctrl-Z.
        is_beating: whether its event loop turns: it touches its lock each second.
    """

    pid: int
    is_stopped: bool
    is_beating: bool


def lock_holder(endpoint: str) -> LockHolder | None:
    """Return the daemon of an endpoint; None if there is none, or none that we may inspect.

    We do not try the lock: a daemon starting at that instant would find it taken. The holder is the
    process that has the file open, no matter which process has the recorded pid by now.
    """
    lock = socket_at(endpoint).with_name(LOCK_NAME)
    try:
        pid = int(lock.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    import psutil  # most commands never need it

    try:
        process = psutil.Process(pid)
        real = lock.resolve()
        if not any(Path(file.path) == real for file in process.open_files()):
            return None
        return LockHolder(
            pid=pid,
            is_stopped=process.status() == psutil.STATUS_STOPPED,
            is_beating=is_beating(endpoint),
        )
    except (OSError, ValueError, psutil.Error):
        return None


def is_beating(endpoint: str) -> bool:
    """True if a daemon has touched its lock there in the last seconds; it may have ended since."""
    lock = socket_at(endpoint).with_name(LOCK_NAME)
    try:
        return abs(time.time() - lock.stat().st_mtime) < BEATING_S
    except OSError:
        return False


def is_forbidden(endpoint: str) -> bool:
    """True if there is a socket, or a folder for it, that this user may not use."""
    socket = socket_at(endpoint)
    try:
        socket.stat()
    except PermissionError:
        return True
    except OSError:
        return False
    return not os.access(socket, os.W_OK)
