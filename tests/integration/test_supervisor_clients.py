"""The clients' socket, with real sockets: garbage, ids, lost clients, unread messages."""

from __future__ import annotations

import asyncio
import os
import socket as sockets
from dataclasses import replace

import msgpack
import pytest
import zmq

from mlxsup.protocol.client_messages import (
    Alive,
    Cancel,
    Deltas,
    Failed,
    Load,
    Ping,
    Reply,
    Subscribe,
)
from mlxsup.protocol.client_messages import Event as EventMessage
from mlxsup.protocol.ids import ConnectionId, ModelName, RequestId
from mlxsup.protocol.message import Message
from mlxsup.supervisor.core.errors import slow_consumer
from mlxsup.supervisor.core.events import ClientGone, ClientSaid, ClientTooSlow
from mlxsup.supervisor.sockets import clients as clients_module
from mlxsup.supervisor.sockets import limits as limits_module
from mlxsup.supervisor.sockets.clients import MAX_UNSENT_BYTES, Client
from mlxsup.supervisor.sockets.connection import Connection
from mlxsup.supervisor.sockets.outbox import MAX_MERGED_BYTES, Outbox
from mlxsup.supervisor.sockets.peer import Names

from support.client.clients_bench import (
    Bench,
    Peer,
    deltas,
    done,
    encode_counted,
    fill,
    generate,
    run,
)
from support.eventually_async import eventually_async


def test_messages_become_events_and_answers_come_back() -> None:
    async def body(bench: Bench) -> None:
        first, second = bench.peer(), bench.peer()
        first.say(generate("a"))
        (heard,) = await bench.said(1)
        assert (heard.message, heard.now) == (generate("a"), 100.0)
        second.say(Ping(id=RequestId("p")))
        connection = (await bench.said(2))[1].connection
        assert connection != heard.connection
        bench.clients.send(connection, Reply(id=RequestId("p"), value={"ok": 1}))
        bench.clients.send(heard.connection, deltas("a", 0))
        bench.clients.send(heard.connection, done("a", 1))
        assert await second.hear() == Reply(id=RequestId("p"), value={"ok": 1})
        assert await first.hear() == deltas("a", 0)
        assert await first.hear() == done("a", 1)

    run(body)


def test_a_cancel_never_overtakes_its_request_whatever_their_sizes_D5() -> None:
    """One connection keeps the order, over many turns of receiving."""

    async def body(bench: Bench) -> None:
        peer = bench.peer()
        asked: list[Message] = []
        for number in range(200):
            size = 1_000_000 if number % 20 == 0 else number
            asked.append(replace(generate(f"r{number}"), body=b"x" * size))
            asked.append(Cancel(id=RequestId(f"r{number}")))
        for message in asked:
            peer.say(message)
        heard = [said.message for said in await bench.said(len(asked))]
        assert heard == asked

    run(body)


def test_another_user_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the daemon takes itself for somebody else, so that the test's own user is a stranger."""
    uid = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: uid)

    async def body(bench: Bench) -> None:
        with sockets.socket(sockets.AF_UNIX) as stranger:
            stranger.connect(str(bench.path))
            stranger.settimeout(20)
            assert await asyncio.to_thread(stranger.recv, 1) == b"", "ended without a greeting"
        assert bench.clients.admitted == 0
        assert bench.events == []

    run(body)


def test_a_connection_keeps_the_names_of_its_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []

    def of_process(pid: int | None) -> Names:
        asked.append(pid)
        return Names(process=f"name {len(asked)}")

    monkeypatch.setattr(Names, "of_process", of_process)

    async def body(bench: Bench) -> None:
        peer = bench.peer()
        for number in range(3):
            peer.say(generate(f"r{number}"))
        assert [said.process for said in await bench.said(3)] == ["name 1"] * 3
        assert asked == [os.getpid()]

    run(body)


def test_only_the_client_that_ends_with_an_open_request_is_gone_D12() -> None:
    async def body(bench: Bench) -> None:
        peer, other = bench.peer(), bench.peer()
        peer.say(generate("a"))
        await bench.said(1)
        other.say(generate("b"))
        await bench.said(2)
        connection = bench.of_kind(ClientSaid)[0].connection
        for number in range(20):
            passer_by = bench.peer()
            passer_by.say(Ping(id=RequestId("p")))
            await bench.said(3 + number)
            bench.peers.pop().close()
        peer.close()
        watcher = bench.peer()
        watcher.say(Subscribe(id=RequestId("s")))
        await bench.said(23)
        bench.peers.pop().close()
        await eventually_async(lambda: len(bench.of_kind(ClientGone)) == 22)
        assert connection in [e.connection for e in bench.of_kind(ClientGone)]
        bench.clients.send(connection, done("a", 0))  # crosses its end: dropped
        bench.clients.send(bench.of_kind(ClientSaid)[1].connection, done("b", 0))
        assert await other.hear(is_alive_shown=True) == done("b", 0)

    run(body)


