"""Sockets in the event loop: their turns, their end, and what they cannot be made with."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.supervisor.sockets import worker_link
from mlxsup.supervisor.sockets.transport import LoopSocket, bound_socket
from mlxsup.supervisor.sockets.worker_link import WorkerLink


def bind(option: zmq.SocketOption, number: int) -> tuple[list[object], Exception | None]:
    """What is done with a socket that refuses an option, and what comes of it."""
    done: list[object] = []

    def refuse(given: zmq.SocketOption, value: int) -> None:
        done.append((given, value))
        if given is option:
            raise zmq.ZMQError(number)

    socket: Any = SimpleNamespace(
        setsockopt=refuse,
        bind=lambda endpoint: done.append(endpoint),
        close=lambda linger: done.append(("closed", linger)),
    )
    context: Any = SimpleNamespace(socket=lambda kind: socket)
    try:
        assert bound_socket(context, zmq.PULL, "e", {option: 7, zmq.LINGER: 0}) is socket
    except zmq.ZMQError as error:
        return done, error
    return done, None


@pytest.mark.parametrize(
    ("option", "number"),
    [(zmq.SNDHWM, errno.ENOMEM), (zmq.MAXMSGSIZE, errno.EINVAL)],
)
def test_a_refusal_of_an_option_leaves_no_socket_open(
    option: zmq.SocketOption, number: int
) -> None:
    done, error = bind(option, number)
    assert done == [(option, 7), ("closed", 0)]
    assert isinstance(error, zmq.ZMQError)
    assert error.errno == number


def test_a_link_without_room_for_beats_is_none_and_leaves_no_socket_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[int] = []

    def bind_one(context: object, kind: int, endpoint: str, options: object) -> Any:
        if kind == zmq.PULL:
            raise zmq.ZMQError(errno.EMFILE)
        return SimpleNamespace(close=closed.append)

    async def body() -> None:
        unused: Any = None
        WorkerLink(
            unused, Path("/run/w1.sock"), model=ModelName("m"), generation=Generation(1),
            token="t", max_concurrency=1, post=print, now=lambda: 0.0,
        )  # fmt: skip

    monkeypatch.setattr(worker_link, "bound_socket", bind_one)
    with pytest.raises(zmq.ZMQError) as caught:
        asyncio.run(body())
    assert (caught.value.errno, closed) == (errno.EMFILE, [0])


# ---------------------------------------------------------------- turns of the loop


class Played:
    """A ZeroMQ socket and an event loop; the test says when the loop turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrived: list[list[bytes]] = []
        self.taken: list[list[bytes]] = []
        self.soon: list[Callable[[], None]] = []
        self.done: list[object] = []
        self.drained = self.looks = 0
        self.error: Exception | None = None
        socket: Any = SimpleNamespace(
            getsockopt=self.look,
            recv_multipart=self.receive,
            send=self.send,
            close=lambda linger_ms: self.done.append(("closed", linger_ms)),
        )
        loop = SimpleNamespace(
            add_reader=lambda *what: self.done.append(("reads", *what)),
            remove_reader=lambda *what: self.done.append(("reads no more", *what)),
            call_soon=self.soon.append,
        )
        monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
        self.socket = LoopSocket(socket, self.take, self.count)

    def look(self, option: int) -> int:
        if option == zmq.FD:
            return 5
        assert option == zmq.EVENTS
        self.looks += 1
        return int(zmq.POLLOUT) | (int(zmq.POLLIN) if self.arrived else 0)

    def receive(self, flags: int) -> list[bytes]:
        assert flags == zmq.NOBLOCK
        assert self.arrived, "received what has not arrived"
        return self.arrived.pop(0)

    def send(self, frame: bytes, flags: int) -> None:
        assert flags in (zmq.NOBLOCK, zmq.NOBLOCK | zmq.SNDMORE)
        if self.error is not None:
            raise self.error
        self.done.append((frame, bool(flags & zmq.SNDMORE)))

    def take(self, frames: list[bytes]) -> None:
        self.taken.append(frames)
        if frames == [b"close"]:
            self.socket.close(9)

    def count(self) -> None:
        self.drained += 1

    def turn(self) -> None:
        """One round of the loop."""
        soon, self.soon[:] = list(self.soon), []
        for function in soon:
            function()


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(monkeypatch)


