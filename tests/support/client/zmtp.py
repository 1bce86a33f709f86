"""ZMTP by hand: the handshake of a DEALER, and what comes of bytes."""

from __future__ import annotations

from mlxsup.supervisor.sockets.zmtp import GREETING, Inbound

READY = b"\x04\x29\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"

PING = b"\x04\x18\x04PING\0\x0a" + bytes(range(17))
"""Is to be answered within a second, with the first 16 bytes of its context, which has 17."""


def read(inbound: Inbound, data: bytes) -> list[list[bytes]]:
    """The messages that are complete with these bytes."""
    inbound.feed(data)
    found = []
    while (message := inbound.next()) is not None:
        if message:
            found.append(message)
    return found


def ready() -> Inbound:
    inbound = Inbound()
    assert read(inbound, GREETING + READY) == []
    assert inbound.is_ready
    inbound.answers.clear()
    return inbound
