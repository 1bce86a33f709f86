"""Reads files of other people, regular ones only and never more of one than a limit; writes our own
whole or not at all, and locks them."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

MIB = 2**20

KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Also a limit for the size of a file."""

WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}


def room_hint(error: OSError, otherwise: str) -> str:
    """Return what to do about a file that cannot be written: make room for it, if that is why.

    Args:
        error: the reason why.
        otherwise: the advice for every other reason.
    """
    return f"free some space, or {otherwise}" if error.errno in FULL_DISK else otherwise


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file; a pipe or a device is refused, and never waited for.

    Args:
        path: the file; links are followed.
        max_bytes: that it may have, a whole number of MiB.

    Raises:
        OSError: it cannot be read, is no regular file, or has more bytes than it may.
    """
    with open(open_regular(path), "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        what = f"it has more than the {max_bytes // MIB} MiB that are read of such a file"
        raise OSError(errno.EFBIG, what, str(path))
    return data


def open_regular(path: Path) -> int:
    """Open a regular file for reading and return its descriptor.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    # Without O_NONBLOCK, a named pipe keeps its reader waiting until it has a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, f"it is {kind_of(mode)}, not a regular file", str(path))


def kind_of(mode: int) -> str:
    """Return what a file that is not regular is called, with its article.

    Args:
        mode: its `st_mode`.
    """
    return next((kind for is_kind, kind in KINDS if is_kind(mode)), "something else")


def replace_file(path: Path, data: bytes, *, is_durable: bool = False) -> None:
    """Write a file of its owner alone in the place of another one, of which no reader sees half.

    Args:
        path: the file, which has one writer at a time.
        data: its content.
        is_durable: whether it outlives a power cut.

    Raises:
        OSError: it cannot be written; what was there stays.
    """
    write_draft(path, data, is_durable=is_durable).replace(path)


def write_draft(path: Path, data: bytes, *, is_durable: bool) -> Path:
    """Write the file that is to replace another one, as `replace_file`, and return its path."""
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)  # of a writer that was killed
    with new_file(draft) as file:
        file.write(data)
        if is_durable:
            file.flush()
            os.fsync(file.fileno())
    return draft


def lock(descriptor: int, on_wait: Callable[[], None] = lambda: None) -> None:
    """Wait until no other process has a file or a folder locked, and hold the lock until it is
    closed; a disk without locks is used without one.

    The kernel drops a lock when its process ends, however it ends.

    Args:
        descriptor: of the file.
        on_wait: called if there is another one to wait for; what it raises ends the waiting.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        on_wait()
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise


@contextmanager
def new_file(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """Give a new file to write to, which is removed if the body fails.

    Raises:
        FileExistsError: there is one already, or a link.
        OSError: it cannot be made or written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "wb") as file:
            yield file
    except BaseException:
        path.unlink(missing_ok=True)
        raise
