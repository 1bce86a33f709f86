"""Clients that do not read: what they are owed is merged, bounded, and given up."""

from __future__ import annotations

import asyncio

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
from mlxsup.supervisor.sockets import limits as limits_module
from mlxsup.supervisor.sockets.clients import MAX_UNSENT_BYTES, Clients
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
        await eventually_async(lambda: bench.tally.bytes == 0)

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
        for seq in range(20_000):
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
        assert bench.clients.admitted == 0
        assert bench.of_kind(ClientGone) == [], "nothing of it is open any more"
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
    """Connections that do not read, and have no room."""
    ids: list[ConnectionId] = []
    for number in range(count):
        bench.peer(receive_high_water_mark=1).say(generate("a"))
        ids.append((await bench.said(number + 1))[number].connection)
        outbox = bench.connections[ids[-1]].outbox
        last = -1

        def is_stuck(id: ConnectionId = ids[-1], outbox: Outbox = outbox) -> bool:
            """Whether nothing has left since the last look."""
            nonlocal last
            if not outbox:
                bench.clients.send(id, deltas("a", 0, "y" * 20_000))
            before, last = last, outbox.size_bytes
            return bool(outbox) and before == last

        await eventually_async(is_stuck, timeout_s=60)
    return ids


def test_who_does_not_read_costs_no_call_while_others_are_served_H7(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(bench: Bench) -> None:
        ids = await stuck(bench, 3)
        talker = bench.peer()
        talker.say(Ping(id=RequestId("p")))
        mine = (await bench.said(4))[3].connection
        encoded = encode_counted(monkeypatch)
        tried: list[ConnectionId] = []
        try_send = Clients._try_send

        def noted(self: Clients, connection: Connection, wire: bytes | memoryview) -> int:
            tried.append(connection.id)
            return try_send(self, connection, wire)

        monkeypatch.setattr(Clients, "_try_send", noted)
        for number in range(100):
            bench.clients.send(mine, Reply(id=RequestId("p"), value={}))
            await talker.hear()
            for id in ids:
                bench.clients.send(id, deltas("a", 20_000 + number, "y"))
            talker.say(Ping(id=RequestId("p")))
            await bench.said(5 + number)
        assert (encoded, tried) == (["reply"] * 100, [mine] * 100)

    run(body)


def test_who_reads_again_gets_all_of_it_H7() -> None:
    async def body(bench: Bench) -> None:
        waiting = [bench.connections[id] for id in await stuck(bench, 3)]
        for connection, peer in zip(waiting, bench.peers, strict=True):
            outbox = connection.outbox

            def is_sent(outbox: Outbox = outbox, peer: Peer = peer) -> bool:
                while peer.socket.poll(0):
                    peer.socket.recv_multipart()
                return not outbox

            await eventually_async(is_sent, timeout_s=60)

    run(body)


def test_what_is_sent_in_one_turn_leaves_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(bench: Bench) -> None:
        peer = bench.peer()
        peer.say(generate("a"))
        (heard,) = await bench.said(1)
        tried: list[int] = []
        try_send = Clients._try_send

        def noted(self: Clients, connection: Connection, wire: bytes | memoryview) -> int:
            tried.append(len(wire))
            return try_send(self, connection, wire)

        monkeypatch.setattr(Clients, "_try_send", noted)
        for seq in range(16):
            bench.clients.send(heard.connection, deltas("a", seq))
        for seq in range(16):
            assert await peer.hear() == deltas("a", seq)
        assert len(tried) == 1

    run(body)


def test_a_stranger_that_does_not_read_its_refusals_is_owed_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits_module, "MAX_OF_ONE_PROCESS", 0)

    async def body(bench: Bench) -> None:
        stranger = bench.peer(receive_high_water_mark=1)
        stranger.say(Ping(id=RequestId("first")))
        await eventually_async(lambda: len(bench.connections) == 1)
        (connection,) = bench.connections.values()
        asked = 0

        def is_stuck() -> bool:
            nonlocal asked
            while stranger.socket.poll(0, zmq.POLLOUT) and asked < 20_000:
                stranger.say(Ping(id=RequestId(f"{asked}")))
                asked += 1
            return bool(connection.outbox)

        await eventually_async(is_stuck, timeout_s=60)
        owed_bytes = connection.outbox.size_bytes
        await eventually_async(lambda: is_stuck() and asked == 20_000, timeout_s=120)
        assert connection.outbox.size_bytes <= owed_bytes < MAX_UNSENT_BYTES // 50

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
