"""The socket of a worker and its heartbeats, against real sockets in this process."""

import itertools
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import zmq

from mlxsup.protocol.codec import Decoder, encode
from mlxsup.protocol.folders import BEAT_SUFFIX
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import WorkerPhase
from mlxsup.protocol.worker_messages import WORKER_TO_SUPERVISOR, CancelRow, Heartbeat, Step
from mlxsup.worker.engine import EngineBytes
from mlxsup.worker.heartbeat import BEAT_HIGH_WATER_MARK, Board, HeartbeatThread
from mlxsup.worker.link import HIGH_WATER_MARK, Link, LinkBrokenError

from support.eventually import eventually


class Far:
    """The supervisor's end."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mlxsup-"))
        self.endpoint = f"ipc://{self.folder}/w"
        self.context = zmq.Context()
        self.decoder = Decoder(WORKER_TO_SUPERVISOR, is_strict=False)
        self.socket = self.bind(zmq.DEALER, self.endpoint, 2)

    def bind(self, kind: int, endpoint: str, limit: int) -> zmq.Socket[bytes]:
        bound: zmq.Socket[bytes] = self.context.socket(kind)
        bound.set(zmq.LINGER, 0)
        bound.set(zmq.RCVHWM, limit)
        bound.bind(endpoint)
        return bound

    def step_number(self) -> int:
        assert self.socket.poll(60_000)
        message = self.decoder.decode(self.socket.recv_multipart())
        assert isinstance(message, Step)
        return message.step


@pytest.fixture
def far() -> Iterator[Far]:
    made = Far()
    yield made
    made.context.destroy(linger=0)
    shutil.rmtree(made.folder)


@pytest.fixture
def link(far: Far) -> Iterator[Link]:
    made = Link(far.endpoint)
    yield made
    made.close(0.0)


def test_nothing_there_is_none_and_a_message_ends_the_wait_A7(far: Far, link: Link) -> None:
    assert link.receive() is None
    message = CancelRow(key=RequestKey(7))
    far.socket.send_multipart(encode(message))
    link.wait(10.0)
    assert link.receive() == message


def test_a_wake_from_another_thread_ends_the_wait_also_an_earlier_one_C5(link: Link) -> None:
    link.wake()
    link.wait(None)
    waiter_is_over = threading.Event()

    def wake() -> None:
        link.wake()
        waiter_is_over.wait(60)

    waker = threading.Thread(target=wake)
    waker.start()
    link.wait(None)
    waiter_is_over.set()
    waker.join()


def test_many_wakes_are_one(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    poller = zmq.Poller()
    monkeypatch.setattr(zmq, "Poller", lambda: poller)
    link = Link(far.endpoint)
    for _ in range(100_000):
        link.wake()
    link.wait(None)
    assert not poller.poll(0), "a wake was left over"
    link.close(0.0)


def test_a_reader_that_stands_still_fills_the_outbox_and_order_is_kept(
    far: Far, link: Link
) -> None:
    sent = 0
    padding = [b"p" * 65536]
    while link.flush() and sent < 10_000:
        link.send(Step(step=sent))
        link.send_frames(padding)
        sent += 1
    assert HIGH_WATER_MARK // 2 <= sent < 10_000
    numbers: list[int] = []

    def read() -> None:
        for _ in range(sent):
            numbers.append(far.step_number())
            assert far.socket.recv_multipart() == padding

    reader = threading.Thread(target=read)
    reader.start()
    while not link.flush():
        link.wait(None)  # room for the outbox ends it
    reader.join()
    assert numbers == list(range(sent))


def test_close_sends_what_is_left(far: Far) -> None:
    endpoint, count = far.endpoint + "-late", 2 * HIGH_WATER_MARK
    link = Link(endpoint)
    for number in range(count):
        link.send(Step(step=number))
    assert not link.flush(), "more than the socket takes"
    far.socket.close()
    far.socket = far.bind(zmq.DEALER, endpoint, 10 * count)
    link.close(60.0)
    assert [far.step_number() for _ in range(count)] == list(range(count))


def test_close_waits_for_a_reader_that_comes_late(far: Far) -> None:
    endpoint = far.endpoint + "-late"
    link = Link(endpoint)
    link.send(Step(step=7))
    assert link.flush(), "the socket has taken it"
    closing = threading.Thread(target=link.close, args=(60.0,))
    closing.start()
    far.socket.close()
    far.socket = far.bind(zmq.DEALER, endpoint, 2)
    assert far.step_number() == 7
    closing.join()


def test_close_gives_up_on_a_reader_that_is_gone(far: Far) -> None:
    link = Link(f"ipc://{far.folder}/nothing")
    link.send(Step(step=1))
    link.close(0.05)


def test_beats_say_what_was_published_last_F11(far: Far) -> None:
    beats = far.bind(zmq.PULL, far.endpoint + BEAT_SUFFIX, 2)
    now = [100.0]
    board = Board(clock=lambda: now[0])
    board.publish(
        WorkerPhase.DECODE, step=3, predicted_s=0.5, held=EngineBytes(active=1, cache=2, peak=3)
    )
    now[0] = 102.0
    thread = HeartbeatThread(far.endpoint, board, interval_s=0.01)
    thread.start()
    assert beats.poll(60_000)
    said = Heartbeat(step=3, phase=WorkerPhase.DECODE, phase_s=2.0, predicted_s=0.5, active_bytes=1,
                     cache_bytes=2, peak_bytes=3)  # fmt: skip
    assert far.decoder.decode(beats.recv_multipart()) == said
    board.publish(WorkerPhase.IDLE, step=4)

    def is_idle() -> bool:
        assert beats.poll(60_000)
        beat = far.decoder.decode(beats.recv_multipart())
        assert isinstance(beat, Heartbeat)
        return (beat.phase, beat.step, beat.active_bytes) == (WorkerPhase.IDLE, 4, 1)

    eventually(is_idle)
    thread.stop()
    beats.close()


def test_beats_without_a_reader_are_dropped_and_their_end_is_reported_P23(far: Far) -> None:
    """The end, for whatever reason, wakes the owner thread, which looks."""
    tried = itertools.count()
    has_tried_more_than_wait, ended = threading.Event(), threading.Event()

    class CountingBoard(Board):
        def beat(self) -> Heartbeat:
            if next(tried) > 4 * BEAT_HIGH_WATER_MARK:
                has_tried_more_than_wait.set()
            return super().beat()

    endpoint = f"ipc://{far.folder}/nothing"
    thread = HeartbeatThread(endpoint, CountingBoard(), interval_s=0.001, on_end=ended.set)
    assert not thread.is_over, "not begun"
    thread.start()
    assert has_tried_more_than_wait.wait(60)
    assert not thread.is_over
    assert not ended.is_set()
    thread.stop()
    assert thread.is_over
    assert ended.is_set()


def test_unread_messages_of_a_link_are_bounded(far: Far) -> None:
    """Requests wait in the supervisor, where they can be cancelled and survive a crash."""
    endpoint = far.endpoint + "-full"
    sender: zmq.Socket[bytes] = far.context.socket(zmq.DEALER)
    sender.set(zmq.SNDHWM, 1)
    sender.bind(endpoint)
    link = Link(endpoint)
    try:
        taken = 0
        while sender.poll(500, zmq.POLLOUT):
            sender.send(bytes(16 * 1024), zmq.NOBLOCK)
            taken += 1
        assert HIGH_WATER_MARK <= taken < 4 * HIGH_WATER_MARK
    finally:
        link.close(0.0)
        sender.close(0)


def test_a_link_counts_what_it_was_given_and_what_came_P23(far: Far, link: Link) -> None:
    assert (link.sent, link.received) == (0, 0)
    link.send(Step(step=1))
    link.send_frames([b"x"])
    assert link.receive() is None
    assert (link.sent, link.received) == (2, 0)
    far.socket.send_multipart(encode(CancelRow(key=RequestKey(7))))
    far.socket.send(b"\xc1")
    link.wait(60.0)
    assert link.receive() is not None
    link.wait(60.0)
    with pytest.raises(LinkBrokenError, match=r"^the daemon sent no message: the header is "):
        link.receive()
    assert (link.sent, link.received) == (2, 2)


def test_a_dropped_link_is_silent_both_ways(far: Far, link: Link) -> None:
    link.wait(0.0)
    link.send(Step(step=1))
    assert far.step_number() == 1
    link.drop()
    assert link.receive() is None
    link.send(Step(step=2))
    assert not link.flush(), "nothing is there to take it"
    link.wait(0.0)
    assert not far.socket.poll(50)
    link.drop()


def test_a_key_that_a_newer_supervisor_sends_is_ignored(far: Far, link: Link) -> None:
    header, *rest = encode(CancelRow(key=RequestKey(7)))
    newer = msgpack.packb(msgpack.unpackb(header) | {"mood": "calm"})
    far.socket.send_multipart([newer, *rest])
    link.wait(60.0)
    assert link.receive() == CancelRow(key=RequestKey(7))
