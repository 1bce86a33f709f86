"""The clients' socket, with real sockets: garbage, lost clients, clients that do not read."""

from __future__ import annotations

import asyncio
import itertools
import os
import select
import shutil
import socket as sockets
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from mlxsup.protocol.client_messages import (
    SUPERVISOR_TO_CLIENT,
    Alive,
    Cancel,
    ClientDelta,
    Deltas,
    Done,
    Failed,
    Generate,
    Load,
    Ping,
    Reply,
    Subscribe,
)
from mlxsup.protocol.client_messages import Event as EventMessage
from mlxsup.protocol.codec import Decoder, encode
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import FinishReason
from mlxsup.supervisor.core.events import ClientGone, ClientSaid, ClientTooSlow, ConnectionId, Event
from mlxsup.supervisor.runtime_folder import raise_open_file_limit
from mlxsup.supervisor.sockets import clients as clients_module
from mlxsup.supervisor.sockets import doors as doors_module
from mlxsup.supervisor.sockets import outbox as outbox_module
from mlxsup.supervisor.sockets.clients import MAX_UNSENT_BYTES, Clients
from mlxsup.supervisor.sockets.connection import Connection
from mlxsup.supervisor.sockets.outbox import Outbox
from mlxsup.supervisor.sockets.transport import LoopSocket
from support.eventually_async import eventually_async


class Peer:
    """A client made of a bare DEALER."""

    def __init__(
        self, endpoint: str, receive_high_water_mark: int = 0, routing_id: bytes = b""
    ) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if routing_id:
            self.socket.setsockopt(zmq.ROUTING_ID, routing_id)
        self.socket.setsockopt(zmq.RCVHWM, receive_high_water_mark)
        self.socket.connect(endpoint)
        self._decoder = Decoder(SUPERVISOR_TO_CLIENT, is_strict=False)

    def say(self, message: Message) -> None:
        self.socket.send_multipart(encode(message))

    async def hear(self, *, is_alive_shown: bool = False) -> Message:
        """The next message that is no sign of life."""
        while True:
            await eventually_async(lambda: self.socket.poll(0), timeout_s=60)
            message = self._decoder.decode(self.socket.recv_multipart())
            if is_alive_shown or not isinstance(message, Alive):
                return message

    def close(self) -> None:
        self.context.destroy(linger=0)