def test_a_socket_is_looked_at_once_when_it_is_new_and_whenever_it_is_asked_for(
    played: Played,
) -> None:
    [done] = played.done
    assert isinstance(done, tuple)
    assert done[:2] == ("reads", 5)
    played.socket.drain_soon()
    assert len(played.soon) == 1
    played.arrived = [[b"a"], [b"b"]]
    played.turn()
    assert (played.taken, played.drained, played.soon) == ([[b"a"], [b"b"]], 1, [])
    played.socket.drain_soon()
    assert len(played.soon) == 1


def test_a_socket_with_more_than_a_turn_has_another_in_the_next_round(played: Played) -> None:
    played.arrived = [[b"%d" % n] for n in range(300)]
    for taken, drained, soon in ((128, 1, 1), (256, 2, 1), (300, 3, 0)):
        played.turn()
        assert (len(played.taken), played.drained, len(played.soon)) == (taken, drained, soon)
    played.arrived = [[b"%d" % n] for n in range(300)]
    played.socket.drain_now()
    assert (len(played.taken), played.drained, played.soon) == (600, 3, [])


@pytest.mark.parametrize("error", [None, zmq.Again(), zmq.ZMQError(errno.EHOSTUNREACH)])
@pytest.mark.parametrize("arrived", [[], [[b"a"], [b"b"]]])
def test_what_arrived_during_sends_is_taken_after_one_look(
    played: Played, error: zmq.ZMQError | None, arrived: list[list[bytes]]
) -> None:
    played.turn()
    played.done.clear()
    played.error = error
    played.arrived = list(arrived)
    played.drained = played.looks = 0
    for _ in range(16):
        if error is None or isinstance(error, zmq.Again):
            assert played.socket.send([b"x", b"y"]) is (error is None)
        else:
            with pytest.raises(zmq.ZMQError):
                played.socket.send([b"x", b"y"])
    assert played.done == (16 * [(b"x", True), (b"y", False)] if error is None else [])
    assert (played.looks, len(played.soon), played.taken) == (0, 1, [])
    played.turn()
    assert (played.looks, played.taken) == (1, [])
    played.turn()
    assert (played.taken, played.drained) == (arrived, 1 if arrived else 0)
    assert played.looks == (2 + len(arrived) if arrived else 1)
    assert played.soon == [], "nothing is looked at again for what there is no room for"


def test_what_arrived_during_sends_of_a_turn_is_looked_for_at_its_end_and_taken_in_the_next_round(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    played.turn()
    other = Played(monkeypatch)  # forwards: what it takes leaves through the first one

    def forward(frames: list[bytes]) -> None:
        played.socket.send(frames)
        played.socket.send(frames)
        if frames == [b"b"]:
            played.arrived = [[b"c"]]  # whose edge the sends have swallowed

    other.socket = LoopSocket(other.socket.socket, forward, other.count)
    other.turn()
    for arrived, soon in (([[b"a"], [b"a"]], 0), ([[b"b"]], 1)):
        other.arrived, played.looks = list(arrived), 0
        other.socket.drain_soon()
        other.turn()
        assert (played.looks, len(played.soon), played.taken) == (1, soon, [])
    played.turn()
    assert (played.taken, played.soon) == ([[b"c"]], [])
    played.socket.send([b"x"])
    assert len(played.soon) == 1, "between turns the next round looks"


def test_a_turn_that_fails_leaves_no_look_undone(played: Played) -> None:
    played.turn()

    def fail() -> None:
        played.socket.send([b"x"])
        raise RuntimeError

    played.looks = 0
    failing = LoopSocket(played.socket.socket, played.take, fail)
    with pytest.raises(RuntimeError):
        played.turn()
    assert (played.looks, played.soon) == (2, []), "its own, and that of the one it sent through"
    played.socket.send([b"x"])
    assert len(played.soon) == 1
    failing.close()


def test_nothing_is_looked_at_after_the_end_for_what_was_sent_before_it(played: Played) -> None:
    played.turn()
    played.socket.send([b"x"])
    played.socket.close()
    played.looks = 0
    played.turn()
    assert (played.looks, played.drained) == (0, 1)


def test_a_socket_that_is_closed_takes_and_says_nothing_more(played: Played) -> None:
    played.arrived = [[b"close"], [b"late"]]
    played.done.clear()
    played.turn()
    assert (played.taken, played.drained) == ([[b"close"]], 0)
    assert played.done == [("reads no more", 5), ("closed", 9)]
    played.socket.close()
    played.socket.drain_soon()
    played.turn()
    assert (played.arrived, played.drained, len(played.done)) == ([[b"late"]], 0, 2)
