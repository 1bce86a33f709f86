"""Bytes of every kind and storms of connections at the clients' socket."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import zmq

from mlxsup.protocol.client_messages import (
    Failed,
    Ping,
)
from mlxsup.protocol.codec import MAX_FRAME_BYTES, encode
from mlxsup.protocol.ids import RequestId
from mlxsup.supervisor.core.events import ClientGone
from mlxsup.supervisor.sockets import clients as clients_module
from mlxsup.supervisor.sockets import limits as limits_module
from mlxsup.supervisor.sockets.clients import (
    HANDSHAKE_LIMIT_S,
    LARGE_LIMIT_S,
    MAX_LARGE_BYTES,
    Client,
)
from mlxsup.supervisor.sockets.zmtp import GREETING, to_wire

from support.client.clients_bench import Bench, Peer, deltas, generate, run
from support.client.zmtp import PING, READY
from support.eventually_async import eventually_async

HELLO = GREETING + READY

AT_ONCE = MAX_LARGE_BYTES // MAX_FRAME_BYTES
"""How many messages of the largest size are read at once."""


def has_ended(raw: socket.socket) -> bool:
    """Whether the daemon has ended the connection, cleanly or not."""
    try:
        while raw.recv(65536):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


async def give(raw: socket.socket, data: bytes) -> None:
    """Sends all, or as much as is taken before the connection ends."""
    try:
        await asyncio.get_running_loop().sock_sendall(raw, data)
    except ConnectionError:
        pass


class Door:
    """A bench, bare connections to it, and a client whose pings are answered meanwhile."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.raw: list[socket.socket] = []
        self.peer = bench.peer()
        self._pings = 0

    def knock(self) -> socket.socket:
        raw = socket.socket(socket.AF_UNIX)
        raw.setblocking(False)
        raw.connect(str(self.bench.path))
        self.raw.append(raw)
        return raw

    async def knock_patiently(self) -> socket.socket:
        """The same when others knock, too: there may be no room for some moments."""
        raw = socket.socket(socket.AF_UNIX)
        raw.setblocking(False)
        self.raw.append(raw)
        await eventually_async(lambda: raw.connect_ex(str(self.bench.path)) == 0)
        return raw

    async def serves(self) -> None:
        """A ping of somebody else arrives."""
        self._pings += 1
        self.peer.say(Ping(id=RequestId(f"p{self._pings}")))
        await self.bench.said(self._pings)


@contextmanager
def door_of(bench: Bench) -> Iterator[Door]:
    door = Door(bench)
    try:
        yield door
    finally:
        for raw in door.raw:
            raw.close()


def at_door(body: Callable[[Door], Awaitable[None]]) -> None:
    async def with_bench(bench: Bench) -> None:
        with door_of(bench) as door:
            await body(door)

    run(with_bench)


