"""A worker does not outlive its supervisor (E6)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

ORPHANED_EXIT = 1
"""The exit code of an orphan: nobody is left to read it, but it must not be 0."""

_PR_SET_PDEATHSIG = 1


class OrphanedError(Exception):
    """The supervisor named in the launch spec is not this process's parent."""


def die_with_parent() -> None:
    """On Linux: asks the kernel to kill this process when its parent thread ends.

    Works even while the GIL is held forever. Other systems have nothing like it.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def check_parent(supervisor_pid: int) -> None:
    """Notices a supervisor that died before `die_with_parent` was called.

    Raises:
        OrphanedError: the parent is another process.
    """
    parent = os.getppid()
    if parent != supervisor_pid:
        raise OrphanedError(f"the daemon {supervisor_pid} is gone: the parent is {parent}")


def watch_pipe(descriptor: int) -> None:
    """Starts a thread that ends the process at once when the pipe reaches its end."""

    def watch() -> None:
        while os.read(descriptor, 4096):
            pass
        os._exit(ORPHANED_EXIT)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
