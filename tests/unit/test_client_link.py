"""The link of a client to its socket, and the connection around it; the socket is a script."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import zmq

from mlxsup.client import connection as connection_module
from mlxsup.client.connection import TOO_MANY, Connection
from mlxsup.client.errors import ConnectionLost
from mlxsup.client.link import HANDSHAKE_LIMIT_MS, MONITOR_EVENT, Link, LinkState
from mlxsup.client.session import Item
from mlxsup.protocol.client_messages import Alive, Ping
from mlxsup.protocol.clock import Clock
from mlxsup.protocol.codec import MAX_FRAME_BYTES, encode
from mlxsup.protocol.ids import RequestId

from support.client import pieces

EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_CLOSED,
    zmq.EVENT_DISCONNECTED,
)


class Monitor:
    """Tells of these events, and then of none."""

    def __init__(self) -> None:
        self.events: list[tuple[int, int]] = []
        self.is_closed = False

    def getsockopt(self, option: int) -> int:
        assert option == zmq.EVENTS
        return zmq.POLLIN if self.events else 0

    def recv_multipart(self, flags: int) -> list[bytes]:
        assert flags == zmq.NOBLOCK
        return [MONITOR_EVENT.pack(*self.events.pop(0)), b"ipc:///x"]

    def close(self, linger_ms: int) -> None:
        self.is_closed = True


class Socket:
    """A socket, and what was done with it."""

    def __init__(self) -> None:
        self.monitor = Monitor()
        self.done: list[tuple[Any, ...]] = []
        self.coming: list[bytes] = []
        self.fails_at = ""

    def setsockopt(self, option: int, value: int) -> None:
        self.done.append((option, value))

    def get_monitor_socket(self, events: int) -> Monitor:
        self.done.append(("monitor", {event for event in EVENTS if events & event}))
        self._fail("monitor")
        return self.monitor

    def disable_monitor(self) -> None:
        self.done.append(("disable monitor",))

    def connect(self, endpoint: str) -> None:
        self.done.append(("connect", endpoint))
        self._fail("connect")

    def _fail(self, place: str) -> None:
        if place == self.fails_at:
            raise zmq.ZMQError(errno.EMFILE)

    def close(self, linger_ms: int) -> None:
        self.done.append(("close", linger_ms))

    def getsockopt(self, option: int) -> int:
        assert option == zmq.EVENTS
        return zmq.POLLOUT | (zmq.POLLIN if self.coming else 0)

    def recv(self, flags: int) -> bytes:
        assert flags == zmq.NOBLOCK
        if not self.coming:
            raise zmq.Again
        return self.coming.pop(0)


class Context:
    """Makes one socket."""

    def __init__(self, socket: Socket) -> None:
        self.made = socket

    def socket(self, kind: int) -> Socket:
        assert kind == zmq.DEALER
        return self.made


def linked(socket: Socket) -> Link:
    context: Any = Context(socket)
    return Link(context, "ipc:///x")


def test_link_sets_its_limits_before_it_connects() -> None:
    socket = Socket()
    link = linked(socket)
    assert sorted(socket.done[:6]) == sorted(
        [
            (zmq.LINGER, 0),
            (zmq.RECONNECT_IVL, 3_600_000),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_LIMIT_MS),
            (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
            (zmq.RCVHWM, 0),
            (zmq.SNDHWM, 0),
        ]
    )
    assert socket.done[6:] == [("monitor", set(EVENTS)), ("connect", "ipc:///x")]
    assert link.state is LinkState.CONNECTING


def flags_of(link: Link) -> tuple[bool, bool, bool, bool]:
    return link.was_connected, link.was_turned_away, link.was_reset, link.was_heard


@pytest.mark.parametrize(
    ("event", "value", "state", "flags"),
    [
        (EVENTS[0], 0, LinkState.CONNECTED, (True, False, False, False)),
        (EVENTS[1], errno.EPIPE, LinkState.LOST, (False, True, False, False)),
        (EVENTS[1], errno.ECONNRESET, LinkState.LOST, (False, False, True, False)),
        (EVENTS[1], errno.EAGAIN, LinkState.LOST, (False, False, False, False)),
        (EVENTS[2], errno.EPIPE, LinkState.LOST, (False, False, False, False)),
        (EVENTS[3], errno.ECONNRESET, LinkState.LOST, (False, False, False, False)),
        (EVENTS[4], 0, LinkState.LOST, (False, False, False, False)),
        (EVENTS[5], 0, LinkState.LOST, (False, False, False, False)),
    ],
)
def test_event_says_where_the_connection_stands(
    event: int, value: int, state: LinkState, flags: tuple[bool, ...]
) -> None:
    socket = Socket()
    link = linked(socket)
    assert (link.update(), flags_of(link)) == (LinkState.CONNECTING, (False,) * 4)
    socket.monitor.events = [(event, value)]
    assert (link.update(), link.state, flags_of(link)) == (state, state, flags)


def test_events_are_read_up_to_the_loss() -> None:
    socket = Socket()
    link = linked(socket)
    socket.monitor.events = [(EVENTS[0], 0), (EVENTS[5], 0), (EVENTS[0], 0)]
    assert link.update() is LinkState.LOST
    assert link.update() is LinkState.LOST
    assert len(socket.monitor.events) == 1
    assert link.was_connected
    link.close(70)
    assert socket.done[-2:] == [("disable monitor",), ("close", 70)]
    assert socket.monitor.is_closed


@pytest.mark.parametrize("place", ["monitor", "connect"])
def test_failed_link_leaves_no_socket(place: str) -> None:
    socket = Socket()
    socket.fails_at = place
    with pytest.raises(zmq.ZMQError):
        linked(socket)
    assert socket.done[-1] == ("close", 0)
    assert socket.monitor.is_closed == (place == "connect")


def test_link_was_heard_once_a_message_has_come() -> None:
    socket = Socket()
    link = linked(socket)
    assert (link.receive(), link.has_message(), link.was_heard) == (None, False, False)
    socket.coming = [b"a", b"c"]
    assert link.has_message()
    assert (link.receive(), link.was_heard) == (b"a", True)
    assert [link.receive(), link.receive()] == [b"c", None]


# ---------------------------------------------------------------- the connection around it


ID = RequestId("a")


class Box:
    """An inbox that is a list."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def put(self, item: Item) -> None:
        self.items.append(item)


