"""Who holds a runtime folder though nobody answers there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
from mlxsup.protocol.folders import LOCK_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class LockHolder:
    """A daemon that lives.

    Attributes:
        pid: its process.
        is_stopped: as by SIGSTOP or Ctrl-Z.
    """

    pid: int
    is_stopped: bool


def lock_holder(endpoint: str) -> LockHolder | None:
    """The daemon of an endpoint; None where none lives, or none that we may look at.

    The lock is not tried: a daemon that starts in that instant would find it taken. Whoever has the
    file open is the holder, whatever process has the written pid by now.
    """
    lock = Path(endpoint.removeprefix("ipc://")).parent / LOCK_NAME
    try:
        pid = int(lock.read_text().split()[0])
        process = psutil.Process(pid)
        real = lock.resolve()
        if not any(Path(file.path) == real for file in process.open_files()):
            return None
        return LockHolder(pid=pid, is_stopped=process.status() == psutil.STATUS_STOPPED)
    except (OSError, ValueError, IndexError, psutil.Error):
        return None
