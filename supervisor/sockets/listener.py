"""The Unix socket that clients connect to, from its file to the connections it has accepted.

libzmq does not accept here: version 4.3.5 ends the process when no file is free, accepts without
asking, and cannot end a single connection. Up to 64 refused connections
are held for two seconds, because a typed error says more than a closed connection.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

from .limits import KEPT_FILES, free_files

BACKLOG = 4096
"""How many connections the kernel keeps until they are accepted, if it may keep as many."""

ACCEPTED_IN_TURN = 128
"""How many connections to accept before others get their turn."""

WARNING_INTERVAL_S = 60.0


class Listener:
    """Accepts connections, as long as enough files stay free for workers.

    Args:
        path: of the socket; what is there is replaced.
        take: called with each connection.
        now: the time, in seconds.
        warn: called, at most once a minute, with why connections wait to be accepted.

    Raises:
        OSError: the socket cannot be made.
    """

    def __init__(
        self,
        path: Path,
        take: Callable[[socket.socket], None],
        *,
        now: Callable[[], float],
        warn: Callable[[str], None],
    ) -> None:
        self._path = path
        self._take = take
        self._now = now
        self._warn = warn
        self._warned_at: float | None = None
        self._loop = asyncio.get_running_loop()
        self._is_accepting = False
        self._is_closed = False
        self._socket, self._identity = listen(path)
        self.start()

    @property
    def is_reachable(self) -> bool:
        """True if the socket's file is there, and is not another one."""
        return identity_of(self._path) == self._identity

    def bind_again(self) -> None:
        """Make the socket's file again.

        Raises:
            OSError: it cannot be made; connections are accepted as before.
        """
        fresh, identity = listen(self._path)
        while self._is_accepting and self._accept():
            pass  # those who came before the file was gone
        self._stop()
        self._socket.close()
        self._socket, self._identity = fresh, identity
        self.start()

    def start(self) -> None:
        """Accept again, if files had run out."""
        if not self._is_accepting and not self._is_closed:
            self._is_accepting = True
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def close(self) -> None:
        """Close the socket and remove its file; those who were not accepted are reset."""
        self._stop()
        self._is_closed = True
        self._socket.close()
        if self.is_reachable:
            self._path.unlink(missing_ok=True)

    def _stop(self) -> None:
        if self._is_accepting:
            self._is_accepting = False
            self._loop.remove_reader(self._socket.fileno())

    def _accept(self) -> bool:
        """Accept some; return whether there may be more."""
        free = free_files() - KEPT_FILES
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
        """Accept nothing until `start` is called; the kernel keeps those who come."""
        self._stop()
        now = self._now()
        if self._warned_at is None or now - self._warned_at >= WARNING_INTERVAL_S:
            self._warned_at = now
            self._warn(cause)


def listen(path: Path) -> tuple[socket.socket, tuple[int, int] | None]:
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
    return listener, identity_of(path)


def identity_of(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from others; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
