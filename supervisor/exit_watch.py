"""When a child has exited, seen while it can still be waited for and its group still has its id."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import sys
import threading
from collections.abc import Callable


def watch_exit(pid: int, on_exit: Callable[[], None]) -> Callable[[], None]:
    """Has the event loop call `on_exit` once, when the child has exited and was not reaped yet.

    Args:
        pid: of a child of this process.
        on_exit: has to reap it.

    Returns:
        What ends the watch before the child has exited.
    """
    try:
        descriptor = _pollable(pid)
    except ProcessLookupError:  # macOS knows no such process once it waits to be reaped
        return asyncio.get_running_loop().call_soon(on_exit).cancel
    except OSError:
        descriptor = None  # too many open files, or a kernel before 5.3
    if descriptor is None:
        return _watch_with_thread(pid, on_exit)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)

    def exited() -> None:
        stop()
        on_exit()

    loop.add_reader(descriptor, exited)
    return stop


if sys.platform == "darwin":

    def _pollable(pid: int) -> int | None:
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

    def _pollable(pid: int) -> int | None:
        return os.pidfd_open(pid)


def _watch_with_thread(pid: int, on_exit: Callable[[], None]) -> Callable[[], None]:
    loop = asyncio.get_running_loop()
    is_stopped = threading.Event()

    def tell() -> None:
        if not is_stopped.is_set():
            on_exit()

    def wait() -> None:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
            loop.call_soon_threadsafe(tell)

    threading.Thread(target=wait, name=f"exit-of-{pid}", daemon=True).start()
    return is_stopped.set
