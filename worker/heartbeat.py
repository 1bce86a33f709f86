"""Signs of life: plain numbers that the owner thread publishes and a tiny thread sends.

The beats have their own socket, a PUSH to `<endpoint>.beat`: they flow while the owner thread is
inside a long step, and a second peer on the supervisor's DEALER would take turns with the first one
in receiving. A beat with an unmoving step counter is how a stall is seen (F5, F11); liveness
alone is not health.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from mlxsup.protocol.clock import PULSE_S
from mlxsup.protocol.codec import encode
from mlxsup.protocol.folders import BEAT_SUFFIX
from mlxsup.protocol.states import WorkerPhase
from mlxsup.protocol.worker_messages import Heartbeat

from .engine import EngineBytes, StepResult
from .memory_guard import LOOK_EVERY_S, MemoryGuard

BEAT_HIGH_WATER_MARK = 4


@dataclass(slots=True, kw_only=True)
class Books:
    """What the owner thread holds and has exchanged with the supervisor, all at one moment; never
    changed once it is published, and only not frozen because each step publishes one.

    Attributes:
        requests: how many it holds.
        preparing: how many of them are being tokenised.
        sent, received: messages since the start.
    """

    requests: int = 0
    preparing: int = 0
    sent: int = 0
    received: int = 0


@dataclass(slots=True, kw_only=True)
class Published:
    """What the owner thread last said it was doing; see `Books` for why it is not frozen.

    Attributes:
        step: how many steps have ended.
        phase: what it has been doing since then.
        since: monotonic seconds: the start of the step, or of the other work, under way.
        predicted_s: how long that step should take at most; 0 when none is under way.
        books: the requests it holds.
        held: memory in use.
        budget: the number of the budget that its rows keep to; 0 for none.
        prefill_chunk: tokens of each waiting prompt that a step would process.
    """

    step: int
    phase: WorkerPhase
    since: float
    predicted_s: float = 0.0
    books: Books = field(default_factory=Books)
    held: EngineBytes = field(default_factory=EngineBytes)
    budget: int = 0
    prefill_chunk: int = 0


@dataclass(slots=True, kw_only=True)
class Traffic:
    """What steps cost each other since the load, in the seconds and counts of `Heartbeat`.

    It grows with each step, and a beat may be a step ahead in one number: they only make ratios.
    """

    interleaved_s: float = 0.0
    interleaved_decode_s: float = 0.0
    shapes_seen: int = 0
    shapes_s: float = 0.0

    def add(self, result: StepResult, *, reads: bool) -> None:
        """Count a step.

        Args:
            result: what it produced.
            reads: whether a prompt was being read, in this step or between two of its chunks.
        """
        if reads and result.decode_s:
            self.interleaved_s += result.took_s
            self.interleaved_decode_s += result.decode_s
        if result.is_new_shape:
            self.shapes_seen += 1
            self.shapes_s += result.took_s


class Board:
    """Where the owner thread publishes; reads and writes are single assignments, without a lock.

    Attributes:
        traffic: what the steps so far cost each other.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.traffic = Traffic()
        self._clock = clock
        self._current = Published(step=0, phase=WorkerPhase.LOADING, since=clock())

    @property
    def current(self) -> Published:
        """Return the last published state."""
        return self._current

    def publish(
        self,
        phase: WorkerPhase,
        *,
        step: int,
        predicted_s: float = 0.0,
        books: Books | None = None,
        held: EngineBytes | None = None,
        budget: int | None = None,
        prefill_chunk: int | None = None,
    ) -> None:
        """Publishes what the owner thread does from now on; books, memory, budget and chunk stay
        as they were unless given."""
        before = self._current
        self._current = Published(
            step=step,
            phase=phase,
            since=self._clock(),
            predicted_s=predicted_s,
            books=before.books if books is None else books,
            held=before.held if held is None else held,
            budget=before.budget if budget is None else budget,
            prefill_chunk=before.prefill_chunk if prefill_chunk is None else prefill_chunk,
        )

    def beat(self) -> Heartbeat:
        """Make the message for the supervisor."""
        current = self._current
        return Heartbeat(
            step=current.step,
            phase=current.phase,
            phase_s=max(0.0, self._clock() - current.since),
            predicted_s=current.predicted_s,
            requests=current.books.requests,
            preparing=current.books.preparing,
            sent=current.books.sent,
            received=current.books.received,
            active_bytes=current.held.active,
            cache_bytes=current.held.cache,
            peak_bytes=current.held.peak,
            kept_bytes=current.held.kept,
            prefix_bytes=current.held.prefix,
            budget=current.budget,
            prefill_chunk=current.prefill_chunk,
            interleaved_s=self.traffic.interleaved_s,
            interleaved_decode_s=self.traffic.interleaved_decode_s,
            shapes_seen=self.traffic.shapes_seen,
            shapes_s=self.traffic.shapes_s,
        )


class HeartbeatThread:
    """Sends the board's beat twice a second, from its own thread and its own ZeroMQ context.

    A beat that the supervisor has no room for is dropped: the next one says more.

    Args:
        endpoint: that of the worker's messages.
        board: what the beats say.
        on_end: called on the thread when it ends, for whatever reason.
        guard: looks at the memory between the beats.
    """

    def __init__(
        self,
        endpoint: str,
        board: Board,
        interval_s: float = PULSE_S,
        on_end: Callable[[], None] = lambda: None,
        guard: MemoryGuard | None = None,
    ) -> None:
        self._guard = guard
        self._endpoint = endpoint + BEAT_SUFFIX
        self._board = board
        self._interval_s = interval_s
        self._on_end = on_end
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Starts beating, with the first beat at once."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and its socket, dropping what is unsent."""
        self._end.set()
        self._thread.join()

    @property
    def is_over(self) -> bool:
        """True if no more beat will come: it was stopped, or something went wrong in it."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._beat()
        finally:
            self._on_end()

    def _beat(self) -> None:
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.SNDHWM, BEAT_HIGH_WATER_MARK)
            socket.connect(self._endpoint)
            while True:
                try:
                    socket.send_multipart(encode(self._board.beat()), zmq.NOBLOCK)
                except zmq.Again:
                    pass
                if self._is_over_before_next():
                    return

    def _is_over_before_next(self) -> bool:
        """Wait until the next beat is due; True if it is not to come."""
        left_s = self._interval_s
        while left_s > LOOK_EVERY_S and self._guard is not None and self._guard.look():
            left_s -= LOOK_EVERY_S
            if self._end.wait(LOOK_EVERY_S):
                return True
        return self._end.wait(left_s)
