"""A connection of a client against a ROUTER and on a clock of the test, and its silence."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from mlxsup.client.async_client import AsyncClient
from mlxsup.client.client import Client
from mlxsup.client.connection import Connection
from mlxsup.client.errors import ConnectionLost
from mlxsup.client.link import Link, LinkState
from mlxsup.client.session import DOUBT_S, SILENCE_LIMIT_S, Item
from mlxsup.protocol.client_messages import CLIENT_MESSAGES, Cancel, Generate, Ping, Reply
from mlxsup.protocol.clock import PULSE_S, Clock
from mlxsup.protocol.codec import Decoder, encode
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.message import Message

from support.client.scripted_supervisor import Peer, answer, say_hello, scripted_supervisor
from support.eventually import eventually

A, B = RequestId("a"), RequestId("b")


class Box:
    """An inbox that is a list."""

    def __init__(self) -> None:
        self.items: list[Item] = []

    def put(self, item: Item) -> None:
        self.items.append(item)


class Router:
    """The daemon's socket, and a connection to it."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/c.sock"
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.bind()
        self.now = 100.0
        self.links: list[tuple[bool, bool]] = []
        self.is_busy = False
        self.connection = Connection(
            self.endpoint, self.on_link, Clock(lambda: self.now), lambda: self.is_busy
        )
        self.peer = b""

    def bind(self) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self.context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.bind(self.endpoint)
        return socket

    def on_link(self, old: Link | None, new: Link | None) -> None:
        self.links.append((old is not None, new is not None))

    def pass_time(self, seconds: float) -> None:
        """Pumps in each pulse of this time, and at its end."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + PULSE_S)
            assert not self.connection.pump()

    def next(self) -> Message:
        """Return the next message of the client."""
        eventually(self.can_read)
        self.peer, *frames = self.socket.recv_multipart()
        return Decoder(CLIENT_MESSAGES, is_strict=True).decode(frames)

    def can_read(self) -> bool:
        self.connection.pump()
        return bool(self.socket.poll(10))

    def send(self, message: Message) -> None:
        self.socket.send_multipart([self.peer, *encode(message)])

    def pump_until(self, is_so: Callable[[], bool]) -> None:
        def pumped() -> bool:
            self.connection.pump()
            return is_so()

        eventually(pumped)

    def command(self, request_id: RequestId = A) -> Box:
        box = Box()
        self.connection.open_command(request_id, encode(Ping(id=request_id)), box)
        return box


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    made = Router(tmp_path)
    yield made
    made.connection.close()
    made.connection.terminate()
    made.context.destroy(linger=0)


def test_a_daemon_that_reads_late_gets_all_messages_in_order(router: Router) -> None:
    sent = [RequestId(str(number)) for number in range(5000)]
    for request_id in sent:
        router.command(request_id)
    assert [router.next() for _ in sent] == [Ping(id=request_id) for request_id in sent]


def test_link_is_made_for_the_first_message(router: Router) -> None:
    assert (router.links, router.connection.link) == ([], None)
    assert not router.connection.pump()
    box = router.command()
    assert router.links == [(False, True)]
    assert router.next() == Ping(id=A)
    router.send(Reply(id=A, value={"n": 1}))
    router.pump_until(lambda: bool(box.items))
    assert box.items == [{"n": 1}]
    router.command(B)
    assert router.links == [(False, True)]


def test_lost_daemon_is_told_to_all_and_the_next_message_has_a_new_link_P2(router: Router) -> None:
    first, second = router.command(), router.command(B)
    router.next()
    router.send(Reply(id=RequestId("other"), value={}))
    router.pump_until(
        lambda: router.connection.link is not None and router.connection.link.was_heard
    )
    router.socket.close(0)
    router.pump_until(lambda: router.connection.link is None)
    assert router.links == [(False, True), (True, False)]
    for box in (first, second):
        [error] = box.items
        assert isinstance(error, ConnectionLost)
        assert error.message == f"the daemon at {router.endpoint} is gone"
        assert error.hint == "`mlxsup start` starts it again"
        assert (error.endpoint, error.is_turned_away) == (router.endpoint, False)
    router.socket = router.bind()
    again = router.command()
    assert router.links[2:] == [(False, True)]
    router.next()
    router.send(Reply(id=A, value={}))
    router.pump_until(lambda: bool(again.items))
    assert again.items == [{}]


def test_answer_that_came_before_the_end_is_read_H7(router: Router) -> None:
    box = router.command()
    router.next()
    router.send(Reply(id=A, value={"n": 1}))
    link = router.connection.link
    assert link is not None
    router.socket.close(60_000)
    eventually(lambda: link.update() is LinkState.LOST)
    router.connection.pump()
    assert box.items == [{"n": 1}]


@pytest.mark.parametrize("name", ["open_command", "open_stream"])
def test_message_on_a_lost_link_is_sent_on_a_new_one_P2(name: str, router: Router) -> None:
    first = router.command()
    router.next()
    lost = router.connection.link
    assert lost is not None
    router.socket.close(0)
    eventually(lambda: lost.update() is LinkState.LOST)
    router.socket = router.bind()
    second = Box()
    getattr(router.connection, name)(B, encode(Ping(id=B)), second)
    assert [type(item) for item in first.items] == [ConnectionLost]
    assert router.links == [(False, True), (True, False), (False, True)]
    assert router.next() == Ping(id=B)
    assert second.items == []


def test_closed_connection_cancels_what_is_open(router: Router) -> None:
    box = Box()
    router.connection.open_stream(A, encode(Ping(id=A)), box)
    router.next()
    router.connection.close()
    assert router.links == [(False, True), (True, False)]
    router.connection.terminate()
    assert router.socket.poll(60_000)
    assert router.next() == Cancel(id=A)
    assert len(box.items) == 1


def test_endpoint_that_cannot_be_connected_to_leaves_no_socket() -> None:
    endpoint = "ipc:///" + "x" * 200
    connection = Connection(endpoint)
    box = Box()
    connection.open_command(A, encode(Ping(id=A)), box)
    [error] = box.items
    assert isinstance(error, ConnectionLost)
    assert str(error).startswith(f"cannot connect to {endpoint}: ")
    assert connection.link is None
    connection.close()
    connection.terminate()  # would wait for a socket that is open
    gc.collect()


async def ask(endpoint: str) -> dict[str, Any]:
    async with AsyncClient(endpoint) as client, asyncio.timeout(60.0):
        return await client.ping()


def test_answer_is_read_when_it_comes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxsup.client.session.SILENCE_LIMIT_S", 1e6)

    def say(peer: Peer, message: Message) -> None:
        answer(peer, message, n=1)

    with scripted_supervisor(path, say, is_alive_sent=False) as supervisor:
        assert asyncio.run(ask(supervisor.endpoint)) == {"n": 1}


def test_silent_daemon_is_noticed_by_both_clients_P2(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxsup.client.session.SILENCE_LIMIT_S", 0.1)
    monkeypatch.setattr("mlxsup.client.session.DOUBT_S", 0.1)

    def ignore(peer: Peer, message: Message) -> None:
        """Say nothing."""

    with scripted_supervisor(path, ignore, is_alive_sent=False) as supervisor:
        silent = pytest.raises(ConnectionLost, match="stopped responding")
        with Client(supervisor.endpoint) as client, silent:
            client.ping()
        with pytest.raises(ConnectionLost, match="stopped responding"):
            asyncio.run(ask(supervisor.endpoint))


@pytest.mark.parametrize("query", ["ping", "status", "requests"])
def test_daemon_that_lives_and_does_not_answer_a_query_is_given_up(
    path: Path, monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    monkeypatch.setattr("mlxsup.client.parameters.ANSWER_LIMIT_S", 0.1)

    async def ask_it(endpoint: str) -> None:
        async with AsyncClient(endpoint) as client, asyncio.timeout(60.0):
            await getattr(client, query)()

    with scripted_supervisor(path, lambda peer, message: None) as supervisor:
        with Client(supervisor.endpoint) as client, pytest.raises(ConnectionLost, match="has not"):
            getattr(client, query)()
        with pytest.raises(ConnectionLost, match="has not answered"):
            asyncio.run(ask_it(supervisor.endpoint))


def test_async_client_goes_on_after_the_death_of_the_daemon_and_in_one_loop_P2(path: Path) -> None:
    async def use(client: AsyncClient) -> None:
        for _ in range(2):
            with scripted_supervisor(path, say_hello) as supervisor:
                assert await client.ping() == {}
            with pytest.raises(ConnectionLost):
                await client.ping()
            assert len(supervisor.got(Ping)) == 1

    client = AsyncClient(f"ipc://{path}")
    asyncio.run(use(client))
    with pytest.raises(RuntimeError, match="belongs to the event loop that first used it"):
        asyncio.run(client.ping())
    asyncio.run(client.close())
    asyncio.run(client.close())
    with pytest.raises(RuntimeError, match="the client is closed"):
        asyncio.run(client.ping())


def test_cancel_leaves_before_the_next_request(router: Router) -> None:
    async def run() -> list[Message]:
        async with AsyncClient(router.endpoint) as client:
            client.generate("m", prompt="x", on_notice=lambda notice: None).cancel()
            client.generate("m", prompt="y")
            decoder = Decoder(CLIENT_MESSAGES, is_strict=True)
            frames = [await asyncio.to_thread(router.socket.recv_multipart) for _ in range(3)]
            return [decoder.decode(rest) for _, *rest in frames]

    first, cancel, second = asyncio.run(run())
    assert isinstance(first, Generate)
    assert isinstance(second, Generate)
    assert cancel == Cancel(id=first.id)
    assert (first.notices, second.notices) == (True, False)


# ---------------------------------------------------------------- silence


def test_lasting_silence_ends_everything_P2(router: Router) -> None:
    box = router.command()
    router.next()
    assert router.connection.delay_s == PULSE_S
    router.pass_time(SILENCE_LIMIT_S)
    assert box.items == []
    assert router.connection.delay_s == pytest.approx(DOUBT_S)
    router.pass_time(DOUBT_S)
    [error] = box.items
    assert isinstance(error, ConnectionLost)
    assert error.message == f"the daemon at {router.endpoint} stopped responding"
    assert error.hint == "`mlxsup status` shows whether it is running"
    assert (error.endpoint, error.is_turned_away) == (router.endpoint, False)
    assert router.links == [(False, True), (True, False)]
    assert router.connection.delay_s is None


def test_busy_daemon_is_waited_for_P32(router: Router) -> None:
    box = router.command()
    router.next()
    router.is_busy = True
    router.pass_time(3 * SILENCE_LIMIT_S)
    assert box.items == []
    router.is_busy = False
    router.pass_time(DOUBT_S + PULSE_S)
    assert [type(item) for item in box.items] == [ConnectionLost]


@pytest.mark.parametrize("stall_s", [1.5, SILENCE_LIMIT_S + 0.1, SILENCE_LIMIT_S + DOUBT_S, 3600.0])
def test_daemon_owes_nothing_while_the_client_stood_still_P7(
    stall_s: float, router: Router
) -> None:
    """A daemon that stood still, too, may need more than a moment to be heard again."""
    box = router.command()
    router.next()
    router.now += stall_s
    router.connection.pump()
    router.pass_time(SILENCE_LIMIT_S - PULSE_S)
    assert box.items == []
    router.pass_time(DOUBT_S)
    assert [type(item) for item in box.items] == [ConnectionLost]
