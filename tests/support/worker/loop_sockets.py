"""The sockets inside of what is tested, as they are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import zmq

from mlxsup.supervisor.sockets.transport import LoopSocket, Socket


@dataclass(slots=True, kw_only=True)
class Watched:
    """A socket of the event loop.

    Attributes:
        loop_socket: itself.
        taken: how many messages it has handed on.
    """

    loop_socket: LoopSocket
    taken: int = 0

    @property
    def socket(self) -> Socket:
        """Of ZeroMQ."""
        return self.loop_socket.socket

    @property
    def descriptor(self) -> int:
        """Return the descriptor that the event loop waits for."""
        descriptor = self.socket.getsockopt(zmq.FD)
        assert isinstance(descriptor, int)
        return descriptor


@contextmanager
def watched_sockets() -> Iterator[dict[int, Watched]]:
    """Every socket of the event loop that is made meanwhile, by its ZeroMQ type."""
    made: dict[int, Watched] = {}
    init = LoopSocket.__init__

    def init_watched(
        self: LoopSocket,
        socket: Socket,
        take: Callable[[list[bytes]], None],
        on_drained: Callable[[], None] | None = None,
    ) -> None:
        watched = Watched(loop_socket=self)

        def take_counted(frames: list[bytes]) -> None:
            watched.taken += 1
            take(frames)

        init(self, socket, take_counted, on_drained)
        kind = socket.getsockopt(zmq.TYPE)
        assert isinstance(kind, int)
        made[kind] = watched

    with patch.object(LoopSocket, "__init__", init_watched):
        yield made
