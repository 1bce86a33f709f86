"""Names the process behind each connection, so that its requests count together."""

from __future__ import annotations

from ..process_identity import process_start


class PeerNames:
    """The names of the processes that have a connection, by the connection's descriptor.

    A connection keeps the name that it got when it came: a process may have ended, and another one
    may have its pid, by the time that its last message is read. Descriptors are reused, so a
    newcomer replaces whatever its descriptor stood for.
    """

    def __init__(self) -> None:
        # Bounded by the connections that libzmq holds.
        self._names: dict[int, str] = {}

    def come(self, descriptor: int, process: int | None) -> None:
        """A connection was accepted.

        Args:
            descriptor: of the connection.
            process: its peer's pid; None if the platform does not say.
        """
        start = None if process is None else process_start(process)
        self._names[descriptor] = "" if start is None else f"process {process}@{start}"

    def go(self, descriptor: int) -> None:
        """A connection has ended; unknown ones are ignored."""
        self._names.pop(descriptor, None)

    def of(self, descriptor: int) -> str:
        """`process 1234@567`: pid and start; empty if the process could not be found."""
        return self._names.get(descriptor, "")