def encode_counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The type of each message that is encoded from now on."""
    seen: list[str] = []

    def counting(message: Message) -> list[bytes]:
        seen.append(message.TYPE)
        return encode(message)

    for module in (clients_module, outbox_module):
        monkeypatch.setattr(module, "encode", counting)
    return seen


class Bench:
    """A `Clients` under test; its events are collected."""

    def __init__(self, folder: Path, max_connections: int = 1000) -> None:
        self.events: list[Event] = []
        self.moment = 100.0
        self.is_closed = False
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.path = folder / "c.sock"
        self.clients = Clients(
            self.context,
            self.path,
            post=self.events.append,
            now=lambda: self.moment,
            max_connections=max_connections,
        )
        self.peers: list[Peer] = []

    def peer(self, receive_high_water_mark: int = 0) -> Peer:
        peer = Peer(self.clients.endpoint, receive_high_water_mark)
        self.peers.append(peer)
        return peer

    async def said(self, count: int) -> list[ClientSaid]:
        """Waits for so many messages of clients."""

        def found() -> list[ClientSaid]:
            return [e for e in self.events if isinstance(e, ClientSaid)]

        await eventually_async(lambda: len(found()) >= count)
        return found()

    async def gone(self, count: int) -> None:
        """Waits until so many clients are known to be gone.

        The look that follows an announced end may come too early: then the pulse finds it.
        """

        def found() -> bool:
            self.clients.pulse()
            return len(self.of_kind(ClientGone)) == count

        await eventually_async(found)

    def of_kind(self, kind: type[Event]) -> list[Any]:
        return [e for e in self.events if type(e) is kind]

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        if not self.is_closed:
            self.close_all()

    def close_all(self) -> None:
        self.is_closed = True
        self.clients.close(0.0)
        self.context.term()


def run(body: Callable[[Bench], Awaitable[None]], **more: Any) -> None:
    folder = Path(tempfile.mkdtemp(prefix="mlxsup-t-", dir="/tmp"))

    async def main() -> None:
        bench = Bench(folder, **more)
        try:
            async with asyncio.timeout(300):
                await body(bench)
        finally:
            bench.close()
        assert not bench.path.exists()

    try:
        asyncio.run(main())
    finally:
        shutil.rmtree(folder)


def generate(id: str) -> Generate:
    return Generate(id=RequestId(id), model=ModelName("m"), body=b"\x80")


def deltas(id: str, seq: int, text: str = "x") -> Deltas:
    return Deltas(deltas=[ClientDelta(id=RequestId(id), seq=seq, text=text)])


def done(id: str, seq: int) -> Done:
    return Done(id=RequestId(id), seq=seq, finish_reason=FinishReason.STOP)


def test_what_is_said_becomes_events_and_answers_come_back() -> None:
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


GARBAGE: list[list[bytes]] = [
    [b""],
    [b"", b""],
    [b"\xc1"],
    [b"\x80"],
    [b"a", b"b", b"c"],
    [os.urandom(3000)],
    [msgpack.packb({"type": "generate", "id": "g", "model": 3}), b""],
    [msgpack.packb({"type": "nonsense", "id": "g"})],
    [msgpack.packb({"type": "ping", "id": "g", "more": float("nan")})],
    [msgpack.packb({"type": "ping", "id": "g" * 70_000})],
    [b"\x81" * 60_000],
    [msgpack.packb({"type": "generate", "id": "g", "model": "m"}), b"x" * (9 * 1024 * 1024)],
    [msgpack.packb({"type": "ping", "id": "g", "v": 99})],
]


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


def test_garbage_is_answered_and_harms_nobody_P17() -> None:
    async def body(bench: Bench) -> None:
        good, bad = bench.peer(), bench.peer()
        good.say(generate("a"))
        (heard,) = await bench.said(1)
        for frames in GARBAGE:
            bad.socket.send_multipart(frames)
            answer = await bad.hear()
            assert isinstance(answer, Failed)
            assert answer.error["code"] in ("invalid_request", "unsupported_version")
        bad.say(Ping(id=RequestId("p")))
        await bench.said(2)
        bench.clients.send(heard.connection, done("a", 0))
        assert await good.hear() == done("a", 0)
        assert len(bench.events) == 2

    run(body)


def test_bytes_that_are_not_zeromq_harm_nobody() -> None:
    async def body(bench: Bench) -> None:
        with sockets.socket(sockets.AF_UNIX) as raw:
            raw.connect(str(bench.path))
            raw.sendall(b"POST / HTTP/1.1\r\nHost: x\r\n\r\n" + os.urandom(5000))
            peer = bench.peer()
            peer.say(Ping(id=RequestId("p")))
            await bench.said(1)

    run(body)


@pytest.mark.skipif(sys.platform != "linux", reason="libzmq asks who the peer is on Linux only")
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


def test_a_client_that_ends_with_something_open_is_gone_and_nobody_else_is_asked_D12() -> None:
    async def body(bench: Bench) -> None:
        peer, other = bench.peer(), bench.peer()
        peer.say(generate("a"))
        await bench.said(1)
        other.say(generate("b"))
        await bench.said(2)
        connection = bench.of_kind(ClientSaid)[0].connection
        for number in range(200):
            passer_by = bench.peer()
            passer_by.say(Ping(id=RequestId("p")))
            await bench.said(3 + number)
            bench.peers.pop().close()
        peer.close()
        await eventually_async(lambda: len(bench.of_kind(ClientGone)) == 201)
        assert connection in [e.connection for e in bench.of_kind(ClientGone)]
        bench.clients.send(connection, done("a", 0))  # crosses its end: dropped
        bench.clients.send(bench.of_kind(ClientSaid)[1].connection, done("b", 0))
        assert await other.hear(is_alive_shown=True) == done("b", 0)

    run(body)


def test_what_a_client_says_in_its_last_moment_is_heard() -> None:
    async def body(bench: Bench) -> None:
        for number in range(100):
            peer = bench.peer()
            peer.say(Ping(id=RequestId(str(number))))
            peer.socket.close(linger=5000)
            await asyncio.to_thread(peer.context.term)
        heard = await bench.said(100)
        assert {e.message.id for e in heard if isinstance(e.message, Ping)} == {
            str(number) for number in range(100)
        }
        await bench.gone(100)

    run(body)


def send_in_vain(socket: LoopSocket, gone: ConnectionId) -> None:
    """Sends to one who is gone when a message of another has arrived, in one round of the loop."""
    descriptor = socket.socket.getsockopt(zmq.FD)
    assert isinstance(descriptor, int)
    assert select.select([descriptor], [], [], 10)[0]
    until = time.monotonic() + 0.01
    while time.monotonic() < until:  # a send looks for news only every few milliseconds
        with pytest.raises(zmq.ZMQError, match="Host unreachable"):
            socket.send([gone, b"x"])


def test_a_message_that_arrives_beside_a_send_in_vain_is_heard() -> None:
    async def body(bench: Bench) -> None:
        peer, gone = bench.peer(), bench.peer()
        gone.say(generate("a"))
        (heard,) = await bench.said(1)
        peer.say(Ping(id=RequestId("p")))
        await bench.said(2)
        gone.close()
        await bench.gone(1)
        for number in range(20):
            peer.say(Ping(id=RequestId(str(number))))
            send_in_vain(bench.clients._socket, heard.connection)
            await bench.said(3 + number)

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
        assert bench.clients._connections == {}
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


async def fill(bench: Bench, connection: Any, id: str, count: int, text: str) -> None:
    for seq in range(count):
        bench.clients.send(connection, deltas(id, seq, text))
        if seq % 100 == 0:
            await asyncio.sleep(0)


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
        await eventually_async(lambda: bench.clients._connections == {})

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
        (connection,) = [c for c in bench.clients._connections.values() if c.id == heard.connection]
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
        assert bench.clients._connections == {}
        assert bench.clients._tally.bytes == 0

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
        outbox = bench.clients._connections[heard.connection].outbox
        bench.moment += 9.0
        unsent_bytes = outbox.size_bytes
        while outbox.size_bytes == unsent_bytes:
            await peer.hear()
        bench.moment += 9.0
        assert outbox, "it has not read everything"
        bench.clients.pulse()
        assert bench.of_kind(ClientTooSlow) == []

    run(body)


def test_a_pulse_that_was_asked_for_before_the_end_does_nothing_after_it() -> None:
    async def body(bench: Bench) -> None:
        bench.peer().say(generate("a"))
        await bench.said(1)
        bench.close_all()
        bench.clients.pulse()

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
        connection = bench.clients._connections[ids[-1]]
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
        send = bench.clients._socket.send

        def noted(frames: list[bytes]) -> bool:
            sends.append(frames[0])
            return send(frames)

        monkeypatch.setattr(bench.clients._socket, "send", noted)
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
        waiting = [bench.clients._connections[id] for id in await stuck(bench, 3)]
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


def test_what_is_unsent_at_the_end_is_not_tried_again_after_it() -> None:
    async def body(bench: Bench) -> None:
        await stuck(bench, 1)
        timer = bench.clients._retry_timer
        bench.close_all()
        assert timer is not None
        assert timer.cancelled()

    run(body)


def test_a_stranger_that_does_not_read_its_refusals_is_owed_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doors_module, "MAX_OF_ONE_PROCESS", 0)

    async def body(bench: Bench) -> None:
        refused: list[str] = []
        refuse = bench.clients._refuse

        def refuse_counted(*what: Any) -> None:
            refused.append(what[2])
            refuse(*what)

        monkeypatch.setattr(bench.clients, "_refuse", refuse_counted)
        stranger = bench.peer(receive_high_water_mark=1)
        for number in range(5000):
            await eventually_async(lambda: stranger.socket.poll(0, zmq.POLLOUT))
            stranger.say(Ping(id=RequestId(f"{number}")))
        await eventually_async(lambda: len(refused) == 5000, timeout_s=60)
        assert bench.clients._unsent == {}
        assert bench.clients._tally.bytes == 0

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
        assert bench.clients._tally.bytes < MAX_UNSENT_BYTES // 2
        held = [c.outbox.size_bytes for c in bench.clients._connections.values()]
        assert bench.clients._tally.bytes == sum(held)
        for peer in bench.peers:
            peer.close()
        await bench.gone(3)
        assert bench.clients._tally.bytes == 0

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
            assert (answer.id, answer.error["code"]) == (f"n{number}", "invalid_request")
            assert "routing id" in answer.error["message"]
            named.close()
            await eventually_async(lambda: bench.clients.admitted == 1)
        assert len(bench.events) == 1

    run(body)


def test_a_peer_of_an_old_zmtp_of_which_libzmq_knows_no_descriptor_is_refused() -> None:
    async def body(bench: Bench) -> None:
        bench.peer().say(Ping(id=RequestId("known")))
        await bench.said(1)
        header = msgpack.packb({"type": "ping", "id": "p"})
        with sockets.socket(sockets.AF_UNIX) as raw:
            raw.connect(str(bench.path))
            # ZMTP 1.0: no greeting; a length and a flag before each frame, the first the identity.
            raw.sendall(b"\x01\x00" + bytes([1 + len(header), 0]) + header)
            raw.setblocking(False)
            received = b""

            def answered() -> bool:
                nonlocal received
                try:
                    received += raw.recv(4096)
                except BlockingIOError:
                    pass
                return b"must speak ZMTP 3" in received

            await eventually_async(answered)
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
            assert refused.error["code"] == "duplicate_id"
            assert refused.error["detail"] == {"id": "a", "refused": "second use"}
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
        assert (refused.id, refused.error["code"]) == ("d", "overloaded")
        (first, *_) = await bench.said(3)
        bench.clients.send(first.connection, done("a", 0))
        assert await peer.hear() == done("a", 0)
        peer.say(generate("d"))
        await bench.said(4)

    run(body)


def test_a_connection_has_one_subscription_and_ids_that_collide_leave_none_behind() -> None:
    async def body(bench: Bench) -> None:
        peer = bench.peer()
        peer.say(Subscribe(id=RequestId("s")))
        (heard,) = await bench.said(1)
        peer.say(generate("s"))
        assert isinstance(await peer.hear(), Failed)
        peer.say(Subscribe(id=RequestId("t")))
        await bench.said(2)
        superseded = Failed(id="s", error={"code": "superseded"})
        bench.clients.send(heard.connection, superseded)
        assert await peer.hear() == superseded
        bench.clients.send(heard.connection, EventMessage(id=RequestId("t"), value={}))
        assert await peer.hear() == EventMessage(id=RequestId("t"), value={})
        peer.close()
        await bench.gone(1)

    run(body)


# ---------------------------------------------------------------- storms


def is_connected(one: sockets.socket, path: Path) -> bool:
    """Whether another try to connect has found room."""
    return one.connect_ex(str(path)) == 0


class Raw:
    """Bare connections of this process; those that were turned away have ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.held: list[sockets.socket] = []

    async def knock(self, count: int) -> None:
        for _ in range(count):
            one = sockets.socket(sockets.AF_UNIX)
            one.setblocking(False)
            self.held.append(one)
            await eventually_async(partial(is_connected, one, self.path))

    def ended(self) -> int:
        """How many have been ended."""
        readable, _, _ = select.select(self.held, [], [], 0)
        return sum(is_ended(one) for one in readable)

    def close(self) -> None:
        for one in self.held:
            one.close()