class PlayedLink:
    """A link that is flooded with signs of life, or lost, and what was done with it."""

    def __init__(self, *flags: str, state: LinkState = LinkState.CONNECTED) -> None:
        self.state = state
        for name in ("was_turned_away", "was_heard", "was_connected", "was_reset"):
            setattr(self, name, name in flags)
        self.received = 0
        self.lingers_ms: list[int] = []

    def update(self) -> LinkState:
        return self.state

    def send(self, frames: list[bytes]) -> None:
        """Take it."""

    def has_message(self) -> bool:
        return self.state is LinkState.CONNECTED

    def receive(self) -> bytes:
        self.received += 1
        return pieces.frame_of(Alive())

    def close(self, linger_ms: int) -> None:
        self.lingers_ms.append(linger_ms)


def play(monkeypatch: pytest.MonkeyPatch, link: PlayedLink) -> PlayedLink:
    monkeypatch.setattr(connection_module, "Link", lambda context, endpoint: link)
    return link


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> PlayedLink:
    return play(monkeypatch, PlayedLink())


def opened(box: Box | None = None) -> Connection:
    connection = Connection("E", clock=Clock(lambda: 100.0))
    connection.open_command(ID, encode(Ping(id=ID)), box or Box())
    return connection


def test_pump_messages_leaves_the_link_alone(
    link: PlayedLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = opened()
    assert connection.pump() is True
    assert link.received == 256
    assert connection.pump_messages() is True
    assert link.received == 512
    link.state = LinkState.LOST
    assert connection.pump_messages() is False
    assert link.received == 513, "it is tried before it is asked for"
    monkeypatch.setattr(link, "receive", lambda: None)
    assert connection.pump_messages() is False
    assert connection.link is not None, "its end is left to `pump`"
    assert connection.pump() is False
    assert connection.link is None
    assert connection.pump_messages() is False
    connection.close()
    connection.terminate()


@pytest.mark.parametrize(
    ("state", "linger_ms"),
    [(LinkState.CONNECTED, 500), (LinkState.CONNECTING, 500), (LinkState.LOST, 0)],
)
def test_close_lingers_only_for_a_living_link(
    link: PlayedLink, state: LinkState, linger_ms: int
) -> None:
    connection = opened()
    link.state = state
    connection.close()
    connection.terminate()
    assert link.lingers_ms == [linger_ms]


AGAIN = "it may have too many connections or has just ended; try again"
GONE = "`mlxsup start` starts it again"


@pytest.mark.parametrize(
    ("flags", "message", "hint", "is_turned_away"),
    [
        ((), "no daemon answers at E", "start one with `mlxsup start`", False),
        (("was_turned_away",), "the daemon at E refused the connection", TOO_MANY, True),
        (("was_connected", "was_heard"), "the daemon at E is gone", GONE, False),
        (("was_connected",), "the daemon at E ended the connection before it answered", TOO_MANY,
         True),
        (("was_reset",), "no daemon answers at E", AGAIN, True),
    ],
)  # fmt: skip
def test_words_for_a_lost_connection(
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
    message: str,
    hint: str,
    is_turned_away: bool,
) -> None:
    play(monkeypatch, PlayedLink(*flags, state=LinkState.LOST))
    box = Box()
    connection = opened(box)
    assert not connection.pump()
    connection.terminate()
    [error] = box.items
    assert isinstance(error, ConnectionLost)
    assert (error.message, error.hint) == (message, hint)
    assert (error.endpoint, error.is_turned_away) == ("E", is_turned_away)