def test_a_message_right_before_a_client_ends_is_read() -> None:
    async def body(bench: Bench) -> None:
        for number in range(30):
            peer = bench.peer()
            peer.say(Ping(id=RequestId(str(number))))
            peer.socket.close(linger=5000)
            await asyncio.to_thread(peer.context.term)
        heard = await bench.said(30)
        assert {e.message.id for e in heard if isinstance(e.message, Ping)} == {
            str(number) for number in range(30)
        }
        await bench.gone(30)

    run(body)


def test_a_client_that_ends_with_nothing_open_is_not_remembered() -> None:
    async def body(bench: Bench) -> None:
        for number in range(20):
            peer = bench.peer()
            peer.say(Ping(id=RequestId("p")))
            (*_, heard) = await bench.said(number + 1)
            bench.clients.send(heard.connection, Reply(id=RequestId("p"), value={}))
            await peer.hear()
            peer.close()
        await eventually_async(lambda: bench.connections == {})
        assert bench.of_kind(ClientGone) == []

    run(body)


def test_signs_of_life_go_to_those_who_have_something_open() -> None:
    async def body(bench: Bench) -> None:
        waiting, watching, idle = bench.peer(), bench.peer(), bench.peer()
        waiting.say(Load(id=RequestId("l"), model=ModelName("m")))
        watching.say(Subscribe(id=RequestId("s")))
        idle.say(Ping(id=RequestId("p")))
        for heard in await bench.said(3):
            if isinstance(heard.message, Ping):
                bench.clients.send(heard.connection, Reply(id=RequestId("p"), value={}))
        bench.clients.pulse()
        assert isinstance(await waiting.hear(is_alive_shown=True), Alive)
        assert isinstance(await watching.hear(is_alive_shown=True), Alive)
        assert isinstance(await idle.hear(is_alive_shown=True), Reply)
        assert idle.socket.poll(0) == 0

    run(body)


@pytest.mark.parametrize(
    "routing_id", [b"m%d", b"alic%d"], ids=["short", "as long as libzmq's own"]
)
def test_a_routing_id_of_a_client_s_own_is_refused_and_takes_no_place_D12(
    routing_id: bytes,
) -> None:
    async def body(bench: Bench) -> None:
        good = bench.peer()
        good.say(generate("a"))
        await bench.said(1)
        for number in range(5):
            named = Peer(bench.clients.endpoint, routing_id=routing_id % number)
            named.say(generate(f"n{number}"))
            answer = await named.hear()
            assert isinstance(answer, Failed)
            assert (answer.id, answer.error.code) == (f"n{number}", "invalid_request")
            assert "routing id" in answer.error.message
            named.close()
            await eventually_async(lambda: bench.clients.admitted == 1)
        assert len(bench.events) == 1

    run(body)


@pytest.mark.parametrize(
    "greeting",
    [
        b"\x01\x00",  # ZMTP 1.0: no greeting; a length and a flag, the first of the identity
        b"\xff\0\0\0\0\0\0\0\x01\x7f\x01",  # ZMTP 2
        b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01PLAIN",
    ],
)
def test_a_peer_of_an_old_zmtp_or_with_a_password_is_ended(greeting: bytes) -> None:
    async def body(bench: Bench) -> None:
        bench.peer().say(Ping(id=RequestId("known")))
        await bench.said(1)
        header = msgpack.packb({"type": "ping", "id": "p"})
        with sockets.socket(sockets.AF_UNIX) as raw:
            raw.connect(str(bench.path))
            raw.sendall(greeting + bytes([1 + len(header), 0]) + header + bytes(64))
            raw.setblocking(False)

            def has_ended() -> bool:
                try:
                    while raw.recv(4096):
                        pass
                except BlockingIOError:
                    return False
                return True

            await eventually_async(has_ended)
        assert len(bench.events) == 1

    run(body)


def test_a_second_use_of_an_open_id_is_refused_by_name_and_harms_not_the_first_P1() -> None:
    async def body(bench: Bench) -> None:
        peer = bench.peer()
        peer.say(generate("a"))
        (heard,) = await bench.said(1)
        for message in (
            generate("a"),
            Ping(id=RequestId("a")),
            Subscribe(id=RequestId("a")),
            Load(id=RequestId("a"), model=ModelName("m")),
        ):
            peer.say(message)
            refused = await peer.hear()
            assert isinstance(refused, Failed)
            assert refused.error.code == "duplicate_id"
            assert refused.error.detail == {"id": "a", "refused": "second use"}
        assert len(bench.events) == 1
        bench.clients.send(heard.connection, deltas("a", 0))
        assert await peer.hear() == deltas("a", 0)
        peer.close()
        await bench.gone(1)  # so it was still open

    run(body)


