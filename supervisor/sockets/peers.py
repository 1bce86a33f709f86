"""The processes behind the connections that libzmq has accepted, and how to end a connection."""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SOL_LOCAL = 0
_LOCAL_PEERPID = 2
"""macOS: <sys/un.h>."""

_CREDENTIALS = struct.Struct("3i")
"""Linux: pid, uid, gid."""


@contextmanager
def connection_at(descriptor: int, path: str) -> Iterator[socket.socket | None]:
    """The connection behind one of libzmq's descriptors, if it came in at this path.

    libzmq may have closed the descriptor in the meantime, and something else may have it: we
    inspect and shut down a duplicate, which stays what it is.
    """
    try:
        # Fails for a file that is not a socket, and for a closed descriptor.
        duplicate = os.dup(descriptor)
    except OSError:
        yield None
        return
    try:
        connection = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        yield None
        return
    with connection:
        yield connection if _came_in_at(connection, path) else None


def process_of(connection: socket.socket) -> int | None:
    """The pid of the other end; None if the platform does not say, or if it is not visible in
    our namespace."""
    try:
        if sys.platform == "darwin":
            return connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID) or None
        if sys.platform == "linux":
            size = _CREDENTIALS.size
            found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            return int(_CREDENTIALS.unpack(found)[0]) or None
    except OSError:  # it has ended
        pass
    return None


def turn_away(connection: socket.socket) -> None:
    """Ends a connection; libzmq sees its end as if the other side had closed it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # it has ended by itself
        pass


def _came_in_at(connection: socket.socket, path: str) -> bool:
    try:
        connection.getpeername()  # a listener has no peer
        return connection.family == socket.AF_UNIX and connection.getsockname() == path
    except OSError:
        return False
