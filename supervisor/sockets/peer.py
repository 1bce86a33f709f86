"""The process at the other end of a connection, and how to end a connection."""

from __future__ import annotations

import socket
import struct
import sys
from dataclasses import dataclass

from mlxsup.protocol.client_messages import ClientMessage, Generate
from mlxsup.protocol.ids import TERMINAL

from ..core.accounting import process_name
from ..process_identity import process_start, session_of

_SOL_LOCAL = 0
_LOCAL_PEERCRED = 1
_LOCAL_PEERPID = 2
"""macOS: <sys/un.h>."""

_XUCRED = struct.Struct("2I")
"""macOS: the beginning of `struct xucred`, its version and the uid."""

_UCRED = struct.Struct("3i")
"""Linux: pid, uid, gid."""

_DRAIN_BYTES = 64 * 1024


def credentials_of(connection: socket.socket) -> tuple[int | None, int | None]:
    """Return the pid and the uid of the other end; None where the platform does not say.

    The pid is also None if it is not visible in our namespace.
    """
    try:
        if sys.platform == "linux":
            found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            pid, uid, _ = _UCRED.unpack(found)
            return pid or None, uid
        if sys.platform == "darwin":
            found = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, 128)
            _, uid = _XUCRED.unpack_from(found)
            return connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID) or None, uid
    except OSError:  # it has ended
        pass
    return None, None


def end(connection: socket.socket) -> None:
    """End a connection so that the peer reads what it was sent, and then an ordinary end.

    To close a socket with something unread would reset the connection, as the death of a daemon
    does, and a client tells the two apart.
    """
    try:
        connection.shutdown(socket.SHUT_RDWR)
        # Nothing can come any more; what has come is bounded by the socket's buffer.
        while connection.recv(_DRAIN_BYTES):
            pass
    except OSError:  # it has ended by itself
        pass
    connection.close()


@dataclass(frozen=True, slots=True)
class Names:
    """On whose behalf the messages of a connection are: its process's, or its terminal's.

    A connection keeps the names that it got in its handshake: a process may have ended, and another
    one may have its pid, by the time that its last message is read.

    A request that wants to count for its terminal gets the name of its session, found here and not
    believed: all that it can gain is to share one account with others.

    Attributes:
        process: `process 1234@567`, pid and start; empty if it could not be found.
        terminal: `terminal 89@123`; empty if it could not be found.
    """

    process: str = ""
    terminal: str = ""

    @classmethod
    def of_process(cls, pid: int | None) -> Names:
        """Return the names for a pid; None if the platform does not say."""
        if pid is None:
            return cls()
        start, session = process_start(pid), session_of(pid)
        return cls(
            process="" if start is None else process_name(pid, start),
            terminal="" if session is None else f"{TERMINAL} {session}",
        )

    def of(self, message: ClientMessage) -> str:
        """Return the name that a message counts for."""
        if isinstance(message, Generate) and message.client == TERMINAL:
            return self.terminal or self.process
        return self.process
