"""The clients' socket, with real sockets: garbage, lost clients, clients that do not read."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import socket as sockets
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from mlxsup.protocol.codec import Decoder, encode
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.protocol.messages import (
    SUPERVISOR_TO_CLIENT,
    Alive,
    ClientDelta,
    Deltas,
    Done,
    Failed,
    Generate,
    Load,
    Message,
    Ping,
    Reply,
    Subscribe,
)
from mlxsup.protocol.messages import Event as EventMessage
from mlxsup.protocol.states import FinishReason
from mlxsup.supervisor import clients as clients_module
from mlxsup.supervisor.clients import MAX_UNSENT_BYTES, Clients
from mlxsup.supervisor.core.events import ClientGone, ClientSaid, ClientTooSlow, ConnectionId, Event
from mlxsup.supervisor.transport import LoopSocket
from support.eventually_async import eventually_async


class Peer:
    """A client made of a bare DEALER."""

    def __init__(self, endpoint: str, receive_high_water_mark: int = 0) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, receive_high_water_mark)
        self.socket.connect(endpoint)
        self._decoder = Decoder(SUPERVISOR_TO_CLIENT, is_strict=False)

    def say(self, message: Message) -> None:
        self.socket.send_multipart(encode(message))

    async def hear(self, *, is_alive_shown: bool = False) -> Message:
        """The next message that is no sign of life."""
        while True:
            await eventually_async(lambda: self.socket.poll(0), timeout_s=20)
            message = self._decoder.decode(self.socket.recv_multipart())
            if is_alive_shown or not isinstance(message, Alive):
                return message

    def close(self) -> None:
        self.context.destroy(linger=0)


class Bench:
    """A `Clients` under test; its events are collected."""

    def __init__(self, folder: Path, max_connections: int = 1000) -> None:
        self.events: list[Event] = []
        self.moment = 100.0
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
        self.clients.close(0.0)
        self.context.term()


def run(body: Callable[[Bench], Awaitable[None]], **more: Any) -> None:
    folder = Path(tempfile.mkdtemp(prefix="mlxsup-t-", dir="/tmp"))

    async def main() -> None:
        bench = Bench(folder, **more)
        try:
            async with asyncio.timeout(100):
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


def test_a_client_that_ends_with_something_open_is_gone_D12(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(bench: Bench) -> None:
        looks: list[None] = []
        look = bench.clients._probe
        monkeypatch.setattr(bench.clients, "_probe", lambda: looks.append(look()))
        peer, other = bench.peer(), bench.peer()
        peer.say(generate("a"))
        await bench.said(1)
        other.say(generate("b"))
        await bench.said(2)
        connection = bench.of_kind(ClientSaid)[0].connection
        peer.close()
        await eventually_async(lambda: looks)  # because its end was announced
        await bench.gone(1)
        assert [e.connection for e in bench.of_kind(ClientGone)] == [connection]
        bench.clients.send(connection, done("a", 0))  # crosses its end: dropped

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
    assert select.select([socket.socket.getsockopt(zmq.FD)], [], [], 10)[0]
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
        bench.clients.pulse()  # and it goes on not reading
        assert len(bench.of_kind(ClientGone)) == 1
        assert bench.clients._connections == {}

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
