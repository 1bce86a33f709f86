"""Clients that do not read: what they are owed is merged, bounded, and given up."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from mlxsup.protocol.client_messages import (
    Deltas,
    Failed,
    Ping,
    Reply,
    Subscribe,
)
from mlxsup.protocol.client_messages import Event as EventMessage
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.message import Message
from mlxsup.supervisor.core.events import ClientGone, ClientTooSlow, ConnectionId
from mlxsup.supervisor.sockets import clients as clients_module
from mlxsup.supervisor.sockets import doors as doors_module
from mlxsup.supervisor.sockets.clients import MAX_UNSENT_BYTES
from mlxsup.supervisor.sockets.connection import Connection
from mlxsup.supervisor.sockets.outbox import Outbox

from support.clients_bench import Bench, Peer, deltas, done, encode_counted, fill, generate, run
from support.eventually_async import eventually_async


def test_a_slow_reader_gets_everything_in_order_with_pieces_merged_H7() -> None:
    async def body(bench: Bench) -> None:
        peer = bench.peer(receive_high_water_mark=1)
        peer.say(generate("a"))
        (heard,) = await bench.said(1)
        await fill(bench, heard.connection, "a", 6000, "y" * 200)
        bench.clients.send(heard.connection, done("a", 6000))
        assert bench.of_kind(ClientTooSlow) == []
        seqs: list[int] = []
        sizes: list[int] = []
        while isinstance(message := await peer.hear(), Deltas):
            seqs += [delta.seq for delta in message.deltas]
            sizes.append(len(message.deltas))
        assert message == done("a", 6000)
        assert seqs == list(range(6000))
        assert max(sizes) > 100
        await eventually_async(lambda: bench.connections == {})

    run(body)


def test_a_client_that_never_reads_is_bounded_in_bytes_P15() -> None:
    async def body(bench: Bench) -> None:
        peer, other = bench.peer(receive_high_water_mark=1), bench.peer()
        for id in ("ended", "open"):
            peer.say(generate(id))
        heard = (await bench.said(2))[0]
        other.say(generate("b"))
        others = (await bench.said(3))[2].connection
        await fill(bench, heard.connection, "ended", 3000, "y" * 100)
        bench.clients.send(heard.connection, done("ended", 3000))
        for seq in range(100_000):
            bench.clients.send(heard.connection, deltas("open", seq, "y" * 1000))
            if bench.of_kind(ClientTooSlow):
                break
        assert [e.connection for e in bench.of_kind(ClientTooSlow)] == [heard.connection]
        (connection,) = [c for c in bench.connections.values() if c.id == heard.connection]
        assert connection.outbox.size_bytes < MAX_UNSENT_BYTES // 100
        failed = Failed(id="open", error={"code": "slow_consumer"})
        bench.clients.send(heard.connection, failed)
        bench.clients.send(others, done("b", 0))
        assert await other.hear() == done("b", 0)
        messages: list[Message] = []
        while (
            not isinstance(messages[-1] if messages else None, Failed)
            or len([m for m in messages if isinstance(m, Failed)]) < 2
        ):
            messages.append(await peer.hear())
        ends = [m for m in messages if not isinstance(m, Deltas)]
        assert [(m.id, m.error["code"]) for m in ends if isinstance(m, Failed)] == [
            ("ended", "slow_consumer"),
            ("open", "slow_consumer"),
        ]
        assert len(ends) == 2

    run(body)


def test_a_client_that_never_reads_is_bounded_in_time() -> None:
    async def body(bench: Bench) -> None:
        peer = bench.peer(receive_high_water_mark=1)
        ended = peer.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        peer.say(generate("a"))
        peer.say(Subscribe(id=RequestId("s")))
        heard = (await bench.said(2))[0]
        await fill(bench, heard.connection, "a", 2000, "y" * 1000)
        bench.clients.send(heard.connection, EventMessage(id=RequestId("s"), value={}))
        bench.moment += 9.0
        bench.clients.pulse()
        assert bench.of_kind(ClientTooSlow) == []
        bench.moment += 2.0
        bench.clients.pulse()
        assert len(bench.of_kind(ClientTooSlow)) == 1
        bench.clients.send(heard.connection, Failed(id="a", error={"code": "slow_consumer"}))
        bench.moment += 11.0
        bench.clients.pulse()  # it still does not read
        assert len(bench.of_kind(ClientGone)) == 1
        assert bench.connections == {}
        assert bench.tally.bytes == 0

        def sees_the_end() -> bool:  # once it has read what had arrived: it waits for none in vain
            while peer.socket.poll(0):
                peer.socket.recv_multipart()
            return bool(ended.poll(0))

        await eventually_async(sees_the_end)
        peer.socket.disable_monitor()
        ended.close()

    run(body)


def test_a_client_that_reads_slowly_is_not_taken_for_one_that_never_reads() -> None:
    async def body(bench: Bench) -> None:
        peer = bench.peer(receive_high_water_mark=1)
        peer.say(generate("a"))
        (heard,) = await bench.said(1)
        await fill(bench, heard.connection, "a", 6000, "y" * 1000)
        outbox = bench.connections[heard.connection].outbox
        bench.moment += 9.0
        unsent_bytes = outbox.size_bytes
        while outbox.size_bytes == unsent_bytes:
            await peer.hear()
        bench.moment += 9.0
        assert outbox, "it has not read everything"
        bench.clients.pulse()
        assert bench.of_kind(ClientTooSlow) == []

    run(body)


def test_what_is_unsent_at_the_end_goes_out_to_a_reader() -> None:
    async def body(bench: Bench) -> None:
        peer = bench.peer(receive_high_water_mark=1)
        peer.say(generate("a"))
        (heard,) = await bench.said(1)
        await fill(bench, heard.connection, "a", 3000, "y" * 500)
        bench.clients.send(heard.connection, done("a", 3000))

        async def read() -> Message:
            while isinstance(message := await peer.hear(), Deltas):
                pass
            return message

        reading = asyncio.create_task(read())
        await bench.clients.finish(20.0)
        assert await reading == done("a", 3000)

    run(body)


async def stuck(bench: Bench, count: int) -> list[ConnectionId]:
    """Connections that do not read, each with a head that found no room."""
    ids: list[ConnectionId] = []
    for number in range(count):
        bench.peer(receive_high_water_mark=1).say(generate("a"))
        ids.append((await bench.said(number + 1))[number].connection)
        connection = bench.connections[ids[-1]]
        seqs = itertools.count()

        def is_stuck(connection: Connection = connection, seqs: Iterator[int] = seqs) -> bool:
            if not connection.outbox:
                bench.clients.send(connection.id, deltas("a", next(seqs), "y" * 20_000))
            return bool(connection.outbox) and connection.retry_s == clients_module.RETRY_MOST_S

        await eventually_async(is_stuck, timeout_s=60)
    return ids


def test_what_found_no_room_is_encoded_once_and_tried_now_and_then_H7(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(bench: Bench) -> None:
        ids = await stuck(bench, 3)
        talker = bench.peer()
        talker.say(Ping(id=RequestId("p")))
        mine = (await bench.said(4))[3].connection
        encoded = encode_counted(monkeypatch)
        sends: list[bytes] = []
        socket = bench.sockets[zmq.ROUTER].loop_socket
        send = socket.send

        def noted(frames: list[bytes]) -> bool:
            sends.append(frames[0])
            return send(frames)

        monkeypatch.setattr(socket, "send", noted)
        start = asyncio.get_running_loop().time()
        for number in range(100):  # each is a turn of the loop, and wakes the socket twice
            bench.clients.send(mine, Reply(id=RequestId("p"), value={}))
            await talker.hear()
            for id in ids:
                bench.clients.send(id, deltas("a", 100_000 + number, "y"))
            talker.say(Ping(id=RequestId("p")))
            await bench.said(5 + number)
        seconds = asyncio.get_running_loop().time() - start
        assert encoded == ["reply"] * 100
        tried = len(sends) - 100
        assert tried <= 3 * (1 + seconds / clients_module.RETRY_MOST_S)

    run(body)


def test_who_is_served_last_of_those_that_did_not_read_is_served_too_H7() -> None:
    async def body(bench: Bench) -> None:
        waiting = [bench.connections[id] for id in await stuck(bench, 3)]
        for number, connection in enumerate(waiting):
            connection.retry_at += number * clients_module.RETRY_MOST_S / 4  # not all at once
        for connection, peer in zip(waiting, bench.peers, strict=True):
            outbox = connection.outbox

            def is_sent(outbox: Outbox = outbox, peer: Peer = peer) -> bool:
                while peer.socket.poll(0):
                    peer.socket.recv_multipart()
                return not outbox

            await eventually_async(is_sent, timeout_s=60)

    run(body)


def test_what_is_unsent_at_the_end_is_not_tried_again_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(bench: Bench) -> None:
        loop = asyncio.get_running_loop()
        timers: list[asyncio.TimerHandle] = []
        call_at = loop.call_at

        def noted(
            when: float, callback: Callable[..., object], *arguments: Any, **more: Any
        ) -> asyncio.TimerHandle:
            timer = call_at(when, callback, *arguments, **more)
            if getattr(callback, "__self__", None) is bench.clients:
                timers.append(timer)
            return timer

        def waiting() -> list[asyncio.TimerHandle]:
            return [one for one in timers if one.when() > loop.time() and not one.cancelled()]

        monkeypatch.setattr(loop, "call_at", noted)
        await stuck(bench, 1)
        assert len(waiting()) == 1
        bench.close_all()
        assert waiting() == []

    run(body)


def test_a_stranger_that_does_not_read_its_refusals_is_owed_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doors_module, "MAX_OF_ONE_PROCESS", 0)

    async def body(bench: Bench) -> None:
        encoded = encode_counted(monkeypatch)
        stranger = bench.peer(receive_high_water_mark=1)
        for number in range(5000):
            await eventually_async(lambda: stranger.socket.poll(0, zmq.POLLOUT))
            stranger.say(Ping(id=RequestId(f"{number}")))
        await eventually_async(lambda: encoded.count("failed") == 5000, timeout_s=60)
        assert bench.connections == {}
        assert bench.tally.bytes == 0

    run(body)


def test_who_owes_most_is_given_up_when_all_owe_too_much_together_P15(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clients_module, "MAX_UNSENT_IN_ALL_BYTES", MAX_UNSENT_BYTES // 2)

    async def body(bench: Bench) -> None:
        first, most, last = await stuck(bench, 3)
        for seq in range(10_000):
            if bench.of_kind(ClientTooSlow):
                break
            for id, times in ((first, 1), (most, 3), (last, 1)):
                for _ in range(times):
                    bench.clients.send(id, deltas("a", seq, "y" * 20_000))
        assert [e.connection for e in bench.of_kind(ClientTooSlow)] == [most]
        assert bench.tally.bytes < MAX_UNSENT_BYTES // 2
        held = [c.outbox.size_bytes for c in bench.connections.values()]
        assert bench.tally.bytes == sum(held)
        for peer in bench.peers:
            peer.close()
        await bench.gone(3)
        assert bench.tally.bytes == 0

    run(body)