HOSTILE = {
    "garbage": random.Random(1).randbytes(5000),
    "another mechanism": GREETING.replace(b"NULL\0", b"PLAIN") + READY,
    "a frame over the limit": HELLO + b"\x02" + (MAX_FRAME_BYTES + 1).to_bytes(8, "big"),
    "the longest length there is": HELLO + b"\x02" + b"\xff" * 8,
    "a long command": HELLO + b"\x06" + (2**40).to_bytes(8, "big"),
    "frames without an end": HELLO + b"\x01\x00" * 5000,
    "large frames without an end": HELLO
    + (b"\x03" + (2**20).to_bytes(8, "big") + bytes(2**20)) * (MAX_FRAME_BYTES // 2**20 + 4),
    "a message before READY": GREETING + to_wire([b"x"]),
    "flags that do not exist": HELLO + b"\xf8\x00",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_bytes_that_are_not_zmtp_end_their_connection_alone_P17(kind: str) -> None:
    async def body(door: Door) -> None:
        await door.serves()
        raw = door.knock()
        await give(raw, HOSTILE[kind])
        await eventually_async(lambda: has_ended(raw))
        await door.serves()
        assert door.bench.clients.admitted == 1

    at_door(body)


def test_single_bytes_are_understood_and_silence_is_ended() -> None:
    async def body(door: Door) -> None:
        silent, half, slow = door.knock(), door.knock(), door.knock()
        await give(half, HELLO[:70])
        for byte in HELLO + to_wire(encode(Ping(id=RequestId("slow")))):
            await give(slow, bytes([byte]))
            await asyncio.sleep(0)
        await door.bench.said(1)
        door.bench.moment += HANDSHAKE_LIMIT_S - 0.1
        door.bench.clients.pulse()
        assert door.bench.clients.admitted >= 3
        door.bench.moment += 0.2
        door.bench.clients.pulse()
        await eventually_async(lambda: has_ended(silent) and has_ended(half))
        assert not has_ended(slow)

    at_door(body)


def test_a_flood_of_pings_with_unread_answers_is_bounded() -> None:
    async def body(door: Door) -> None:
        raw = door.knock()
        flood = asyncio.create_task(give(raw, HELLO + PING * 50_000))
        while not flood.done():
            await door.serves()
        assert door.bench.tally.bytes < 2 * 65536
        assert door.bench.clients.admitted == 2

    at_door(body)


def test_a_round_of_the_loop_does_not_grow_with_how_many_flood() -> None:
    """Calls are counted instead of time, with 1 and 24 connections that send 2,000 pings each."""

    async def body(door: Door, count: int, longest: list[int]) -> None:
        await door.serves()
        calls = 0

        def note(_frame: object, event: str, _argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        floods = [
            asyncio.create_task(give(door.knock(), HELLO + PING * 2000)) for _ in range(count)
        ]
        await asyncio.sleep(0)
        sys.setprofile(note)
        try:
            for _ in range(100):
                before = calls
                await asyncio.sleep(0)
                longest.append(calls - before)
        finally:
            sys.setprofile(None)
        await asyncio.gather(*floods)
        await door.serves()

    most = []
    for count in (1, 24):
        longest: list[int] = []
        at_door(partial(body, count=count, longest=longest))
        most.append(max(longest))
    assert most[1] < 4 * most[0]


def test_few_large_messages_are_read_at_once_and_a_slow_sender_is_ended_P15() -> None:
    async def body(door: Door) -> None:
        bench = door.bench
        await door.serves()
        begun = HELLO + b"\x01\x01h\x02" + (MAX_FRAME_BYTES - 1).to_bytes(8, "big")
        dawdlers = [door.knock() for _ in range(3 * AT_ONCE)]
        feeding = [asyncio.create_task(give(raw, begun + bytes(2**20))) for raw in dawdlers]
        await eventually_async(lambda: sum(feed.done() for feed in feeding) == AT_ONCE)
        honest = Peer(bench.clients.endpoint)
        large = generate("large")
        large = type(large)(id=large.id, model=large.model, body=bytes(8 * 2**20))
        honest.say(large)
        for _ in range(100):  # turns, in each of which the others could have been read
            await door.serves()
        assert sum(feed.done() for feed in feeding) == AT_ONCE, "the others wait in their sockets"
        for _ in range(4):
            await door.serves()
            bench.moment += LARGE_LIMIT_S + 0.1
            bench.clients.pulse()
            await asyncio.sleep(0.1)
        await eventually_async(
            lambda: any(said.message == large for said in bench.of_kind(type(bench.events[0])))
        )
        honest.close()
        for feed in feeding:
            feed.cancel()

    at_door(body)


def test_a_large_message_takes_no_place_once_it_is_whole_P15(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clients_module, "MAX_LARGE_BYTES", 10 * 2**20)

    async def body(door: Door) -> None:
        large = generate("large")
        large = type(large)(id=large.id, model=large.model, body=bytes(8 * 2**20))
        for number, peer in enumerate((door.bench.peer(), door.bench.peer()), 1):
            peer.say(large)
            await door.bench.said(number)

    at_door(body)


def test_a_large_message_whose_sender_is_gone_takes_no_place_P15() -> None:
    async def body(door: Door) -> None:
        await door.serves()
        begun = HELLO + b"\x02" + (MAX_FRAME_BYTES - 1).to_bytes(8, "big") + bytes(2**20)
        for _ in range(AT_ONCE + 1):
            gone = door.knock()
            await give(gone, begun)
            gone.close()
        await eventually_async(lambda: door.bench.clients.admitted == 1)
        large = generate("large")
        large = type(large)(id=large.id, model=large.model, body=bytes(8 * 2**20))
        door.peer.say(large)
        await door.bench.said(2)

    at_door(body)


def test_a_client_that_is_ended_while_its_large_message_waits_takes_no_place_P15() -> None:
    async def body(door: Door) -> None:
        await door.serves()
        begun = HELLO + b"\x02" + (MAX_FRAME_BYTES - 1).to_bytes(8, "big") + bytes(2**20)

        def feed(count: int) -> dict[socket.socket, asyncio.Task[None]]:
            knocked = [door.knock() for _ in range(count)]
            return {raw: asyncio.create_task(give(raw, begun)) for raw in knocked}

        def paused() -> list[Client]:
            return [one for one in door.bench.connections.values() if not one.is_reading]

        first = feed(AT_ONCE + 1)
        [waiting] = await eventually_async(paused)
        waiting.end()  # as one is that does not read what it is owed
        await asyncio.wait(first.values())
        for raw in first:
            raw.close()
        await eventually_async(lambda: door.bench.clients.admitted == 1)
        second = feed(AT_ONCE)
        await eventually_async(lambda: all(fed.done() for fed in second.values()))

    at_door(body)


def test_what_large_messages_take_until_they_are_whole_is_bounded_in_all_P15() -> None:
    """A frame that others follow may grow into a message of the largest size, whatever it says."""
    growing = HELLO + (b"\x03" + (1000).to_bytes(8, "big") + bytes(1000)) * 1000
    many_frames = HELLO + to_wire([bytes(1000)] * 90)

    async def body(door: Door) -> None:
        bench = door.bench
        await door.serves()
        feeding = [asyncio.create_task(give(door.knock(), growing)) for _ in range(AT_ONCE)]
        await eventually_async(lambda: all(feed.done() for feed in feeding))
        late = [asyncio.create_task(give(door.knock(), growing)) for _ in range(AT_ONCE)]
        whole = door.knock()
        await give(whole, many_frames)
        for _ in range(100):
            await door.serves()
        assert not any(feed.done() for feed in late), "they wait in their sockets"
        for _ in range(2):
            bench.moment += LARGE_LIMIT_S + 0.1
            bench.clients.pulse()
            await eventually_async(lambda: all(feed.done() for feed in late))
        said = bytearray()
        while b"one or two frames" not in said:
            said += await asyncio.get_running_loop().sock_recv(whole, 65536)

    at_door(body)


def test_a_storm_ends_what_is_over_the_limit_and_no_stream_P24(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits_module, "MAX_OF_ONE_PROCESS", 20)
    monkeypatch.setattr(clients_module, "MAX_REFUSED", 5)

    async def body(door: Door) -> None:
        bench = door.bench
        await door.serves()
        early = bench.peer()
        early.say(generate("a"))
        heard = (await bench.said(2))[1]
        storm = [await door.knock_patiently() for _ in range(60)]
        await eventually_async(lambda: sum(map(has_ended, storm)) >= 60 - 18 - 5)
        assert bench.clients.admitted == 20
        bench.clients.send(heard.connection, deltas("a", 0))
        assert await early.hear() == deltas("a", 0)
        for raw in storm:
            raw.close()
        await eventually_async(lambda: bench.clients.admitted == 2)
        bench.peer().say(Ping(id=RequestId("p")))
        await bench.said(3)
        assert bench.of_kind(ClientGone) == []

    at_door(body)


def test_connections_over_the_limit_are_refused_and_ended_P24(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One after the other: one that is refused holds its place until it is ended."""
    monkeypatch.setattr(limits_module, "MAX_OF_ONE_PROCESS", 3)
    monkeypatch.setattr(clients_module, "MAX_REFUSED", 1)

    async def body(bench: Bench) -> None:
        peers = [bench.peer() for _ in range(3)]
        for number, peer in enumerate(peers):
            peer.say(generate("a"))
            await bench.said(number + 1)
        for _ in range(2):
            beyond = bench.peer()
            for id in ("x", "y"):
                beyond.say(generate(id))
                answer = await beyond.hear()
                assert isinstance(answer, Failed)
                assert (answer.id, answer.error.code) == (id, "overloaded")
                assert f"process {os.getpid()} has 3 connections" in answer.error.message
            assert len(bench.events) == 3
            monitor = beyond.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            bench.moment += clients_module.REFUSAL_S
            bench.clients.pulse()
            await eventually_async(lambda m=monitor: m.poll(0))  # type: ignore[misc]
            beyond.socket.disable_monitor()
            monitor.close(0)
            bench.peers.remove(beyond)
            beyond.close()
        peers.pop().close()
        await bench.gone(1)
        bench.peer().say(generate("b"))
        await bench.said(4)

    run(body)
