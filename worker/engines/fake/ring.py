"""What the fake engine has instead of collectives: ranks that wait for each other.

As with MLX's ring, a rank that is stopped holds up all others for ever, and one that is gone may
show as an error.
"""

from __future__ import annotations

import socket
import time

from ...engine import Rank

MARK = b"."


class FakeRing:
    """Connections from rank 0 to all others.

    Args:
        rank: of this process; rank 0 listens, and the others come.
    """

    def __init__(self, rank: Rank) -> None:
        host, _, port = rank.addresses[0].rpartition(":")
        self._is_first = rank.number == 0
        if self._is_first:
            with socket.create_server((host, int(port))) as listening:
                self._peers = [listening.accept()[0] for _ in range(rank.size - 1)]
        else:
            self._peers = [_connect(host, int(port))]

    def meet(self) -> None:
        """Wait until all ranks have come here.

        Raises:
            RuntimeError: a rank is gone.
        """
        try:
            if not self._is_first:
                self._peers[0].sendall(MARK)
            arrived = [peer.recv(1) for peer in self._peers]
            if not all(arrived):
                raise RuntimeError("[fake ring] the peer is gone")
            if self._is_first:
                for peer in self._peers:
                    peer.sendall(MARK)
        except OSError as error:
            raise RuntimeError(f"[fake ring] {error}") from None

    def close(self) -> None:
        """Close the connections."""
        for peer in self._peers:
            peer.close()


def _connect(host: str, port: int) -> socket.socket:
    """Connect to a rank that may not listen yet, as MLX's ring does."""
    while True:
        try:
            return socket.create_connection((host, port))
        except ConnectionRefusedError:
            time.sleep(0.01)
