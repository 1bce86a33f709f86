"""One download of a repository at a time on this machine, and none while it is removed."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LOCKS = ".locks"
LOCK_NAME = "mlxsup.lock"
_UNSUPPORTED = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}


class InUseError(Exception):
    """Another process of this machine downloads or removes the repository."""


def lock_of(folder: Path) -> Path:
    """The file that is locked for a repository.

    Args:
        folder: where the cache has, or would have, the repository.
    """
    return folder.parent / LOCKS / folder.name / LOCK_NAME


@contextmanager
def sole_download(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Waits until no other process of this machine has the lock, and holds it.

    The kernel drops the lock when its process ends, however it ends. A cache on a disk without
    locks is used without one: what huggingface_hub writes is safe, but half a file may be lost.

    Args:
        path: of `lock_of`.
        on_wait: called if there is another one to wait for; what it raises ends the waiting.

    Raises:
        OSError: the file cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        yield


@contextmanager
def nobody_downloads(path: Path) -> Iterator[None]:
    """Holds the lock.

    Args:
        path: of `lock_of`.

    Raises:
        InUseError: another process has it.
        OSError: the file cannot be made.
    """

    def refuse() -> None:
        raise InUseError

    with sole_download(path, refuse):
        yield
