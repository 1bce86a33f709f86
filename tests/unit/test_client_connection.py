"""What a connection does with its link, which here is a script."""

from __future__ import annotations

import pytest

from mlxsup.client import connection as connection_module
from mlxsup.client.connection import TOO_MANY, Connection
from mlxsup.client.link import LinkState
from mlxsup.client.session import Item
from mlxsup.protocol.client_messages import Alive, Ping
from mlxsup.protocol.clock import Clock
from mlxsup.protocol.codec import encode
from mlxsup.protocol.ids import RequestId

from support import pieces

A = RequestId("a")


class Box:
    """An inbox that is a list."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def put(self, item: Item) -> None:
        self.items.append(item)


class FloodedLink:
    """A link on which signs of life never end, and what was done with it."""

    def __init__(self) -> None:
        self.state = LinkState.CONNECTED
        self.was_turned_away = self.was_heard = self.was_connected = self.was_reset = False
        self.received = 0
        self.lingers_ms: list[int] = []

    def update(self) -> LinkState:
        return self.state

    def send(self, frames: list[bytes]) -> None:
        """It is taken."""

    def flush(self) -> None:
        """Nothing was kept."""

    def has_message(self) -> bool:
        return True

    def receive(self) -> bytes:
        self.received += 1
        return pieces.frame_of(Alive())

    def close(self, linger_ms: int) -> None:
        self.lingers_ms.append(linger_ms)


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> FloodedLink:
    made = FloodedLink()
    monkeypatch.setattr(connection_module, "Link", lambda context, endpoint: made)
    return made


def opened() -> Connection:
    connection = Connection("E", clock=Clock(lambda: 100.0))
    connection.open_command(A, encode(Ping(id=A)), Box())
    return connection


def test_a_flood_does_not_hold_up_whoever_pumps(link: FloodedLink) -> None:
    connection = opened()
    assert connection.pump() is True
    assert link.received == 256
    connection.close()
    connection.terminate()


def test_messages_alone_are_read_without_a_look_at_the_link(
    link: FloodedLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = opened()
    assert connection.pump_messages() is True
    assert link.received == 256
    link.state = LinkState.LOST
    monkeypatch.setattr(link, "has_message", lambda: False)
    assert connection.pump_messages() is False
    assert link.received == 257, "whoever is woken tries first"
    monkeypatch.setattr(link, "receive", lambda: None)
    assert connection.pump_messages() is False
    assert connection.link is not None, "its end is for whoever looks"
    assert connection.pump() is False
    assert connection.link is None
    assert connection.pump_messages() is False
    connection.close()
    connection.terminate()


@pytest.mark.parametrize(
    ("state", "linger_ms"),
    [(LinkState.CONNECTED, 500), (LinkState.CONNECTING, 500), (LinkState.LOST, 0)],
)
def test_a_close_waits_half_a_second_at_most_and_not_at_all_if_nobody_is_there(
    link: FloodedLink, state: LinkState, linger_ms: int
) -> None:
    connection = opened()
    link.state = state
    connection.close()
    connection.terminate()
    assert link.lingers_ms == [linger_ms]


def test_whoever_is_turned_away_is_told_what_to_do() -> None:
    assert TOO_MANY == "it has too many connections, or is ending: close some, or try again later"
