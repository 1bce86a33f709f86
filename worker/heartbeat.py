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
from typing import Any

import zmq

from mlxsup.protocol.clock import PULSE_S
from mlxsup.protocol.codec import encode
from mlxsup.protocol.folders import BEAT_SUFFIX
from mlxsup.protocol.states import WorkerPhase
from mlxsup.protocol.worker_messages import Heartbeat, RankState

from .engine import Engine, EngineBytes, StepResult
from .link import Link
from .memory_guard import GUARD_EVERY_S, MemoryGuard
from .row_memory import RowMemory

BEAT_HIGH_WATER_MARK = 4

LOOK_EVERY_S = 0.05
"""From step to step the memory is looked at no more often, unless the budget is another: beats come
twice a second."""


class Board:
    """What the owner thread has published of its work: numbers of `Heartbeat`.

    Each `publish` replaces them in one assignment, so that a beat needs no lock.

    Attributes:
        ranks: returns the other ranks of a group, on the thread of the beats.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.ranks: Callable[[], list[RankState]] = list
        self._clock = clock
        # They grow with each step, and a beat may be a step ahead in one: they only make ratios.
        self._costs: dict[str, Any] = {
            "interleaved_s": 0.0, "interleaved_decode_s": 0.0, "shapes_seen": 0, "shapes_s": 0.0
        }  # fmt: skip
        self._said: dict[str, Any] = {"step": 0}
        self.publish(WorkerPhase.LOADING)

    def publish(
        self,
        phase: WorkerPhase,
        *,
        predicted_s: float = 0.0,
        held: EngineBytes | None = None,
        **said: int,
    ) -> None:
        """Publish what the owner thread does from now on.

        Args:
            phase: what it does.
            predicted_s: how long the step that begins should take at most; 0 if none does.
            held: memory in use; None: as before.
            said: other numbers; those that are left out stay as they were.
        """
        if held is not None:
            said |= {
                "active_bytes": held.active,
                "cache_bytes": held.cache,
                "peak_bytes": held.peak,
                "kept_bytes": held.kept,
                "prefix_bytes": held.prefix,
            }
        now = {"phase": phase, "since": self._clock(), "predicted_s": predicted_s}
        self._said = self._said | said | now

    def count(self, result: StepResult, *, reads: bool) -> None:
        """Count what a step cost.

        Args:
            result: what it produced.
            reads: whether a prompt was being read, in this step or between two of its chunks.
        """
        if reads and result.decode_s:
            self._costs["interleaved_s"] += result.took_s
            self._costs["interleaved_decode_s"] += result.decode_s
        if result.is_new_shape:
            self._costs["shapes_seen"] += 1
            self._costs["shapes_s"] += result.took_s

    def beat(self) -> Heartbeat:
        """Make the message for the supervisor."""
        said = dict(self._said)
        phase_s = max(0.0, self._clock() - said.pop("since"))
        return Heartbeat(phase_s=phase_s, ranks=self.ranks(), **said, **self._costs)


class Signs:
    """Publishes what the step loop does.

    Attributes:
        steps: how many have ended.

    Args:
        board: where it publishes.
        engine: knows its memory.
        link: counts messages.
        memory: knows its budget.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        board: Board,
        engine: Engine,
        link: Link,
        memory: RowMemory,
        clock: Callable[[], float],
    ) -> None:
        self._board = board
        self._engine = engine
        self._link = link
        self._memory = memory
        self._clock = clock
        self._looks_at = float("-inf")
        self._looked_at_budget = 0
        self.steps = 0

    def between_steps(self) -> None:
        """Begin work outside a step, or its next part: each has the time limit of a step.

        The numbers of requests and messages stay those of the last step or wait: during this work
        they are incomplete.
        """
        self._board.publish(WorkerPhase.ROWS, step=self.steps)

    def begin(
        self,
        phase: WorkerPhase,
        predicted_s: float = 0.0,
        *,
        requests: int,
        preparing: int,
        looks: bool = False,
    ) -> None:
        """Begin a step or a wait.

        Args:
            phase: what it does.
            predicted_s: how long a step should take at most.
            requests: how many the owner thread holds.
            preparing: how many of them are being tokenised.
            looks: publish the memory of now, because the next look is far away.
        """
        said = {
            "requests": requests,
            "preparing": preparing,
            "sent": self._link.sent,
            "received": self._link.received,
            "budget": self._memory.budget,
        }
        held = None
        if (
            looks
            or self._clock() >= self._looks_at
            or self._memory.budget != self._looked_at_budget
        ):
            self._looks_at = self._clock() + LOOK_EVERY_S
            self._looked_at_budget = self._memory.budget
            held = self._engine.bytes_held()
        self._board.publish(phase, predicted_s=predicted_s, held=held, **said)

    def stepped(self, result: StepResult, *, reads: bool) -> None:
        """Note that a step has ended; see `Board.count`."""
        self.steps += 1
        self._board.count(result, reads=reads)


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
        while left_s > GUARD_EVERY_S and self._guard is not None and self._guard.look():
            left_s -= GUARD_EVERY_S
            if self._end.wait(GUARD_EVERY_S):
                return True
        return self._end.wait(left_s)
