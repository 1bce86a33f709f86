"""The sockets of one life of a worker: strangers, order, bounds, and how it ends."""

from __future__ import annotations

import asyncio
import inspect
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from mlxsup.protocol.codec import MAX_FRAME_BYTES, Decoder, encode
from mlxsup.protocol.ids import Generation, ModelName, RequestKey
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import LoadPhase, WorkerPhase
from mlxsup.protocol.worker_messages import (
    SUPERVISOR_TO_WORKER,
    CancelRow,
    Dispatch,
    Heartbeat,
    Hello,
    LoadProgress,
    MessageToWorker,
    SetBudget,
    Step,
    WorkerMessage,
)
from mlxsup.supervisor.core.events import Event, WorkerBroke, WorkerSaid, WorkerUnlinked
from mlxsup.supervisor.sockets.connection import (
    MAX_LEAVING_BYTES,
    TURN_FRAMES,
    Connection,
    Turns,
)
from mlxsup.supervisor.sockets.worker_link import (
    MAX_CONNECTIONS,
    MAX_STRANGE_BYTES,
    MAX_UNSENT_MESSAGES,
    WorkerLink,
)
from mlxsup.supervisor.sockets.zmtp import GREETING, to_wire

from support.client.zmtp import READY
from support.eventually_async import eventually_async

HELLO = Hello(
    model=ModelName("m"), generation=Generation(3), token="secret", pid=42, version="0.1.0"
)
BEAT = Heartbeat(step=1, phase=WorkerPhase.IDLE, phase_s=0.5)
GONE = WorkerUnlinked(now=5.0, model=ModelName("m"), generation=Generation(3))


class Bench:
    """A `WorkerLink` under test, with what a worker has at the other end.

    Attributes:
        events: it has posted, in order.
    """

    def __init__(self, folder: Path) -> None:
        self.events: list[Event] = []
        self.path, self.beat_path = folder / "w1.sock", folder / "w1.sock.beat"
        self.link = WorkerLink(
            self.path,
            turns=Turns(lambda: 5.0),
            model=ModelName("m"),
            generation=Generation(3),
            token="secret",
            post=self.events.append,
        )
        self.link.pid = 42
        self.worker_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.worker = self.worker_context.socket(zmq.DEALER)
        self.worker.connect(self.link.endpoint)

    def say(self, message: Message) -> None:
        self.worker.send_multipart(encode(message))

    def beat(self, message: Message) -> None:
        with self.worker_context.socket(zmq.PUSH) as socket:
            socket.connect(self.link.endpoint + ".beat")
            socket.send_multipart(encode(message))

    @property
    def owed(self) -> int:
        """Return the number of messages that are kept for the worker, whose HELLO has come."""
        assert self.link._peer is not None
        return len(self.link._peer.outbox)

    async def event(self, number: int = 0) -> Event:
        await eventually_async(lambda: len(self.events) > number)
        return self.events[number]

    async def said(self, number: int = 0) -> WorkerMessage:
        """The message that the event of this number carries."""
        event = await self.event(number)
        assert isinstance(event, WorkerSaid)
        return event.message

    def close(self) -> None:
        self.worker_context.destroy(linger=0)
        self.link.close()
        self.link.close()


