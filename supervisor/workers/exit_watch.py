"""Notices that a child has exited, while it is not reaped yet and its group still has its id.

A worker's group is killed between its exit and its reaping, because only then is its id certain to
be that of the group; asyncio's own transport reaps first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import sys
import threading
from collections.abc import Callable


def watch_exit(pid: int, on_exit: Callable[[], None]) -> Callable[[], None]:
    """Makes the event loop call `on_exit` once, when the child has exited and is not reaped yet.

    Args:
        pid: a child of this process.
        on_exit: must reap it.

    Returns:
        A function that ends the watch early.

    Raises:
        OSError: macOS cannot watch it, because no file can be opened.
    """
    try:
        descriptor = pollable(pid)
    except ProcessLookupError:  # to macOS, a process that waits to be reaped does not exist
        return asyncio.get_running_loop().call_soon(on_exit).cancel
    except OSError:  # too many open files, or a kernel before 5.3
        if sys.platform == "darwin":
            raise
        return watch_with_thread(pid, on_exit)
    watch = _PolledExit(pid, descriptor, on_exit)
    return lambda: watch.stop()


class _PolledExit:
    """Waits for a descriptor, and then, if necessary, for a tracer that holds the dead process."""

    def __init__(self, pid: int, descriptor: int, on_exit: Callable[[], None]) -> None:
        self._pid = pid
        self._on_exit = on_exit
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(descriptor, self._exited)
        self.stop = self._stop_polling

    def _stop_polling(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)

    def _exited(self) -> None:
        self._stop_polling()
        if can_be_reaped(self._pid):
            self._on_exit()
        else:
            self.stop = watch_with_thread(self._pid, self._on_exit)


def can_be_reaped(pid: int) -> bool:
    """Whether waiting for it would not block: a debugger sees its exit before its parent does."""
    if sys.platform == "darwin":
        return True
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


if sys.platform == "darwin":

    def pollable(pid: int) -> int:
        """A descriptor that can be read once the process has exited."""
        queue = select.kqueue()
        change = select.kevent(
            pid,
            filter=select.KQ_FILTER_PROC,
            flags=select.KQ_EV_ADD | select.KQ_EV_ONESHOT,
            fflags=select.KQ_NOTE_EXIT,
        )
        try:
            queue.control([change], 0)
            return os.dup(queue.fileno())
        finally:
            queue.close()

else:

    def pollable(pid: int) -> int:
        """A descriptor that can be read once the process has exited."""
        return os.pidfd_open(pid)


def watch_with_thread(pid: int, on_exit: Callable[[], None]) -> Callable[[], None]:
    """See `watch_exit`; a thread waits, since there is no descriptor."""
    loop = asyncio.get_running_loop()
    is_stopped = threading.Event()

    def tell() -> None:
        if not is_stopped.is_set():
            on_exit()

    def wait() -> None:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any longer
            loop.call_soon_threadsafe(tell)

    threading.Thread(target=wait, name=f"exit-of-{pid}", daemon=True).start()
    return is_stopped.set
