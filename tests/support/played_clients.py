"""The clients' side of the supervisor with a played socket and a played loop."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import zmq

from mlxsup.protocol.client_messages import (
    SUPERVISOR_TO_CLIENT,
    Failed,
    Ping,
    Reply,
)
from mlxsup.protocol.codec import Decoder, encode
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.message import Message
from mlxsup.supervisor.core.events import ConnectionId
from mlxsup.supervisor.core.events import Event as CoreEvent
from mlxsup.supervisor.sockets import clients as clients_module
from mlxsup.supervisor.sockets.clients import Clients
from mlxsup.supervisor.sockets.doors import Doors
from mlxsup.supervisor.sockets.transport import NO_SOURCE

ME, OTHER, THIRD = (ConnectionId(b"\0aaa" + bytes([n])) for n in range(3))

Posted = TypeVar("Posted", bound=CoreEvent)


class Loop:
    """Keeps what is to be called; the test says when it is."""

    def __init__(self) -> None:
        self.moment = 1000.0
        self.timers: list[SimpleNamespace] = []

    def time(self) -> float:
        return self.moment

    def call_at(self, when: float, function: Callable[[], None]) -> Any:
        timer = SimpleNamespace(when=lambda: when, function=function)
        timer.cancel = lambda: self.timers.remove(timer)
        self.timers.append(timer)
        return timer

    def call_later(self, delay_s: float, function: Callable[[], None]) -> Any:
        return self.call_at(self.moment + delay_s, function)

    def waits_s(self) -> list[float]:
        return [round(timer.when() - self.moment, 6) for timer in self.timers]

    def fire(self) -> None:
        """The only timer's time has come."""
        [timer] = self.timers
        self.timers.clear()
        self.moment = timer.when()
        timer.function()


class Stage:
    """A `Clients` with a played socket.

    Attributes:
        full: connections that have no room.
        gone: connections that have ended.
        sent: what went out, and to whom.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        self.now, self.loop = 100.0, Loop()
        self.full: set[ConnectionId] = set()
        self.gone: set[ConnectionId] = set()
        self.sent: list[tuple[bytes, Message]] = []
        self.tried: list[bytes] = []
        self.events: list[CoreEvent] = []
        self.turned_away: list[object] = []
        self.closed: list[object] = []
        self.turns: Iterator[bool] = iter(())
        self.error: int = errno.EHOSTUNREACH
        self.socket: Any = SimpleNamespace(source=7)
        self.doors = Doors(1000)
        decoder = Decoder(SUPERVISOR_TO_CLIENT, is_strict=False)

        def send(frames: list[bytes]) -> bool:
            self.tried.append(frames[0])
            if frames[0] in self.gone:
                raise zmq.ZMQError(self.error)
            if frames[0] not in self.full:
                self.sent.append((frames[0], decoder.decode(frames[1:])))
            return frames[0] not in self.full

        def traced(_: object, take: Callable[[list[bytes]], None]) -> Any:
            self.take = take
            self.socket.send, self.socket.close = send, self.closed.append
            return self.socket

        def monitor(_: object, events: int, take: Callable[[int, int], None]) -> Any:
            self.happens = take
            return SimpleNamespace(
                drain_turn=lambda: next(self.turns), forget=lambda: self.closed.append("forgotten")
            )

        @contextmanager
        def connection_at(descriptor: int, at: str) -> Iterator[object]:
            assert at == str(path)
            yield descriptor

        patches = {
            "bound_socket": lambda *_: None, "TracedSocket": traced, "Monitor": monitor,
            "connection_at": connection_at, "turn_away": self.turned_away.append,
            "process_of": lambda _: 1, "Doors": lambda most: self.doors,
        }  # fmt: skip
        for name, value in patches.items():
            monkeypatch.setattr(clients_module, name, value)
        monkeypatch.setattr(asyncio, "get_running_loop", lambda: self.loop)
        context: Any = None
        self.clients = Clients(
            context, path, post=self.events.append, now=lambda: self.now, max_connections=1000
        )

    def say(self, message: Message, id: bytes = ME, descriptor: int = 7) -> None:
        """A client says something, over a connection that is let in."""
        self.socket.source = descriptor
        if descriptor != NO_SOURCE and not self.doors.knows(descriptor):
            self.happens(zmq.EVENT_ACCEPTED, descriptor)
        self.take([id, *encode(message)])

    def ask(self, id: str = "r", connection: bytes = ME, descriptor: int = 7) -> None:
        self.say(Ping(id=RequestId(id)), connection, descriptor)

    def of_kind(self, kind: type[Posted]) -> list[Posted]:
        return [event for event in self.events if type(event) is kind]

    def failed(self) -> list[Failed]:
        """All that was sent, if each is a refusal or an end."""
        found = [message for _, message in self.sent]
        failed = [message for message in found if isinstance(message, Failed)]
        assert failed == found
        return failed

    def sent_to(self, id: bytes = ME) -> list[Message]:
        return [message for to, message in self.sent if to == id]


def reply(id: str = "r", size: int = 0) -> Reply:
    return Reply(id=RequestId(id), value={"x": "y" * size})
