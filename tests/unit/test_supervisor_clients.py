"""What a client is owed, when it is tried again and given up, with a played socket."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from mlxsup.protocol.client_messages import (
    SUPERVISOR_TO_CLIENT,
    Alive,
    Cancel,
    Done,
    Event,
    Failed,
    Ping,
    Reply,
    Subscribe,
)
from mlxsup.protocol.codec import Decoder, encode
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import FinishReason
from mlxsup.supervisor.core.events import ClientGone, ClientSaid, ClientTooSlow, ConnectionId
from mlxsup.supervisor.sockets import clients as clients_module
from mlxsup.supervisor.sockets.clients import Clients
from mlxsup.supervisor.sockets.doors import Doors
from mlxsup.supervisor.sockets.outbox import MESSAGE_OVERHEAD_BYTES
from mlxsup.supervisor.sockets.transport import NO_SOURCE

ME, OTHER, THIRD = (ConnectionId(b"\0aaa" + bytes([n])) for n in range(3))
GIVEN_UP = "the client did not read its answers; they were given up"


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
        self.events: list[Any] = []
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

    def of_kind(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if type(event) is kind]

    def sent_to(self, id: bytes = ME) -> list[Message]:
        return [message for to, message in self.sent if to == id]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stage:
    return Stage(monkeypatch, tmp_path / "c.sock")


def reply(id: str = "r", size: int = 0) -> Reply:
    return Reply(id=RequestId(id), value={"x": "y" * size})


# ---------------------------------------------------------------- refusals


def test_each_refusal_says_all_that_its_client_needs(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients_module, "MAX_OPEN_PER_CONNECTION", 1)
    own = "a client must not set a routing id: another connection could take its place"
    stage.ask("a", b"me")
    stage.ask("b", b"\1aaaa")
    stage.ask("c", ME, NO_SOURCE)
    stage.ask("d")
    stage.ask("e")
    codes = ["invalid_request"] * 3 + ["overloaded"]
    texts = [own, own, "a client must speak ZMTP 3, which ZeroMQ 4 does"]
    texts.append("a connection has at most 1 requests open")
    failed: list[Any] = [message for _, message in stage.sent]
    assert [(f.id, f.error["code"], f.error["message"]) for f in failed] == list(
        zip("abce", codes, texts, strict=True)
    )
    assert [said.message.id for said in stage.of_kind(ClientSaid)] == ["d"]


@pytest.mark.parametrize(("turns", "asked"), [([True] * 9, 8), ([True, False, True], 2)])
def test_the_news_of_an_arrival_are_looked_for_as_far_as_they_can_have_come(
    stage: Stage, turns: list[bool], asked: int
) -> None:
    stage.turns = iter(turns)
    stage.socket.source = 8
    stage.take([ME, *encode(Ping(id=RequestId("r")))])
    assert len(list(stage.turns)) == len(turns) - asked
    stage.turns = iter([True])
    stage.ask("s", OTHER, 9)  # of which it has heard
    assert list(stage.turns) == [True]


# ---------------------------------------------------------------- retries


def test_who_has_no_room_is_tried_after_twice_the_time_and_half_a_second_at_most(
    stage: Stage,
) -> None:
    stage.ask()
    stage.full.add(ME)
    stage.clients.send(ME, reply())
    waits_s = []
    for _ in range(12):
        waits_s += stage.loop.waits_s()
        stage.loop.fire()
    assert waits_s == [0.001 * 2**n for n in range(9)] + [0.5] * 3
    stage.full.clear()
    stage.loop.fire()
    assert (stage.sent_to(), stage.loop.timers) == ([reply()], [])
    assert len(stage.tried) == 14


def test_one_that_reads_some_is_tried_soon_and_has_its_time_again(stage: Stage) -> None:
    stage.say(Subscribe(id=RequestId("s")))
    stage.full.add(ME)
    for number in range(2):
        stage.clients.send(ME, Event(id=RequestId("s"), value={"n": number}))
    stage.loop.fire()
    assert stage.loop.waits_s() == [0.002]
    send, room = stage.socket.send, iter([True, False])
    stage.socket.send = lambda frames: next(room)
    stage.now += 6.0
    stage.loop.fire()
    assert stage.loop.waits_s() == [0.001]
    stage.socket.send = send
    stage.now += 10.0  # since it read, which is just in time
    stage.clients.pulse()
    assert stage.of_kind(ClientTooSlow) == []
    stage.now += 0.5
    stage.clients.pulse()
    assert stage.of_kind(ClientTooSlow) == [ClientTooSlow(now=116.5, connection=ME)]


def test_all_whose_time_comes_within_a_millisecond_are_tried_together(stage: Stage) -> None:
    start = stage.loop.moment
    for number, (id, later_s) in enumerate([(ME, 0.0), (OTHER, 0.0005), (THIRD, 0.25)]):
        stage.ask("r", id, 7 + number)
        stage.full.add(id)
        stage.loop.moment = start + later_s
        stage.clients.send(id, reply())
    stage.tried.clear()
    stage.loop.fire()
    assert stage.tried == [ME, OTHER]
    assert stage.loop.waits_s() == [0.002], "the earliest of all"
    stage.loop.fire()
    assert stage.tried == [ME, OTHER] * 2


def test_an_earlier_time_takes_the_place_of_a_later_one_and_no_other_does(stage: Stage) -> None:
    stage.ask()
    stage.ask("r", OTHER, 8)
    stage.full = {ME, OTHER}
    stage.clients.send(ME, reply())
    for _ in range(5):
        stage.loop.fire()
    assert stage.loop.waits_s() == [0.032]
    stage.clients.send(OTHER, reply())
    assert stage.loop.waits_s() == [0.001]
    stage.ask("s")  # who writes is tried, and again after twice its time
    assert stage.loop.waits_s() == [0.001]


# ---------------------------------------------------------------- those who do not read


@pytest.mark.parametrize("limit", ["MAX_UNSENT_BYTES", "MAX_UNSENT_IN_ALL_BYTES"])
def test_a_client_may_owe_as_much_as_the_limit_and_no_byte_more_P15(
    stage: Stage, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = MESSAGE_OVERHEAD_BYTES + sum(map(len, encode(reply())))
    monkeypatch.setattr(clients_module, limit, 2 * size)
    stage.ask()
    stage.ask("open")
    stage.full.add(ME)
    stage.clients.send(ME, reply())
    stage.clients.send(ME, reply())
    assert stage.of_kind(ClientTooSlow) == []
    stage.clients.send(ME, reply())
    assert len(stage.of_kind(ClientTooSlow)) == 1


def test_who_is_given_up_is_told_so_and_keeps_nothing_but_its_ends_P15(stage: Stage) -> None:
    stage.say(Subscribe(id=RequestId("s")))
    stage.ask("r")
    stage.full.add(ME)
    stage.clients.send(ME, Done(id=RequestId("r"), seq=0, finish_reason=FinishReason.STOP))
    stage.clients.send(ME, Event(id=RequestId("s"), value={}))
    stage.now += 10.5
    stage.clients.pulse()
    stage.clients.send(ME, Event(id=RequestId("s"), value={}))
    stage.full.clear()
    stage.loop.fire()
    ends: list[Any] = stage.sent_to()
    assert [(end.id, end.error["message"]) for end in ends] == [("r", GIVEN_UP), ("s", GIVEN_UP)]
    stage.sent.clear()
    stage.clients.pulse()
    assert stage.sent == [], "nothing of it is open any more"


def test_who_still_does_not_read_counts_as_gone_after_as_long_again(stage: Stage) -> None:
    stage.ask("r")
    stage.ask("open")
    stage.full.add(ME)
    stage.clients.send(ME, reply())
    stage.now += 10.5
    stage.clients.pulse()
    stage.now += 10.0
    stage.clients.pulse()
    assert (stage.of_kind(ClientGone), stage.turned_away) == ([], [])
    stage.now += 0.5
    stage.clients.pulse()
    assert stage.of_kind(ClientGone) == [ClientGone(now=121.0, connection=ME)]
    assert stage.turned_away == [7]
    stage.tried.clear()
    stage.loop.fire()
    assert (stage.tried, stage.loop.timers) == ([], [])
    asyncio.run(asyncio.wait_for(stage.clients.finish(1e6), 60.0))  # the end waits for nobody


def test_a_descriptor_that_is_another_s_by_now_is_left_alone(stage: Stage) -> None:
    stage.ask("r")
    stage.ask("open")
    stage.full.add(ME)
    stage.clients.send(ME, reply())
    stage.ask("r", OTHER, 7)
    for _ in range(2):
        stage.now += 10.5
        stage.clients.pulse()
    assert [gone.connection for gone in stage.of_kind(ClientGone)] == [ME]
    assert stage.turned_away == []
    stage.happens(zmq.EVENT_DISCONNECTED, 7)
    stage.gone.add(OTHER)
    stage.loop.timers[:] = stage.loop.timers[-1:]
    stage.loop.fire()
    assert [gone.connection for gone in stage.of_kind(ClientGone)] == [ME, OTHER]


# ---------------------------------------------------------------- ends


def test_the_end_of_a_connection_is_looked_for_until_the_socket_knows(stage: Stage) -> None:
    stage.ask()
    stage.ask("r", OTHER, 8)
    stage.happens(zmq.EVENT_DISCONNECTED, 7)
    for _ in range(3):
        assert stage.loop.waits_s() == [0.02]
        stage.loop.fire()
    assert stage.sent == [(ME, Alive())] * 3
    stage.gone.add(ME)
    stage.loop.fire()
    assert stage.of_kind(ClientGone) == [ClientGone(now=100.0, connection=ME)]
    assert stage.loop.timers == []
    stage.happens(zmq.EVENT_DISCONNECTED, 8)
    stage.happens(zmq.EVENT_ACCEPTED, 8)  # the descriptor is in use again
    stage.loop.fire()
    assert stage.loop.timers == []


def test_a_connection_with_nothing_open_leaves_no_trace(stage: Stage) -> None:
    for number in range(3):
        stage.ask("r", bytes([0, 1, 1, 1, number]), 7 + number)
        stage.clients.send(ConnectionId(bytes([0, 1, 1, 1, number])), reply())
        stage.happens(zmq.EVENT_DISCONNECTED, 7 + number)
    stage.sent.clear()
    stage.clients.pulse()
    assert stage.sent == []
    assert (stage.loop.timers, stage.of_kind(ClientGone)) == ([], [])


def test_who_cancels_what_it_watches_is_sent_nothing_more(stage: Stage) -> None:
    stage.say(Subscribe(id=RequestId("s")))
    stage.say(Cancel(id=RequestId("s")))
    stage.clients.pulse()
    assert stage.sent == []


def test_what_a_socket_fails_with_otherwise_is_a_bug_and_raised(stage: Stage) -> None:
    stage.ask()
    stage.gone.add(ME)
    stage.error = errno.ENOTSOCK
    with pytest.raises(zmq.ZMQError, match=os.strerror(errno.ENOTSOCK)):
        stage.clients.send(ME, reply())
    assert stage.of_kind(ClientGone) == []


def test_the_end_leaves_what_was_sent_its_time_and_asks_the_loop_for_nothing(
    stage: Stage,
) -> None:
    stage.ask()
    stage.ask("open", OTHER, 8)
    stage.full.add(ME)
    stage.clients.send(ME, reply())
    stage.happens(zmq.EVENT_DISCONNECTED, 8)
    assert len(stage.loop.timers) == 2
    stage.clients.close(1.5)  # its file is gone already, which is no matter
    assert stage.closed == [1500, "forgotten"]
    assert stage.loop.timers == []
    stage.sent.clear()
    stage.clients.pulse()
    assert stage.sent == []


def test_failed_is_an_end_and_a_refusal_does_not_open_anything(stage: Stage) -> None:
    stage.ask()
    stage.clients.send(ME, Failed(id="r", error={"code": "crash"}))
    stage.take([ME, b"\xc1"])
    stage.sent.clear()
    stage.clients.pulse()
    assert stage.sent == []
