"""A Unix socket that clients or a worker connect to, from its file to the sockets it accepts.

libzmq does not accept here: version 4.3.5 ends the process when no file is free, accepts without
asking, and cannot end a single connection.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

from .limits import free_files

BACKLOG = 4096
"""How many connections the kernel keeps until they are accepted, if it may keep as many."""

ACCEPTED_IN_TURN = 128
"""How many connections to accept before others get their turn."""

RETRY_S = 0.1
"""The pause before the next attempt after no file was free."""

WARNING_INTERVAL_S = 60.0


class Listener:
    """Accepts connections, as long as enough files stay free.

    Args:
        path: of the socket; what is there is replaced.
        take: called with each connection.
        kept_files: how many files must stay free.
        warn: called, at most once a minute, with why connections wait to be accepted.

    Raises:
        OSError: the socket cannot be made.
    """

    def __init__(
        self,
        path: Path,
        take: Callable[[socket.socket], None],
        *,
        kept_files: int = 0,
        warn: Callable[[str], None] = lambda cause: None,
    ) -> None:
        self._path = path
        self._take = take
        self._kept_files = kept_files
        self._warn = warn
        self._warned_at: float | None = None
        self._loop = asyncio.get_running_loop()
        self._is_accepting = False
        self._is_closed = False
        # None once its file is removed: the path may be another daemon's then.
        self._identity: tuple[int, int] | None
        self._socket, self._identity = _listen(path)
        self._start()

    @property
    def is_reachable(self) -> bool:
        """True if the socket's file is there, and is not another one."""
        return self._identity is not None and _identity_of(self._path) == self._identity

    def bind_again(self) -> None:
        """Make the socket's file again.

        Raises:
            OSError: it cannot be made; connections are accepted as before.
        """
        fresh, identity = _listen(self._path)
        self.drain()  # those who came before the file was gone
        self._stop()
        self._socket.close()
        self._socket, self._identity = fresh, identity
        self._start()

    def drain(self) -> None:
        """Accept all that wait."""
        while self._is_accepting and self._accept():
            pass

    def close(self) -> None:
        """Close the socket and remove its file; those who were not accepted are reset.

        Raises:
            OSError: the file cannot be removed; a second call tries again.
        """
        self._stop()
        self._is_closed = True
        self._socket.close()
        if self.is_reachable:
            self._path.unlink(missing_ok=True)
        self._identity = None

    def _start(self) -> None:
        if not self._is_accepting and not self._is_closed:
            self._is_accepting = True
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def _stop(self) -> None:
        if self._is_accepting:
            self._is_accepting = False
            self._loop.remove_reader(self._socket.fileno())

    def _accept(self) -> bool:
        """Accept some; return whether there may be more."""
        free = free_files() - self._kept_files
        if free <= 0:
            self._wait("the limit of open files is reached")
            return False
        for _ in range(min(free, ACCEPTED_IN_TURN)):
            try:
                accepted, _ = self._socket.accept()
            except BlockingIOError:
                return False
            except ConnectionAbortedError:
                continue
            except OSError as error:  # no file or no memory is left, here or on the machine
                self._wait(error.strerror or str(error))
                return False
            self._take(accepted)
        return True

    def _wait(self, cause: str) -> None:
        """Accept nothing for a moment; the kernel keeps those who come."""
        self._stop()
        self._loop.call_later(RETRY_S, self._start)
        now = self._loop.time()
        if self._warned_at is None or now - self._warned_at >= WARNING_INTERVAL_S:
            self._warned_at = now
            self._warn(cause)


def _listen(path: Path) -> tuple[socket.socket, tuple[int, int] | None]:
    """Return a socket that listens in the place of whatever the path was, and its file's identity.

    Raises:
        OSError: it cannot be made.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener, _identity_of(path)


def _identity_of(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from others; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
