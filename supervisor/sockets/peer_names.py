"""Names the process behind each connection, or its terminal, so that requests count together."""

from __future__ import annotations

from mlxsup.protocol.client_messages import ClientMessage, Generate
from mlxsup.protocol.ids import TERMINAL

from ..process_identity import process_start, session_of


class PeerNames:
    """The names of the processes that have a connection, by the connection's descriptor.

    A connection keeps the names that it got when it came: a process may have ended, and another one
    may have its pid, by the time that its last message is read. Descriptors are reused, so a
    newcomer replaces whatever its descriptor stood for.

    A request that wants to count for its terminal gets the name of its session, found here and not
    believed: all that it can gain is to share one account with others.
    """

    def __init__(self) -> None:
        # Bounded by the connections that libzmq holds.
        self._names: dict[int, str] = {}
        self._terminals: dict[int, str] = {}

    def come(self, descriptor: int, process: int | None) -> None:
        """A connection was accepted.

        Args:
            descriptor: of the connection.
            process: its peer's pid; None if the platform does not say.
        """
        start = None if process is None else process_start(process)
        session = None if process is None else session_of(process)
        self._names[descriptor] = "" if start is None else f"process {process}@{start}"
        self._terminals[descriptor] = "" if session is None else f"{TERMINAL} {session}"

    def go(self, descriptor: int) -> None:
        """A connection has ended; unknown ones are ignored."""
        self._names.pop(descriptor, None)
        self._terminals.pop(descriptor, None)

    def of(self, descriptor: int, message: ClientMessage) -> str:
        """On whose behalf a message is: `process 1234@567`, pid and start, or `terminal 89@123` if
        it names its terminal; empty if the process could not be found."""
        process = self._names.get(descriptor, "")
        if isinstance(message, Generate) and message.client == TERMINAL:
            return self._terminals.get(descriptor) or process
        return process
