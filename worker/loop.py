"""The step loop: drain the socket, cancel, insert, exactly one step, one message (C1).

It runs on the owner thread and only blocks in `wait`: not on the socket, not on the tokeniser
(A7). A request arriving while others decode is in the batch by the next step (C2); one that comes
while nothing runs may wait some milliseconds for others (`gathering`).
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, assert_never

from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.ids import RequestKey, unpack_tokens
from mlxsup.protocol.launch import TEXT_LIMIT_STEPS
from mlxsup.protocol.pooling import PoolingBody
from mlxsup.protocol.states import FinishReason, PauseReason, RowState, WorkerPhase
from mlxsup.protocol.text import log_line
from mlxsup.protocol.worker_messages import (
    Acceptance,
    Accepted,
    CancelRow,
    Dispatch,
    DropKept,
    Exit,
    GiveBack,
    Lease,
    Leases,
    LogLevel,
    PauseRow,
    Rejected,
    Render,
    RowDelta,
    SetBudget,
)

from .coalescing import Coalescing
from .engine import Engine, EngineFacts, Row, StepResult, WorkerFaultError
from .heartbeat import Board, Signs
from .idle_time import IdleTime
from .link import Link, LinkBrokenError
from .logs import set_level
from .pooling_rows import PoolingRow, plan_pooling_row, pooling_acceptance
from .prefill_slots import WorkerLeases
from .prompt_pieces import shown_tokens
from .rendering import Rendering
from .row_memory import RowMemory
from .rows import acceptance, check_resume, plan_row, progress_of, running_row
from .running_rows import AnyRow, RunningRows
from .text_threads import Refused, TextThreads, Tokenised
from .tokenising import Tokenising

PREPARE_S = 15.0
"""What a piece of work for later requests takes at most: it may have a kernel compiled."""

logger = logging.getLogger(__name__)


class StepLoop:
    """Drives one loaded engine.

    A request is in exactly one of three places: with the text side, waiting for a row, or running.
    All three are bounded by what the supervisor dispatches, `max_concurrency` at most.

    Args:
        engine: loaded.
        facts: what its load returned.
        step_timeout_s: the limit of one step; that of preparing a prompt follows from it.
        sampling: the model's own defaults for requests.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        facts: EngineFacts,
        link: Link,
        text: TextThreads,
        board: Board,
        max_concurrency: int,
        step_timeout_s: float,
        sampling: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._facts = facts
        self._link = link
        self._preparing = Tokenising(text, TEXT_LIMIT_STEPS * step_timeout_s, clock)
        self._coalescing = Coalescing(clock)
        self._leases = WorkerLeases(engine)
        self._memory = RowMemory(engine, facts.cache_layers)
        self._idle = IdleTime(engine, clock)
        self._rendering = Rendering(engine, facts, link.send)
        self._signs = Signs(board, engine, link, self._memory, clock)
        self._max_concurrency = max_concurrency
        self._sampling = dict(sampling or {})
        self._clock = clock
        self._waiting: OrderedDict[RequestKey, tuple[Row, AnyRow]] = OrderedDict()
        self._running = RunningRows()
        # Mostly requests whose end is already on its way; no more than there are places.
        self._cancelled_early: deque[RequestKey] = deque(maxlen=max_concurrency)
        self._is_exit_asked = False
        self._is_prepared = False  # whether the engine has nothing left to do in idle times

    @property
    def is_exit_asked(self) -> bool:
        """True if the supervisor has asked this worker to exit."""
        return self._is_exit_asked

    @property
    def open_keys(self) -> frozenset[RequestKey]:
        """Every request that has been dispatched and has not ended (D9)."""
        return frozenset([*self._preparing, *self._waiting, *self._running])

    def run(self, is_terminated: Callable[[], bool]) -> None:
        """Serves until the supervisor asks for the exit, or a signal does.

        Raises:
            Exception: whatever a step raised; the engine is unusable then (F3).
            LinkBrokenError: the supervisor broke the protocol.
            StuckPreprocessingError: preparing a prompt does not end.
            WorkerFaultError: a row or a thread is lost.
        """
        self._publish_wait()
        while not self._is_exit_asked and not is_terminated():
            has_stepped = self.turn()
            if not has_stepped and not self._is_exit_asked and not is_terminated():
                timeout_s = self.wait_s()
                self._publish_wait()
                self._link.wait(timeout_s)
        self.drain()

    def turn(self) -> bool:
        """Make one round, without waiting; return whether it made a step."""
        self.drain()
        self.text_time_left_s()
        if self._must_hold():
            return False
        self._take_prepared()
        self._rendering.advance()
        self._keep_to_budget()
        if not self._gathers():
            self._insert_waiting()
        if self._must_hold():
            return False
        if self._count_rows() and self._step():
            return True
        if self._running.has_ended or self._leases.has_news:
            self._send_step(StepResult())
        return self._prepare()

    def _prepare(self) -> bool:
        """Uses a longer time without a request for one piece of work; returns whether there was
        any. A request that comes meanwhile waits for its end."""
        if self._is_prepared or self._held_requests() or not self._idle.has_lasted:
            return False
        self._begin_work(WorkerPhase.PREFILL, PREPARE_S)
        self._is_prepared = not self._engine.prepare()
        self._signs.between_steps()
        return not self._is_prepared

    def _must_hold(self) -> bool:
        """True if nothing may begin: the exit was asked for, or messages cannot leave."""
        if not self._is_exit_asked and self._link.flush():
            return False
        self._coalescing.ends()
        return True

    def drain(self) -> None:
        """Reads what the supervisor has sent; cancels take effect at once."""
        self._signs.between_steps()
        message = self._link.receive()
        if message is None:
            return  # as after most steps
        leaving: list[RequestKey] = []
        pausing: dict[bool, list[RequestKey]] = {True: [], False: []}  # by whether to keep them
        while message is not None:
            match message:
                case Dispatch():
                    self._begin(message)
                case CancelRow(key=key):
                    if key in self._running:
                        leaving.append(key)
                    self._cancel(key)
                case Leases() | Lease():
                    self._leases.heard(message)
                case PauseRow(key=key, keep=keep):
                    pausing[keep].append(key)
                case DropKept(key=key):
                    self._engine.drop_kept(key)
                case Render():
                    self._rendering.begin(message)
                case LogLevel(level=level):
                    set_level(level)
                case SetBudget() | GiveBack():
                    self._memory.heard(message)
                case Exit():
                    self._is_exit_asked = True
                case _:
                    assert_never(message)
            message = self._link.receive()
        if leaving:
            self._engine.remove(*leaving)
        for keep, keys in pausing.items():
            self._pause(keys, keep=keep)

    def _begin(self, message: Dispatch) -> None:
        key, resume = message.key, message.resume
        if key in self.open_keys:
            raise LinkBrokenError(f"request {key} was dispatched twice")
        if key in self._cancelled_early:
            self._running.end(RowDelta(key=key, finish=FinishReason.CANCELLED))
            return
        changed = None if resume is None else check_resume(resume, self._facts, message.adapter)
        if changed is not None:
            self._reject(key, changed)
            return
        self._coalescing.arrived()
        self._preparing.begin(message)

    def _cancel(self, key: RequestKey) -> None:
        """Takes a request out wherever it is (D2, D3); its slot is free at once (D11), and its
        row leaves the engine with those of the other cancels that have come."""
        if self._running.leave(key) is None:
            if not self._take_back(key):
                # Its end is on the way (D6), or the cancel has overtaken it, which our link never
                # lets happen (D5). Remembering it is harmless: a key that has ended never comes
                # again, and one that left for its turn only after its cancel was answered.
                self._cancelled_early.append(key)
                return
            self._engine.drop_kept(key)  # it may have been paused before
        self._running.end(RowDelta(key=key, finish=FinishReason.CANCELLED))

    def _take_back(self, key: RequestKey) -> bool:
        """Takes out a request that has no row yet; returns whether it was there."""
        if key in self._preparing:
            self._preparing.forget(key)
            return True
        return self._waiting.pop(key, None) is not None

    def _pause(
        self, keys: Sequence[RequestKey], *, keep: bool, reason: PauseReason | None = None
    ) -> None:
        """Takes requests out wherever they are, in one change; they come again as a resume.

        A token that was computed ahead is delivered first, and may be the end of the answer. The
        end of a request that is not known here is on the way.
        """
        known = [key for key in keys if key in self.open_keys]
        if not known:
            return
        for left in self._engine.set_aside(*known, keep=keep):
            is_over = False
            running = self._running.leave(left.key)
            if running is None:
                self._take_back(left.key)
            elif left.token is not None:
                deltas, is_over = self._running.advance(running, left.token, self._clock())
                self._running.end(*deltas)
            if is_over:
                self._engine.drop_kept(left.key)  # a stop string was complete
            else:
                state = RowState.KEPT if left.is_kept else RowState.DROPPED
                self._running.end(RowDelta(key=left.key, paused=state, pause_reason=reason))

    def _take_prepared(self) -> None:
        for dispatched, result in self._preparing.take():
            self._signs.between_steps()
            if isinstance(result, Refused):
                self._reject(result.key, result.error)
            else:
                self._accept(result, dispatched)

    def _accept(self, ready: Tokenised, dispatched: Dispatch) -> None:
        resume = ready.resume
        try:
            row, running, accepted = self._open(ready, dispatched)
        except RemoteError as error:
            self._reject(ready.key, error)
            return
        self._link.send(
            Accepted(
                key=ready.key,
                acceptance=accepted if resume is None else resume.acceptance,
                tokenize_s=ready.tokenize_s,
                warnings=[*ready.prompt.warnings, *self._facts.answer_warnings],
            )
        )
        if running.prompt is not None:
            self._running.end(*running.prompt.begin())
        end = running.replay(row, report=self._signs.between_steps)
        if end is None:
            self._waiting[ready.key] = (row, running)
        else:
            self._engine.drop_kept(ready.key)
            self._running.end_without_row(running, end)
        if running.prompt is not None:
            self._send_step(StepResult())  # those of several requests may be too long for one

    def _open(self, ready: Tokenised, dispatched: Dispatch) -> tuple[Row, AnyRow, Acceptance]:
        """Return the row of a request, the text or the vectors of its answer, and its acceptance.

        Raises:
            RemoteError: see `plan_row`.
        """
        body, prompt, resume = ready.body, ready.prompt, ready.resume
        delivered = [] if resume is None else unpack_tokens(resume.delivered)
        if isinstance(body, PoolingBody):
            row = plan_pooling_row(ready.key, body, prompt, delivered)
            return row, PoolingRow.of(row, dispatched), pooling_acceptance(row, body, self._facts)
        shown = 0 if resume is None else shown_tokens(body, prompt, resume.shown)
        row = plan_row(
            ready.key,
            body,
            prompt,
            self._facts,
            delivered=delivered,
            shown=shown,
            sampling=self._sampling,
            adapter=dispatched.adapter,
        )
        running = running_row(row, body, prompt, self._engine.text, dispatched, shown=shown)
        return row, running, acceptance(row, body, prompt, self._facts)

    def _reject(self, key: RequestKey, error: RemoteError) -> None:
        """Answers a request that has something wrong with it: it fails alone (C7)."""
        self._engine.drop_kept(key)
        logger.info(log_line("request rejected", key=key, code=error.code))
        self._link.send(Rejected(key=key, error=error))

    def _keep_to_budget(self) -> None:
        """Makes rows leave that there is no memory for; the supervisor sends them again."""
        leaving = self._memory.leaving(self._running.values())
        if leaving:
            self._pause(leaving, keep=False, reason=PauseReason.MEMORY)
            self._engine.give_back()  # what they had computed must not stay for others

    def _gathers(self) -> bool:
        """True if rows that are ready wait for others, so that one pass reads all of them."""
        if self._running:
            return False
        if not 0 < len(self._waiting) < self._max_concurrency:
            self._coalescing.ends()
            return False
        longest = max(running.tokens for _, running in self._waiting.values())
        return self._coalescing.is_on(
            pass_s=self._engine.shared_pass_s(longest), is_preparing=len(self._preparing) > 0
        )

    def _insert_waiting(self) -> None:
        while self._waiting and len(self._running) < self._max_concurrency:
            self._signs.between_steps()
            key, (row, running) = next(iter(self._waiting.items()))
            if not self._memory.has_room(running, self._running.values()):
                self._pause([key], keep=False, reason=PauseReason.MEMORY)
                continue
            del self._waiting[key]
            cached = self._engine.insert(row)
            running.cached_tokens = min(cached, len(row.tokens))
            running.inserted_at = self._clock()
            self._running.join(running)

    def _step(self) -> bool:
        """Makes a step, unless it takes a lease to do anything; returns whether it did."""
        may_read = self._leases.may_read
        if not may_read and not self._engine.has_decoding():
            return False
        self._idle.ends()
        is_prefill = may_read and self._running.is_reading
        phase = WorkerPhase.PREFILL if is_prefill else WorkerPhase.DECODE
        self._begin_work(phase, self._engine.predict_step_s())
        result = self._engine.step() if may_read else self._engine.decode()
        self._signs.stepped(result, reads=is_prefill)
        self._send_step(result)
        self._engine.settle()
        return True

    def _send_step(self, result: StepResult) -> None:
        """Send everything since the last such message, in one (one message per step)."""
        if result.prefill:
            self._running.take_prompts(result.prefill)
        rows, between_steps, leaving = self._running.take(result.tokens, self._clock())
        prefill = progress_of(result.prefill, self._running)
        self._link.send(self._leases.step(result, self._signs.steps, rows, prefill, between_steps))
        for key, error in self._running.take_refused():
            self._reject(key, error)
        if leaving:
            self._engine.remove(*leaving)  # costs time, for which no token has to wait

    def _publish_wait(self) -> None:
        is_held_up = self._leases.is_asked and self._engine.row_count() > 0
        self._begin_work(WorkerPhase.WAITING if is_held_up else WorkerPhase.IDLE, looks=True)

    def _begin_work(
        self, phase: WorkerPhase, predicted_s: float = 0.0, *, looks: bool = False
    ) -> None:
        """Publish what begins now; see `Signs.begin`. The requests are those whose end, or leaving,
        the supervisor has not been sent."""
        self._signs.begin(
            phase,
            predicted_s,
            requests=self._held_requests() + self._running.unreported,
            preparing=len(self._preparing),
            looks=looks,
        )

    def _count_rows(self) -> int:
        """Return how many rows the engine has.

        Raises:
            WorkerFaultError: it has lost one, which would never end; its request resumes in another
                process.
        """
        if (rows := self._engine.row_count()) < len(self._running):
            raise WorkerFaultError(f"the engine has {rows} rows, and not {len(self._running)}")
        return rows

    def wait_s(self) -> float | None:
        """Return the seconds to wait for something to do; None for as long as it takes."""
        # Even that of a cancelled request: otherwise nothing else could be prepared.
        text_left_s = self.text_time_left_s()
        idle_left_s = self._idle.left_s(is_busy=self._held_requests() > 0)
        rendering_left_s = 0.0 if self._rendering.is_busy else None
        times = (idle_left_s, text_left_s, self._coalescing.left_s, rendering_left_s)
        return min((left_s for left_s in times if left_s is not None), default=None)

    def _held_requests(self) -> int:
        return len(self._preparing) + len(self._waiting) + len(self._running)

    def text_time_left_s(self) -> float | None:
        """Return the seconds that the preparation under way may still take; see
        `Tokenising.time_left_s`."""
        return self._preparing.time_left_s(self._take_prepared)