def with_bench(body: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test of a coroutine that takes a bench and what else the test is given."""

    def test(**given: Any) -> None:
        async def main(folder: Path) -> None:
            bench = Bench(folder)
            try:
                async with asyncio.timeout(60):
                    await body(bench, **given)
            finally:
                bench.close()
            assert not bench.path.exists()

        with tempfile.TemporaryDirectory(prefix="mlxsup-t-", dir="/tmp") as folder:
            asyncio.run(main(Path(folder)))

    takes = list(inspect.signature(body).parameters.values())[1:]
    test.__signature__ = inspect.Signature(takes)  # type: ignore[attr-defined]
    test.__name__, test.__doc__ = body.__name__, body.__doc__
    return test


@with_bench
async def test_after_the_right_hello_messages_and_beats_become_events(bench: Bench) -> None:
    progress = LoadProgress(phase=LoadPhase.WEIGHTS, progress=0.5)
    bench.say(HELLO)
    bench.say(progress)
    assert await bench.event(0) == WorkerSaid(
        now=5.0, model=ModelName("m"), generation=Generation(3), message=HELLO
    )
    assert await bench.said(1) == progress
    bench.beat(BEAT)
    assert await bench.said(2) == BEAT


WRONG: list[tuple[Message, str]] = [
    (replace(HELLO, generation=Generation(2)), "said HELLO as m generation 2"),
    (replace(HELLO, model=ModelName("n")), "said HELLO as n generation 3"),
    (replace(HELLO, pid=43), "said HELLO with pid 43 and not 42"),
]

PUSH_READY = b"\x04\x27\x05READY\x0bSocket-Type\0\0\0\x04PUSH\x08Identity\0\0\0\0"


@contextmanager
def visitor(path: Path, data: bytes) -> Iterator[socket.socket]:
    """A connection over which these bytes have been sent."""
    with socket.socket(socket.AF_UNIX) as visitor:
        visitor.connect(str(path))
        visitor.sendall(data)
        visitor.setblocking(False)
        yield visitor


def is_ended(visitor: socket.socket) -> bool:
    with suppress(BlockingIOError):
        while visitor.recv(4096):
            pass
        return True
    return False


STRANGE: list[list[bytes]] = [
    [b"hello"],
    [b"\xc1"],
    [b"a", b"b", b"c"],
    encode(replace(HELLO, token="x")),
    encode(Step(step=1)),
]


@pytest.mark.parametrize("frames", STRANGE)
@with_bench
async def test_a_stranger_on_the_socket_has_no_effect(bench: Bench, frames: list[bytes]) -> None:
    progress = LoadProgress(phase=LoadPhase.WEIGHTS, progress=0.5)
    with visitor(bench.path, GREETING + READY + to_wire(frames)):
        bench.link.drain()
        assert bench.events == []
        bench.say(HELLO)
        assert await bench.said(0) == HELLO
        bench.say(progress)
        assert await bench.said(1) == progress
    assert len(bench.events) == 2


@pytest.mark.parametrize(("message", "detail"), WRONG)
@with_bench
async def test_another_first_message_is_no_worker(
    bench: Bench, message: Message, detail: str
) -> None:
    bench.say(message)
    bench.say(HELLO)
    broke = await bench.event()
    assert isinstance(broke, WorkerBroke)
    assert broke.detail == detail
    assert not broke.is_other_version
    bench.link.drain()
    assert len(bench.events) == 1


@with_bench
async def test_another_protocol_version_is_told_apart(bench: Bench) -> None:
    bench.worker.send(msgpack.packb({"type": "hello", "v": 99, "something": "new"}))
    broke = await bench.event()
    assert isinstance(broke, WorkerBroke)
    assert broke.is_other_version
    assert broke.detail.startswith("sent no message: ")


@with_bench
async def test_an_invalid_message_breaks_a_worker_once(bench: Bench) -> None:
    bench.say(HELLO)
    await bench.event()
    for _ in range(3):
        bench.worker.send(b"\xc1")
    broke = await bench.event(1)
    assert isinstance(broke, WorkerBroke)
    assert broke.detail.startswith("sent no message: ")
    assert not broke.is_other_version
    bench.worker.close(0)
    await bench.link.disconnected.wait()
    bench.link.drain()
    assert len(bench.events) == 2


@with_bench
async def test_messages_reach_the_worker_in_order_though_it_reads_late_D5(bench: Bench) -> None:
    """No cancel overtakes its request, in the socket or in what waits before it."""
    early = SetBudget(number=1, rows_bytes=7)
    bench.link.send(early)
    bench.say(HELLO)
    await bench.event()
    count = 1200
    sent: list[MessageToWorker] = []
    for key in range(count // 2):
        sent.append(Dispatch(key=RequestKey(key), body=b"x" * 4000))
        sent.append(CancelRow(key=RequestKey(key)))
    sent.append(Dispatch(key=RequestKey(count), body=b"y" * 2**22))  # which leaves in parts
    sent.append(CancelRow(key=RequestKey(count)))
    for message in sent:
        bench.link.send(message)
    assert bench.owed, "more than the socket takes"
    assert len(bench.events) == 1
    decoder = Decoder(SUPERVISOR_TO_WORKER, is_strict=False)
    for message in (early, *sent):
        await eventually_async(lambda: bench.worker.poll(0))
        assert decoder.decode(bench.worker.recv_multipart()) == message


@with_bench
async def test_every_message_before_the_end_of_a_worker_is_read_F9(bench: Bench) -> None:
    bench.say(HELLO)
    await bench.event()
    for number in range(25):
        bench.say(Step(step=number))
    bench.worker.close(linger=5000)
    await bench.link.disconnected.wait()
    bench.link.drain()
    messages = [event.message for event in bench.events if isinstance(event, WorkerSaid)]
    steps = [message.step for message in messages if isinstance(message, Step)]
    assert steps == list(range(25))


@with_bench
async def test_words_that_the_loop_has_not_heard_of_are_taken_at_the_end_F9(bench: Bench) -> None:
    said = [HELLO, Step(step=1)]
    with visitor(bench.path, GREETING + READY + b"".join(to_wire(encode(one)) for one in said)):
        pass
    bench.link.drain()
    *words, gone = bench.events
    assert [one.message for one in words if isinstance(one, WorkerSaid)] == said
    assert gone == GONE


@with_bench
async def test_words_of_a_worker_that_can_no_longer_be_written_to_are_read_F9(
    bench: Bench,
) -> None:
    with visitor(bench.path, GREETING + READY + to_wire(encode(HELLO))) as worker:
        assert await bench.said(0) == HELLO
        for number in range(100):
            worker.sendall(to_wire(encode(Step(step=number))))
        worker.shutdown(socket.SHUT_RD)
        bench.link.send(Dispatch(key=RequestKey(1), body=b"x" * MAX_LEAVING_BYTES))
        steps = [await bench.said(number + 1) for number in range(100)]
        assert steps == [Step(step=number) for number in range(100)]
        assert await bench.event(101) == GONE


@with_bench
async def test_a_stranger_that_announces_more_than_a_hello_is_ended(bench: Bench) -> None:
    large = to_wire([bytes(MAX_STRANGE_BYTES + 1)])
    with visitor(bench.path, GREETING + READY + large[:100]) as stranger:
        await eventually_async(lambda: is_ended(stranger))
    assert bench.events == []
    bench.say(HELLO)
    bench.say(Step(step=1))
    assert await bench.said(1) == Step(step=1)


@pytest.mark.parametrize("how", ["oversized", "closed"])
@with_bench
async def test_the_end_of_the_workers_connection_is_reported_once_P23(
    bench: Bench, how: str
) -> None:
    """A later connection, of the same process too, is a stranger's: its work is lost."""
    bench.say(HELLO)
    bench.say(Step(step=1))
    assert await bench.said(1) == Step(step=1)
    if how == "oversized":
        bench.worker.send(bytes(MAX_FRAME_BYTES + 1))
    else:
        bench.worker.close(0)
    assert await bench.event(2) == GONE
    assert bench.link.disconnected.is_set()
    again = bench.worker_context.socket(zmq.DEALER)
    again.connect(bench.link.endpoint)
    again.send_multipart(encode(HELLO))
    bench.beat(BEAT)
    assert await bench.said(3) == BEAT, "beats come as before"
    bench.link.send(Dispatch(key=RequestKey(1), body=b"x"))
    bench.link.drain()
    again.close(0)
    assert bench.events[4:] == []


@with_bench
async def test_a_stranger_that_sends_without_end_holds_up_no_drain(bench: Bench) -> None:
    noise, is_over = to_wire([b"x"]) * 10_000, threading.Event()

    def send_on(peer: socket.socket) -> None:
        until = time.monotonic() + 20.0
        with suppress(OSError):
            while time.monotonic() < until:
                peer.sendall(noise)
        is_over.set()

    with visitor(bench.path, GREETING + READY) as peer:
        peer.setblocking(True)
        sender = threading.Thread(target=send_on, args=(peer,))
        sender.start()
        bench.link.drain()
        assert not is_over.is_set()
        bench.link.close()
        sender.join()


@pytest.mark.parametrize("is_worker", [True, False])
@with_bench
async def test_a_round_of_the_loop_does_not_grow_with_what_has_arrived(
    bench: Bench, is_worker: bool
) -> None:
    hello = replace(HELLO, token=HELLO.token if is_worker else "x")
    taken = 0
    take = bench.link.take

    def counted(connection: Connection, frames: list[bytes]) -> None:
        nonlocal taken
        taken += 1
        take(connection, frames)

    bench.link.take = counted  # type: ignore[method-assign]
    steps = b"".join(to_wire(encode(Step(step=number))) for number in range(2000))
    with visitor(bench.path, GREETING + READY + to_wire(encode(hello))) as peer:
        await eventually_async(lambda: taken == 1)
        peer.sendall(steps)
        most = 0
        while taken < 2001:
            before = taken
            await asyncio.sleep(0)
            most = max(most, taken - before)
    assert most <= 2 * TURN_FRAMES
    assert len(bench.events) == (2001 if is_worker else 0)


@with_bench
async def test_a_worker_after_a_stranger_is_waited_for_P23(bench: Bench) -> None:
    await eventually_async(lambda: not bench.link.disconnected.is_set())
    bench.worker.close(linger=0)
    await bench.link.disconnected.wait()
    bench.worker = bench.worker_context.socket(zmq.DEALER)
    bench.worker.connect(bench.link.endpoint)
    await eventually_async(lambda: not bench.link.disconnected.is_set())
    bench.say(HELLO)
    await bench.event()
    assert not bench.link.disconnected.is_set()


@with_bench
async def test_beats_before_hello_and_noise_for_beats_are_ignored(bench: Bench) -> None:
    with visitor(bench.beat_path, GREETING + PUSH_READY + to_wire(encode(BEAT))):
        bench.link.drain()
    assert bench.events == []
    bench.say(HELLO)
    await bench.event()
    with visitor(bench.beat_path, GREETING + PUSH_READY + to_wire([b"\xc1"])):
        bench.link.drain()
    bench.beat(BEAT)
    assert await bench.said(1) == BEAT


@with_bench
async def test_a_worker_that_reads_nothing_is_broken_once_and_owed_no_more(bench: Bench) -> None:
    bench.say(HELLO)
    await bench.event()
    dispatch = Dispatch(key=RequestKey(1), body=b"x" * 2000)
    for _ in range(2 * MAX_UNSENT_MESSAGES):
        bench.link.send(dispatch)
    [broke] = bench.events[1:]
    assert isinstance(broke, WorkerBroke)
    assert (broke.detail, bench.owed) == ("does not read its messages", 0)


@with_bench
async def test_sockets_are_hidden_once_their_worker_has_connected(bench: Bench) -> None:
    assert bench.path.exists()
    bench.say(HELLO)
    await bench.event(0)
    assert not bench.path.exists()
    assert bench.beat_path.exists()
    bench.beat(BEAT)
    assert await bench.said(1) == BEAT
    assert not bench.beat_path.exists()


@with_bench
async def test_close_leaves_what_became_another_daemons_and_survives_removed_files(
    bench: Bench,
) -> None:
    bench.path.unlink()
    bench.beat_path.unlink()
    bench.beat_path.write_text("another daemon's by now")
    bench.link.close()
    assert bench.beat_path.read_text() == "another daemon's by now"
    bench.beat_path.unlink()


@with_bench
async def test_strangers_come_and_go_and_the_workers_connection_stays_P23(bench: Bench) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(visitor(bench.path, b"")) for _ in range(2 * MAX_CONNECTIONS)]
        bench.link.drain()
        assert sum(map(is_ended, silent)) >= MAX_CONNECTIONS
        bench.say(HELLO)
        await bench.event(0)
        assert all(map(is_ended, silent))
    bench.say(Step(step=1))
    assert await bench.said(1) == Step(step=1)
    assert not bench.link.disconnected.is_set()
    bench.worker.close(0)
    assert await bench.event(2) == GONE