def is_ended(one: sockets.socket) -> bool:
    try:
        while one.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def test_a_storm_ends_what_is_over_the_limit_and_no_stream_P24(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doors_module, "MAX_OF_ONE_PROCESS", 20)
    monkeypatch.setattr(doors_module, "MAX_REFUSED", 5)

    async def body(bench: Bench) -> None:
        early = bench.peer()
        early.say(generate("a"))
        (heard,) = await bench.said(1)
        raw = Raw(bench.path)
        try:
            await raw.knock(60)
            await eventually_async(lambda: raw.ended() >= 60 - 19 - 5)
            assert bench.clients.admitted == 20
            bench.clients.send(heard.connection, deltas("a", 0))
            assert await early.hear() == deltas("a", 0)
        finally:
            raw.close()
        await eventually_async(lambda: bench.clients.admitted == 1)
        late = bench.peer()
        late.say(Ping(id=RequestId("p")))
        await bench.said(2)
        assert bench.of_kind(ClientGone) == []

    run(body)


def test_who_is_over_the_limit_is_told_so_and_then_ended_P24(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doors_module, "MAX_OF_ONE_PROCESS", 3)

    async def body(bench: Bench) -> None:
        peers = [bench.peer() for _ in range(3)]
        for number, peer in enumerate(peers):
            peer.say(generate("a"))
            await bench.said(number + 1)
        # Its first message is read before anything is heard of its arrival.
        pair = bench.clients._monitor._pair
        asyncio.get_running_loop().remove_reader(pair._descriptor)
        beyond = bench.peer()
        for id in ("x", "y"):
            beyond.say(generate(id))
            answer = await beyond.hear()
            assert isinstance(answer, Failed)
            assert (answer.id, answer.error["code"]) == (id, "overloaded")
            assert f"process {os.getpid()} has 3 connections" in answer.error["message"]
        assert len(bench.events) == 3
        asyncio.get_running_loop().add_reader(pair._descriptor, pair._drain)
        pair.drain_soon()
        monitor = beyond.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        bench.moment += doors_module.REFUSAL_S
        bench.clients.pulse()
        await eventually_async(lambda: monitor.poll(0))
        beyond.socket.disable_monitor()
        monitor.close(0)
        peers.pop().close()
        bench.peers.remove(beyond)
        beyond.close()
        await bench.gone(1)
        bench.peer().say(generate("b"))
        await bench.said(4)

    run(body)


def test_a_storm_that_nobody_hears_of_does_not_stop_the_end_P24() -> None:
    async def body(bench: Bench) -> None:
        raise_open_file_limit(1)  # MLX lowers that of a process that imports it
        # As many as libzmq accepts while the loop stands still: its thread then waits for room.
        raw = []
        accepted = before = len(os.listdir("/dev/fd"))
        while accepted - before < 3000:
            one = sockets.socket(sockets.AF_UNIX)
            one.setblocking(False)
            raw.append(one)
            until = time.monotonic() + 2.0
            while (code := one.connect_ex(str(bench.path))) and time.monotonic() < until:
                select.select([], [], [], 0.001)
            if code:
                break
            accepted += 1
        assert code, "libzmq accepts as many as it likes"
        closing = threading.Thread(target=bench.close_all, daemon=True)
        closing.start()
        closing.join(60.0)
        assert not closing.is_alive(), "closing waits for libzmq, which waits for room"
        for one in raw:
            one.close()

    run(body)
