"""Reads a model's weights into the system's page cache while its process still imports.

The import of MLX takes a second or more in which the disk has nothing to do. No MLX here, and no
effect but that of time: whatever goes wrong, the load reads the same files and says so.

At most half of the available memory is read ahead, because more would push out what was read
first.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

CHUNK_BYTES = 1024 * 1024
"""How much is looked at, and read if it is not in memory, at a time."""

AVAILABLE_SHARE = 2
"""Divides the available memory: no more than one part is read, because more could push out what
was read first."""


@contextmanager
def reading_ahead(files: Sequence[Path]) -> Iterator[None]:
    """Reads files, in this order, on its own thread until the block is left; what is in memory
    already costs a look. Does nothing but on Linux, which can say what is in memory."""
    if sys.platform != "linux":
        yield
        return
    is_over = threading.Event()
    thread = threading.Thread(
        target=read_files, args=(files, is_over), name="read-ahead", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()  # a chunk at most


def read_files(files: Sequence[Path], is_over: threading.Event) -> None:
    """Reads what is not in memory yet, until that is over or has taken its share of the memory."""
    left_bytes = psutil.virtual_memory().available // AVAILABLE_SHARE
    buffer = bytearray(CHUNK_BYTES)
    for path in files:
        try:
            with open(path, "rb", buffering=0) as file:
                left_bytes = _read_file(file.fileno(), buffer, left_bytes, is_over)
        except OSError:
            return  # the load will say so, unless the file system just cannot say what it holds
        if left_bytes <= 0:
            return


def _read_file(
    descriptor: int, buffer: bytearray, left_bytes: int, is_over: threading.Event
) -> int:
    """Reads one file; returns how many bytes may still be read, 0 or less to read no more."""
    size = os.fstat(descriptor).st_size
    for offset in range(0, size, CHUNK_BYTES):
        if is_over.is_set() or left_bytes <= 0:
            return 0
        # The kernel reads a little beyond what is asked for, so the first byte says nothing.
        if not _is_in_memory(descriptor, min(offset + CHUNK_BYTES, size) - 1):
            left_bytes -= os.preadv(descriptor, [buffer], offset)
    return left_bytes


def _is_in_memory(descriptor: int, offset: int) -> bool:
    """Whether a byte can be read without waiting for the disk."""
    if sys.platform != "linux":
        raise NotImplementedError
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