def test_a_connection_has_so_many_requests_open_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clients_module, "MAX_OPEN_PER_CONNECTION", 3)

    async def body(bench: Bench) -> None:
        peer = bench.peer()
        for id in ("a", "b", "c", "d"):
            peer.say(generate(id))
        refused = await peer.hear()
        assert isinstance(refused, Failed)
        assert (refused.id, refused.error.code) == ("d", "overloaded")
        (first, *_) = await bench.said(3)
        bench.clients.send(first.connection, done("a", 0))
        assert await peer.hear() == done("a", 0)
        peer.say(generate("d"))
        await bench.said(4)

    run(body)


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
        assert 100 < max(sizes) <= MAX_MERGED_BYTES // 200
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
        owed_bytes = connection.outbox.size_bytes
        assert owed_bytes < MAX_UNSENT_BYTES // 100
        bench.clients.send(heard.connection, deltas("open", 20_000, "y" * 1000))
        assert connection.outbox.size_bytes == owed_bytes, "its streams have ended"
        failed = Failed(id="open", error=slow_consumer())
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
        assert [(m.id, m.error.code) for m in ends if isinstance(m, Failed)] == [
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
        descriptor = bench.connections[heard.connection].socket.fileno()
        await fill(bench, heard.connection, "a", 2000, "y" * 1000)
        bench.clients.send(heard.connection, EventMessage(id=RequestId("s"), value={}))
        bench.moment += 9.0
        bench.clients.pulse()
        assert bench.of_kind(ClientTooSlow) == []
        bench.moment += 2.0
        bench.clients.pulse()
        assert len(bench.of_kind(ClientTooSlow)) == 1
        bench.clients.send(heard.connection, Failed(id="a", error=slow_consumer()))
        bench.moment += 9.0
        bench.clients.pulse()
        assert bench.clients.admitted == 1, "it has as long again to read its ends"
        bench.moment += 2.0
        bench.clients.pulse()  # it still does not read
        assert bench.clients.admitted == 0
        assert not asyncio.get_running_loop().remove_writer(descriptor), "the next has this number"
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


def test_a_client_that_was_slow_is_served_whole_streams_once_it_has_read_its_ends() -> None:
    async def body(bench: Bench) -> None:
        peer = bench.peer(receive_high_water_mark=1)
        peer.say(generate("a"))
        peer.say(Load(id=RequestId("stays open"), model=ModelName("m")))
        heard = (await bench.said(2))[0]
        await fill(bench, heard.connection, "a", 3000, "y" * 1000)
        bench.moment += 11.0
        bench.clients.pulse()
        slow = Failed(id="a", error=slow_consumer())
        bench.clients.send(heard.connection, slow)
        outbox = bench.connections[heard.connection].outbox
        owed = len(outbox)
        peer.say(generate("early"))
        await eventually_async(lambda: len(outbox) > owed)
        messages: list[Message] = []
        while len([one for one in messages if isinstance(one, Failed)]) < 2:
            messages.append(await peer.hear())
        assert messages[-2:] == [slow, Failed(id="early", error=slow_consumer())]
        peer.say(generate("b"))
        await bench.said(3)
        bench.clients.send(heard.connection, deltas("b", 0, "piece"))
        assert await peer.hear() == deltas("b", 0, "piece")

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


def test_finish_sends_unsent_messages_to_a_reader() -> None:
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

        await eventually_async(is_stuck)
    return ids


def test_a_stuck_client_costs_no_call_while_others_are_served_H7(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(bench: Bench) -> None:
        ids = await stuck(bench, 3)
        talker = bench.peer()
        talker.say(Ping(id=RequestId("p")))
        mine = (await bench.said(4))[3].connection
        encoded = encode_counted(monkeypatch)
        tried: list[ConnectionId] = []
        try_send = Connection._try_send

        def noted(connection: Connection, wire: bytes | memoryview) -> int:
            assert isinstance(connection, Client)
            tried.append(connection.id)
            return try_send(connection, wire)

        monkeypatch.setattr(Connection, "_try_send", noted)
        for number in range(100):
            bench.clients.send(mine, Reply(id=RequestId("p"), value={}))
            await talker.hear()
            for id in ids:
                bench.clients.send(id, deltas("a", 20_000 + number, "y"))
            talker.say(Ping(id=RequestId("p")))
            await bench.said(5 + number)
        assert (encoded, tried) == (["reply"] * 100, [mine] * 100)

    run(body)


def test_messages_of_one_turn_leave_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(bench: Bench) -> None:
        peer = bench.peer()
        peer.say(generate("a"))
        (heard,) = await bench.said(1)
        tried: list[int] = []
        try_send = Connection._try_send

        def noted(connection: Connection, wire: bytes | memoryview) -> int:
            tried.append(len(wire))
            return try_send(connection, wire)

        monkeypatch.setattr(Connection, "_try_send", noted)
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

        await eventually_async(is_stuck)
        owed_bytes = connection.outbox.size_bytes
        await eventually_async(lambda: is_stuck() and asked == 20_000, timeout_s=120)
        assert connection.outbox.size_bytes <= owed_bytes < MAX_UNSENT_BYTES // 50

    run(body)


def test_the_largest_debtor_is_given_up_at_the_common_limit_P15(
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


def test_a_pulse_after_the_end_does_nothing() -> None:
    async def body(bench: Bench) -> None:
        bench.peer().say(generate("a"))
        await bench.said(1)
        bench.close_all()
        bench.clients.pulse()

    run(body)
