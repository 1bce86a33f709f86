"""Notices that the reader of standard output has gone, while there is nothing to write."""

from __future__ import annotations

import os
import select
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_GONE = select.POLLERR | select.POLLHUP


@contextmanager
def reader_watched(give_up: Callable[[], None]) -> Iterator[None]:
    """Make the body end when the reader goes, even if it waits for something else.

    Args:
        give_up: called by another thread; makes whatever the body waits for fail.

    Raises:
        BrokenPipeError: the reader is gone, as a write would find out.
    """
    descriptor = _watchable()
    if descriptor is None:
        yield
        return
    is_gone = threading.Event()
    end, ender = os.pipe()

    def watch() -> None:
        poller = _poller(descriptor)
        poller.register(end, select.POLLIN)
        if dict(poller.poll()).get(descriptor, 0) & _GONE:
            is_gone.set()
            give_up()

    thread = threading.Thread(target=watch, name="mlxsup-reader", daemon=True)
    thread.start()
    try:
        yield
    except Exception:
        if not is_gone.is_set():
            raise
    finally:
        os.close(ender)
        thread.join()
        os.close(end)
    if is_gone.is_set():
        raise BrokenPipeError


def check_reader() -> None:
    """Look once, without waiting.

    Raises:
        BrokenPipeError: the reader is gone.
    """
    descriptor = _watchable()
    if descriptor is not None and dict(_poller(descriptor).poll(0)).get(descriptor, 0) & _GONE:
        raise BrokenPipeError


def _poller(descriptor: int) -> select.poll:
    poller = select.poll()
    # Linux always reports it; macOS only looks for what it is asked for.
    poller.register(descriptor, select.POLLHUP)
    return poller


def _watchable() -> int | None:
    """Return the descriptor of standard output if it is a pipe or a socket."""
    try:
        descriptor = sys.stdout.fileno()
        mode = os.fstat(descriptor).st_mode
    except (OSError, ValueError):
        return None
    return descriptor if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else None
