"""A worker's process as the world plays it: it obeys, answers token by token, and fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, cast

from mlxsup.protocol.cache_cost import cache_bytes
from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.delta_body import pack_body
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import Generation, ModelName, RequestKey, pack_tokens, unpack_tokens
from mlxsup.protocol.message import Message
from mlxsup.protocol.rendering import Render, Rendered
from mlxsup.protocol.states import (
    Batching,
    Channel,
    FinishReason,
    LoadPhase,
    PauseReason,
    Priority,
    RowState,
    WorkerPhase,
)
from mlxsup.protocol.version import VERSION
from mlxsup.protocol.worker_messages import (
    Acceptance,
    Accepted,
    CancelRow,
    Dispatch,
    DropKept,
    Dying,
    Exit,
    GiveBack,
    Heartbeat,
    Hello,
    Lease,
    Leases,
    LoadProgress,
    PauseRow,
    PrefillProgress,
    Ready,
    Rejected,
    RowDelta,
    SetBudget,
    Step,
    WorkerMessage,
)
from mlxsup.supervisor.core.actions import Spawn, WorkerSignal
from mlxsup.supervisor.core.events import (
    Exited,
    Spawned,
    SpawnFailed,
    WorkerBroke,
    WorkerSaid,
    WorkerUnlinked,
)
from mlxsup.worker.engine import Engine, EngineBytes
from mlxsup.worker.row_memory import RowMemory

from .ground import Link, Timeline, check
from .plan import (
    HOLDS_BACK,
    REASONING_TOKENS,
    Plan,
    Prompt,
    accept,
    answer_channel,
    answer_finish,
    answer_length,
    answer_logprobs,
    answer_shown,
    answer_token,
    answer_warning,
    backend_of,
    number_of,
)

if TYPE_CHECKING:
    from .world import World


# ---------------------------------------------------------------- faults

SIGNAL_NUMBERS = {"SIGKILL": 9, "SIGTERM": 15, "SIGSEGV": 11, "SIGABRT": 6, "SIGBUS": 7}
ACCUSING = ("SIGSEGV", "SIGABRT", "SIGBUS")
HANGS = ("stall", "gil", "blocked", "waits_on", "stop", "load_stalls", "load_stops")
MUTE_HANGS = ("gil", "stop", "load_stops")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is wrong with a process that lives.

    Attributes:
        name: which fault of the plan.
        since: virtual seconds.
    """

    name: str
    since: float


# ---------------------------------------------------------------- reports


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """Makes the events of one incarnation; `now` is when the shell sees what they report."""

    model: ModelName
    generation: Generation

    def spawned(self, pid: int, now: float) -> Spawned:
        """Its process runs."""
        return Spawned(now=now, model=self.model, generation=self.generation, pid=pid)

    def spawn_failed(self, now: float) -> SpawnFailed:
        """No process could be started."""
        return SpawnFailed(
            now=now, model=self.model, generation=self.generation, detail="no processes"
        )

    def said(self, message: WorkerMessage, now: float) -> WorkerSaid:
        """It has sent a message."""
        return WorkerSaid(now=now, model=self.model, generation=self.generation, message=message)

    def broke(self, now: float, *, is_other_version: bool) -> WorkerBroke:
        """It has sent what is no message."""
        return WorkerBroke(
            now=now,
            model=self.model,
            generation=self.generation,
            detail="garbage",
            is_other_version=is_other_version,
        )

    def unlinked(self, now: float) -> WorkerUnlinked:
        """Its connection has ended."""
        return WorkerUnlinked(now=now, model=self.model, generation=self.generation)

    def exited(self, code: int | None, signal: str, now: float) -> Exited:
        """Its process has ended, with `code` or by `signal`; nothing was printed before."""
        return Exited(
            now=now,
            model=self.model,
            generation=self.generation,
            exit_code=code,
            signal=SIGNAL_NUMBERS.get(signal),
            signal_name=signal,
        )


# ---------------------------------------------------------------- reading


class Has(Enum):
    """What a worker has of a lease."""

    NOTHING = auto()
    ASKED = auto()
    A_LEASE = auto()


@dataclass(slots=True)
class Reading:
    """Of one worker.

    Attributes:
        are_needed: what the supervisor said last.
        has: how far it has come.
        unread: what the supervisor has said since the step under way began.
    """

    are_needed: bool = False
    has: Has = Has.NOTHING
    unread: list[Leases | Lease] = field(default_factory=list)

    def hear(self) -> None:
        """No step is under way: reads what the supervisor has said about leases."""
        for message in self.unread:
            self._heard(message)
        self.unread.clear()

    def _heard(self, message: Leases | Lease) -> None:
        if isinstance(message, Leases):
            check("told again", message.are_needed != self.are_needed, message)
            self.are_needed = message.are_needed
        else:
            check("lease for nobody's question", self.has is Has.ASKED, self.has)
            self.has = Has.A_LEASE

    def may_read(self, *, is_reading: bool) -> bool:
        """Whether a step may read."""
        is_free = self.has is Has.NOTHING and not self.are_needed
        return is_free or self.has is Has.A_LEASE or not is_reading

    def has_news(self, *, is_reading: bool) -> bool:
        """Whether there is something to say even without a step."""
        wants = self.has is Has.NOTHING and self.are_needed and is_reading
        return wants or self.has is Has.A_LEASE

    def fill_in(self, step: Step, *, is_reading: bool, can_decode: bool) -> Step:
        """Adds what there is to say about leases to the message of a step, or between two."""
        returns = self.has is Has.A_LEASE
        if returns:
            self.has = Has.NOTHING
        wants = self.has is Has.NOTHING and self.are_needed and is_reading
        if wants:
            self.has = Has.ASKED
        return Step(
            step=step.step,
            rows=step.rows,
            prefill=step.prefill,
            took_s=step.took_s,
            decode_s=step.decode_s,
            between_steps=step.between_steps,
            reads_on=is_reading,
            returns_lease=returns,
            wants_lease=wants,
            only_waits=self.has is Has.ASKED and is_reading and not can_decode,
        )


# ---------------------------------------------------------------- row memory


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A row as the memory of a worker sees it."""

    key: RequestKey
    tokens: int
    priority: Priority
    may_leave: bool


class _KeepsNothing:
    """What is kept of paused rows takes nothing here."""

    def bytes_held(self) -> EngineBytes:
        """Memory as the engine counts it."""
        return EngineBytes()

    def give_back(self) -> None:
        """There is nothing to give back."""

    def bound_rows(self, rows_bytes: int) -> None:
        """It takes nothing besides."""

    def free_kept(self, spared: RequestKey | None = None) -> None:
        """There is nothing to free."""


class PlayedMemory:
    """Of one worker.

    Args:
        layers: what a row takes; empty: nothing, and there is no budget.
    """

    def __init__(self, layers: tuple[CacheLayers, ...]) -> None:
        self._layers = layers
        self._memory = RowMemory(cast(Engine, _KeepsNothing()), layers)

    @property
    def budget(self) -> int:
        """The number of the budget that the rows keep to."""
        return self._memory.budget

    def heard(self, message: SetBudget) -> None:
        """The supervisor has set another budget."""
        self._memory.heard(message)

    def leaving(self, rows: Iterable[Row]) -> list[RequestKey]:
        """Who must leave now."""
        return self._memory.leaving([_placed(row) for row in rows])

    def has_room(self, row: Row, rows: Iterable[Row]) -> bool:
        """Whether a row may join the others."""
        return self._memory.has_room(_placed(row), [_placed(one) for one in rows])

    def taken_bytes(self, rows: Iterable[Row]) -> int:
        """What the rows take."""
        lengths = [_placed(row).tokens for row in rows]
        return cache_bytes(self._layers, rows=len(lengths), longest=max(lengths, default=0))


def _placed(row: Row) -> _Place:
    assert row.acceptance is not None
    tokens = len(row.acceptance.prompt_tokens) // 4 + row.count
    return _Place(key=row.key, tokens=tokens, priority=row.priority, may_leave=row.may_leave)


# ---------------------------------------------------------------- rows

LONG_STEPS = 4
"""A long prompt is read in that many steps."""
LONG_TOKENS = 16


@dataclass(slots=True, kw_only=True)
class Row:
    """One request that the worker holds.

    Attributes:
        prompt: what it is, with its faults.
        acceptance: what the worker made of it; None while it is being prepared.
        resumes: what an earlier life had made of it.
        count: tokens computed, those of earlier lives too.
        unread_steps: steps that reading the prompt still takes.
        read: tokens of the prompt, and of what was delivered, that are known.
        has_spoken: whether this life has given a token.
        priority, may_leave: as it was dispatched.
    """

    key: RequestKey
    prompt: Prompt
    acceptance: Acceptance | None = None
    resumes: Acceptance | None = None
    count: int = 0
    unread_steps: int = 0
    read: int = 0
    has_spoken: bool = False
    priority: Priority = Priority.NORMAL
    may_leave: bool = True


@dataclass(slots=True, kw_only=True)
class Batch:
    """All rows of one worker.

    Attributes:
        generation: of the worker.
        max_rows: as its launch says.
        prompts: by number and by body, as the plan made them.
        say: sends the supervisor a message.
        rows: by key, in order of arrival.
        ended: what cancels and pauses took out since the last step message.
        keeps: the share of paused rows whose state there is memory for.
        kept: paused requests whose state is kept.
        steps: made so far.
        reading: whether it may read.
        memory: what its rows take, and may take.
    """

    dice: random.Random
    generation: int
    max_rows: int
    by_number: dict[int, Prompt]
    by_body: dict[bytes, Prompt]
    say: Callable[[WorkerMessage], None]
    keeps: float = 1.0
    rows: dict[RequestKey, Row] = field(default_factory=dict)
    ended: list[RowDelta] = field(default_factory=list)
    kept: set[RequestKey] = field(default_factory=set)
    steps: int = 0
    reading: Reading = field(default_factory=Reading)
    memory: PlayedMemory = field(default_factory=lambda: PlayedMemory(()))

    @property
    def held(self) -> int:
        """Requests that the supervisor must not miss in a beat."""
        return len(self.rows) + len(self.ended)

    @property
    def preparing(self) -> int:
        """Those that are being tokenised."""
        return sum(row.acceptance is None for row in self.rows.values())

    @property
    def is_reading(self) -> bool:
        """Whether the next step reads a long prompt, if it may."""
        return any(row.acceptance and row.unread_steps for row in self.rows.values())

    @property
    def may_read(self) -> bool:
        """Whether it may, or has nothing to read."""
        return self.reading.may_read(is_reading=self.is_reading)

    @property
    def reads_with_lease(self) -> bool:
        """Whether it has the lease with which the next step reads a long prompt."""
        return self.reading.has is Has.A_LEASE and self.is_reading

    @property
    def can_step(self) -> bool:
        """Whether a step would do anything."""
        may_read = self.may_read
        rows = self.rows.values()
        return any(row.acceptance and (may_read or not row.unread_steps) for row in rows)

    @property
    def has_news(self) -> bool:
        """Whether there is something to say without a step."""
        return bool(self.ended) or self.reading.has_news(is_reading=self.is_reading)

    def begin(self, dispatch: Dispatch) -> None:
        """A request is dispatched."""
        check("dispatched twice", dispatch.key not in self.rows, dispatch.key)
        resume = dispatch.resume
        if resume is None:
            prompt = self.by_body.get(dispatch.body)
            check("dispatched body", prompt is not None, dispatch.body)
            assert prompt is not None
            row = Row(key=dispatch.key, prompt=prompt)
        else:
            prompt = self.by_number[number_of(resume.acceptance)]
            count = len(unpack_tokens(resume.delivered))
            row = Row(key=dispatch.key, prompt=prompt, resumes=resume.acceptance, count=count)
        row.priority, row.may_leave = dispatch.priority, dispatch.may_leave
        if dispatch.key in self.kept:
            self.kept.remove(dispatch.key)
        elif prompt.is_long:
            row.unread_steps = LONG_STEPS
            row.read = dispatch.key % 3  # from a cache
        self.rows[dispatch.key] = row
        check("too many rows", len(self.rows) <= self.max_rows, f"{len(self.rows)} rows")

    def cancel(self, key: RequestKey) -> bool:
        """Takes a row out; one that is not there has its end under way already."""
        if self.rows.pop(key, None) is None:
            return False
        self.ended.append(RowDelta(key=key, finish=FinishReason.CANCELLED))
        return True

    def pause(self, key: RequestKey, *, keep: bool) -> bool:
        """Takes a row out until it is dispatched again, sometimes after a token that was computed
        already; one that is not there has its end under way."""
        row = self.rows.pop(key, None)
        if row is None:
            return False
        has_read = row.acceptance is not None and not row.unread_steps
        delta = RowDelta(key=key)
        is_safe = has_read and row.count != row.prompt.poison_at
        if row.acceptance is not None and is_safe and self.dice.random() < 0.5:
            self.rows[key] = row
            delta = self._advance(row, row.acceptance)
            self.rows.pop(key, None)
        if delta.finish is None:
            is_kept = keep and has_read and self.dice.random() < self.keeps
            delta.paused = RowState.KEPT if is_kept else RowState.DROPPED
        if delta.paused is RowState.KEPT:
            self.kept.add(key)
        self.ended.append(delta)
        return True

    def lose_one(self) -> None:
        """A bug: a row is gone, and nobody was notified."""
        del self.rows[self.dice.choice(list(self.rows))]

    def keep_to_budget(self) -> None:
        """Makes rows leave that there is no memory for."""
        for key in self.memory.leaving(self._running()):
            self._lacks_memory(key)

    def taken_bytes(self) -> int:
        """What its rows take."""
        return self.memory.taken_bytes(self._running())

    def _running(self) -> list[Row]:
        return [row for row in self.rows.values() if row.acceptance is not None]

    def _lacks_memory(self, key: RequestKey) -> None:
        del self.rows[key]
        state, reason = RowState.DROPPED, PauseReason.MEMORY
        self.ended.append(RowDelta(key=key, paused=state, pause_reason=reason))

    def prepare(self) -> None:
        """Answers the preparation of prompts: accepted or rejected, in any order, some later."""
        for key, row in list(self.rows.items()):
            if row.acceptance is not None or self.dice.random() < 0.25:
                continue
            if row.prompt.is_refused:
                del self.rows[key]
                error = RemoteError(ErrorCode.INVALID_REQUEST, f"no {key}")
                self.say(Rejected(key=key, error=error.to_wire()))
                continue
            others = self._running()
            row.acceptance = row.resumes or accept(row.prompt, self.generation)
            self.say(Accepted(key=key, acceptance=row.acceptance, tokenize_s=0.01))
            if not self.memory.has_room(row, others):
                self._lacks_memory(key)

    def poison(self) -> bool:
        """Whether a row is about to kill the engine."""
        return any(
            row.acceptance is not None
            and not row.unread_steps
            and row.count == row.prompt.poison_at
            for row in self.rows.values()
        )

    def step(self, took_s: float) -> None:
        """One engine step, and its message."""
        may_read = self.may_read
        self.steps += 1
        deltas, self.ended = self.ended, []
        between_steps = len(deltas)
        prefill = []
        for row in list(self.rows.values()):
            if row.acceptance is None:
                continue
            if row.unread_steps:
                if may_read:
                    prefill.append(self._read(row))
                continue
            deltas.append(self._advance(row, row.acceptance))
        decode_s = took_s * (self.steps % 4) / 4 if len(deltas) > between_steps else 0.0
        self._say(
            Step(
                step=self.steps,
                rows=deltas,
                prefill=prefill,
                took_s=took_s,
                decode_s=decode_s,
                between_steps=between_steps,
            )
        )

    def flush(self) -> None:
        """Tells of what happened between two steps."""
        if self.has_news:
            deltas, self.ended = self.ended, []
            self._say(Step(step=self.steps, rows=deltas, between_steps=len(deltas)))

    def _say(self, step: Step) -> None:
        rows = self.rows.values()
        can_decode = any(row.acceptance and not row.unread_steps for row in rows)
        said = self.reading.fill_in(step, is_reading=self.is_reading, can_decode=can_decode)
        self.say(said)

    @staticmethod
    def _read(row: Row) -> PrefillProgress:
        row.unread_steps -= 1
        total = LONG_TOKENS + row.count
        before, row.read = row.read, total // (row.unread_steps + 1)
        return PrefillProgress(key=row.key, done=row.read, total=total, computed=row.read - before)

    def _advance(self, row: Row, accepted: Acceptance) -> RowDelta:
        before = row.count
        row.count = min(before + self.dice.choice((1, 1, 1, 2)), answer_length(accepted))
        poison_at = row.prompt.poison_at
        if poison_at is not None and before < poison_at < row.count:
            row.count = poison_at
        if answer_channel(accepted, before) != answer_channel(accepted, row.count - 1):
            row.count = before + 1
        is_last = row.count == answer_length(accepted)
        text = answer_shown(accepted, row.count, is_end=is_last)
        tokens = [answer_token(accepted, index) for index in range(before, row.count)]
        is_first, row.has_spoken = not row.has_spoken, True
        if is_last:
            del self.rows[row.key]
        return RowDelta(
            key=row.key,
            text=text[len(answer_shown(accepted, before)) :],
            tokens=pack_tokens(tokens),
            logprobs=answer_logprobs(accepted, tokens),
            channel=answer_channel(accepted, before),
            warning=answer_warning(accepted) if is_first else None,
            finish=answer_finish(accepted) if is_last else None,
            prefill_s=0.5 if is_first else None,
            cached_tokens=row.key % 3 + self.generation if is_first else 0,
        )


# ---------------------------------------------------------------- pulse

BEAT_S = 0.5


class Pulse:
    """Of one process.

    Args:
        worker: whose beats they are.
        world: that it lives in.
    """

    def __init__(self, worker: PlayedWorker, world: World) -> None:
        self._worker, self._world = worker, world
        self._link = world.link("beat")

    def begin(self) -> None:
        """From now on it beats, until it is dead or mute."""
        worker = self._worker
        fault = worker.fault.name if worker.fault else ""
        if worker.is_alive and not worker.is_frozen and fault not in (*MUTE_HANGS, "mute"):
            self.beat()
            self._world.time.after(BEAT_S, self.begin)

    def beat(self) -> None:
        """Sends one beat."""
        worker = self._worker
        phase, phase_s, predicted_s = self._phase()
        memory = self._world.reported_bytes(worker)
        beat = Heartbeat(
            step=worker.batch.steps,
            phase=phase,
            phase_s=phase_s,
            predicted_s=predicted_s,
            requests=worker.batch.held,
            preparing=worker.batch.preparing,
            budget=worker.batch.memory.budget,
            sent=worker.sent,
            received=worker.received,
            active_bytes=memory - memory // 3,
            cache_bytes=0 if worker.has_given_back else memory // 3,
        )
        self._link.send(lambda: worker.hand_over(beat))

    def _phase(self) -> tuple[WorkerPhase, float, float]:
        worker, now = self._worker, self._world.time.now
        if not worker.is_ready:
            return WorkerPhase.LOADING, 0.0, 0.0
        if worker.fault is not None and worker.fault.name == "waits_on":
            return WorkerPhase.WAITING, now - worker.fault.since, 0.0
        if (
            worker.works_since is None
            and worker.batch.rows
            and worker.batch.reading.has is Has.ASKED
        ):
            return WorkerPhase.WAITING, now - worker.waits_since, 0.0
        if worker.works_since is None:
            return WorkerPhase.IDLE, 0.0, 0.0
        took_s = now - worker.works_since
        if worker.fault is not None and worker.fault.name == "blocked":
            return WorkerPhase.ROWS, took_s, 0.0
        if worker.predicted_s:
            return WorkerPhase.PREFILL, took_s, worker.predicted_s
        return WorkerPhase.DECODE, took_s, 0.0


# ---------------------------------------------------------------- mishaps

SHORT = 0.5
"""Chance of each step with a request that needs too much memory."""


def lacks_memory(worker: PlayedWorker, world: World) -> bool:
    """Whether a request that needs too much memory ends this step."""
    is_struck = any(row.prompt.is_too_large for row in worker.batch.rows.values())
    if not is_struck or world.plan.random.random() >= SHORT:
        return False
    world.struck("too_large")
    worker.die(75, "one request needs too much")
    return True


def strikes(worker: PlayedWorker, world: World) -> bool:
    """Whether a fault ends this step."""
    happens, dice = world.happens, world.plan.random
    for name, codes in (("fault_71", (71,)), ("gpu_72", (72,)), ("raise_70", (70,)),
                        ("oom_75", (75,)), ("odd_exit", (1, 65, 0))):  # fmt: skip
        if happens(name):
            worker.die(dice.choice(codes), f"{name} at {dice.randrange(10**6)}")
            return True
    for name, signals in (("kill", ("SIGKILL",)), ("term", ("SIGTERM",)), ("segv", ACCUSING)):
        if happens(name):
            worker.exit(signal=dice.choice(signals))
            return True
    for name in ("oom_kill", "oom_near", "oom_beat"):
        if happens(name):
            world.measure(worker, name)
            worker.pulse.beat()
            world.time.after(0.001, lambda: worker.exit(signal="SIGKILL"))
            return True
    if worker.fault is not None:
        return False  # one at a time, so that it is known what a kill is for
    for name in ("stop", "stall", "gil", "blocked"):
        if happens(name):
            worker.hang(name)
            return True
    if happens("link_drops"):
        worker.fault = Fault(name="link_drops", since=world.time.now)
        worker.unlink()
        return True
    if happens("garbage"):
        worker.fault = Fault(name="garbage", since=world.time.now)
        worker.breaks()
        return True
    if happens("row_lost"):
        worker.fault = Fault(name="row_lost", since=world.time.now)
        worker.batch.lose_one()
    elif happens("mute"):
        worker.fault = Fault(name="mute", since=world.time.now)
    return False


def while_idle(worker: PlayedWorker, world: World) -> None:
    """It may die although it has nothing to do."""
    if world.happens("idle_dies"):
        world.time.after(
            world.plan.random.uniform(0.0, 6.0),
            lambda: worker.exit(signal="SIGKILL", fault="idle_dies"),
        )


# ---------------------------------------------------------------- rendering

TAKES_S = (0.0, 0.05, 0.5)
NOTHING_SHARE = 0.05
"""Of questions that the worker cannot answer, as if it were of another model by now."""


class Renderer:
    """The helper threads of all workers.

    Args:
        plan: of the run.
        time: when things happen.
    """

    def __init__(self, plan: Plan, time: Timeline) -> None:
        self._dice = plan.dice("renders in")
        self._time = time

    def answers(self, worker: PlayedWorker, question: Render) -> None:
        """A worker will answer, if it still does anything then."""
        has_nothing = self._dice.random() < NOTHING_SHARE
        bodies = [] if has_nothing else _rendered_bodies(question)

        def say() -> None:
            if not (worker.is_hung or worker.is_frozen):
                worker.say(Rendered(number=question.number, bodies=bodies))

        self._time.after(self._dice.choice(TAKES_S), say)


def _rendered_bodies(question: Render) -> list[bytes]:
    """What its client was shown: a body for each part of the answer."""
    tokens = unpack_tokens(question.delivered)
    reasoning = REASONING_TOKENS if question.opening else 0
    is_held_back = tokens[-1] % HOLDS_BACK == 0
    texts = [f"<{token}>" for token in tokens[: len(tokens) - is_held_back]]
    parts = {Channel.REASONING: texts[:reasoning], Channel.CONTENT: texts[reasoning:]}
    bodies = [pack_body("".join(part), channel) for channel, part in parts.items() if part]
    return bodies or [pack_body("", Channel.CONTENT)]


# ---------------------------------------------------------------- worker

TEARDOWN_S = (0.0, 0.0, 0.01, 0.3, 3.0)
"""How long the kernel may take from an exit to its being seen."""


class PlayedWorker:
    """One incarnation.

    Attributes:
        fault: what is wrong with it while it lives: the truth, by which kills are judged.
        is_alive: until it exits; that is seen later.
        is_linked: whether it is still connected.
        works_since, waits_since: when its step began, and when it last found nothing to do.
    """

    def __init__(self, world: World, spawn: Spawn, pid: int) -> None:
        plan = world.plan
        self._world, self._dice, self._time = world, plan.random, world.time
        self.model: ModelName = spawn.model
        self.generation: Generation = spawn.generation
        self._reports = Reports(model=spawn.model, generation=spawn.generation)
        self.pid = pid
        self.fault: Fault | None = None
        self.is_alive = self.is_linked = True
        self.is_ready = self.is_asked = self.has_greeted = False
        self.has_given_back = False
        self.is_frozen = self.is_abandoned = False
        self.is_known = self.is_broken = False
        self.sent = self.received = 0
        self.predicted_s = 0.0
        self._up = Link(self._time, self._dice, plan.delays_s["worker_up"], 1.0)
        self._down = Link(self._time, self._dice, plan.delays_s["worker_down"], 1.0)
        self.pulse = Pulse(self, world)
        self.batch = Batch(
            dice=self._dice,
            generation=int(spawn.generation),
            max_rows=spawn.launch.max_concurrency,
            by_number=world.prompts.by_number,
            by_body=world.prompts.by_body,
            say=self.say,
            keeps=plan.kept_share,
            memory=PlayedMemory(plan.layers_of(spawn.launch)),
        )
        self._layers = plan.layers_of(spawn.launch)
        self._fixed_bytes = plan.needs[spawn.model] - plan.row_bytes
        self._timeout_s = spawn.launch.step_timeout_s
        self.works_since: float | None = None
        self.waits_since = 0.0
        self._time.after(self._dice.uniform(0.0, 0.1), self._start)

    def footprint_bytes(self, granted_bytes: int) -> int:
        """What it holds; `granted_bytes` as long as it is not known what its rows take."""
        if not (self._layers and self.is_ready):
            return granted_bytes
        return self._fixed_bytes + self.batch.taken_bytes()

    @property
    def is_hung(self) -> bool:
        """Whether it no longer does anything by itself."""
        return self.fault is not None and self.fault.name in HANGS

    # ------------------------------------------------------------ coming up

    def _start(self) -> None:
        if self._world.happens("spawn_fails"):
            self.is_alive = False
            self._world.gone(self)
            self._world.handle(self._reports.spawn_failed(self._time.now))
            return
        self._world.handle(self._reports.spawned(self.pid, self._time.now))
        self._time.after(0.02, self._greet)

    def _greet(self) -> None:
        if not self.is_alive:
            return
        if self._world.happens("load_stops"):
            self.hang("load_stops")
            return
        version = VERSION
        if self._world.happens("other_version"):
            self.fault = Fault(name="other_version", since=self._time.now)
            if self._dice.random() < 0.5:
                self.breaks(is_other_version=True)
                return
            version = "0.0.0"
        self.has_greeted = True
        self.say(
            Hello(
                model=self.model,
                generation=self.generation,
                token="t",
                pid=self.pid,
                version=version,
            )
        )
        self.pulse.begin()
        self._load(0)

    def _load(self, part: int) -> None:
        if not self.is_alive or self.fault is not None:
            return
        happens, number = self._world.happens, self._dice.randrange(10**6)
        if happens("bad_model"):
            self.die(self._dice.choice((64, 65, 66, 69)), f"no file {number}")
        elif happens("load_dies"):
            self.exit(signal=self._dice.choice(("SIGKILL", "SIGSEGV", "SIGTERM")))
        elif happens("load_raises"):
            self.die(self._dice.choice((70, 71)), f"error of {self._dice.choice('pq')}")
        elif happens("load_alike"):
            self.die(70, f"shape mismatch at 0x{number:x}")
        elif happens("load_lacks_memory"):
            self.die(self._dice.choice((75, 72)), f"no room for {number} bytes")
        elif happens("load_stalls"):
            self.hang("load_stalls")
        elif part < 2:
            self.say(LoadProgress(phase=LoadPhase.WEIGHTS, progress=(part + 1) / 3))
            self._time.after(self._dice.uniform(0.02, 0.5), lambda: self._load(part + 1))
        else:
            self.is_ready = True
            self.say(
                Ready(
                    context_length=100,
                    fingerprint="f",
                    backend=backend_of(self.model),
                    active_bytes=self._fixed_bytes if self._layers else 0,
                    own_bytes=0 if self._layers else None,
                    cache_layers=list(self._layers),
                    batching=self._dice.choice(list(Batching)),
                    batching_reason=f"seen in life {self.generation}",
                )
            )
            while_idle(self, self._world)

    # ------------------------------------------------------------ what it receives

    def tell(self, message: Message) -> None:
        """The supervisor sends a message, which may find the process gone."""
        self._down.send(lambda: self._take(message))

    def _take(self, message: Message) -> None:
        if not self.is_alive or not self.is_linked or self.is_frozen or self.is_hung:
            return
        self.received += 1
        match message:
            case Dispatch():
                check("dispatched before READY", self.is_ready, message.key)
                check("dispatched after Exit", not self.is_asked, message.key)
                self.batch.begin(message)
                self._wake()
            case CancelRow(key=key):
                if self.batch.cancel(key):
                    self._wake()
            case Leases() | Lease():
                self.batch.reading.unread.append(message)
                self._wake()
            case PauseRow(key=key, keep=keep):
                if self.batch.pause(key, keep=keep):
                    self._wake()
            case DropKept(key=key):
                check("drops what is not kept", key in self.batch.kept, key)
                self.batch.kept.remove(key)
            case SetBudget():
                self.batch.memory.heard(message)
                if self.works_since is None:
                    self.batch.keep_to_budget()
                    self._wake()
            case GiveBack():
                self.has_given_back = True
            case Render():
                self._world.renderer.answers(self, message)
            case Exit():
                self.is_asked = True
                self._wake()
            case _:
                raise AssertionError(message)

    def signalled(self, signal: WorkerSignal) -> None:
        """A signal arrives; whether it was deserved is for the oracle."""
        if not self.is_alive:
            return
        if signal is WorkerSignal.KILL:
            if self.is_frozen:
                return
            if self._world.happens("unkillable"):
                self.is_frozen = True
                self._up.lose_end()
                if self._dice.random() < 0.6:
                    self._time.after(self._dice.uniform(5.0, 40.0), self._thaw)
                return
            self._time.after(0.005, lambda: self.exit(signal="SIGKILL"))
        elif signal is WorkerSignal.TERM and not self.is_hung and self._dice.random() < 0.85:
            if self._dice.random() < 0.5:
                self._time.after(0.02, lambda: self.exit(signal="SIGTERM"))
            else:
                self._time.after(0.02, lambda: self.exit(code=143))

    def _thaw(self) -> None:
        self.is_frozen = False
        self.exit(signal="SIGKILL")

    # ------------------------------------------------------------ working

    def _wake(self) -> None:
        if self.works_since is not None or self.is_hung or self.is_frozen:
            return
        batch = self.batch
        batch.reading.hear()
        if batch.reads_with_lease and self._world.happens("waits_on"):
            self.hang("waits_on")
            return
        if not (batch.can_step or batch.preparing or batch.has_news or self.is_asked):
            self.waits_since = self._time.now
            return
        self.works_since = self._time.now
        self.predicted_s = 0.0
        step_s = self._world.plan.step_s * self._dice.uniform(0.5, 1.5)
        if batch.is_reading and batch.may_read:  # slower than the limit, as predicted
            self.predicted_s = self._timeout_s * 0.75
            slow_s = self._timeout_s * self._dice.choice((0.5, 1.5, 3.0))
            step_s = step_s if self._world.is_healing else slow_s
        self._time.after(step_s, lambda: self._work(step_s))

    def _work(self, took_s: float) -> None:
        if not self.is_alive or self.is_hung or self.is_frozen or not self.is_linked:
            return
        self.works_since = None
        if self.is_asked:
            self._time.after(self._dice.uniform(0.0, 0.1), lambda: self.exit(code=0))
            return
        if lacks_memory(self, self._world):
            return
        if self.batch.rows and not self._world.is_healing and strikes(self, self._world):
            return
        self.batch.keep_to_budget()
        self.batch.prepare()
        if self.batch.poison():
            self._world.struck("poison")
            self.exit(signal=self._dice.choice(ACCUSING))
        elif self.batch.can_step:
            self.batch.step(took_s)
        else:
            self.batch.flush()
        if self.batch.rows:
            self._wake()

    def hang(self, name: str) -> None:
        """From now on it does nothing by itself."""
        self.fault = Fault(name=name, since=self._time.now)
        self.works_since = self._time.now

    # ------------------------------------------------------------ speaking and ending

    def say(self, message: WorkerMessage) -> None:
        """Sends the supervisor a message."""
        if self.is_alive and self.is_linked:
            self.sent += 1
            self._up.send(lambda: self.hand_over(message))

    def hand_over(self, message: WorkerMessage) -> None:
        """What it has sent arrives."""
        self.is_known = self.is_known or isinstance(message, Hello)
        if not (self.is_abandoned or self.is_broken or self._world.is_gone(self)):
            self._world.handle(self._reports.said(message, self._time.now))

    def breaks(self, *, is_other_version: bool = False) -> None:
        """It sends what is no message: nothing more is read from it, and nothing said to it."""
        self.is_linked = False

        def report() -> None:
            self.is_broken = True
            if self.is_abandoned or self._world.is_gone(self):
                return
            now = self._time.now
            self._world.handle(self._reports.broke(now, is_other_version=is_other_version))

        self._up.send(report)

    def unlink(self) -> None:
        """Its connection ends."""
        self.is_linked = False

        def report() -> None:
            if self.is_known and not self.is_abandoned:
                self._world.handle(self._reports.unlinked(self._time.now))

        self._up.send(report)

    def die(self, code: int, message: str) -> None:
        """The process says why it ends, and ends."""
        self.say(Dying(code=code, message=message))
        self.exit(code=code)

    def exit(self, *, code: int | None = None, signal: str = "", fault: str = "") -> None:
        """The process ends; what it had said is read before that is seen, if it left at all."""
        if not self.is_alive or self.is_frozen:
            return
        if fault and self._world.is_healing:
            return
        self.is_alive = False
        if signal:
            self._up.lose_end()
        if self.has_greeted and self.is_linked:
            self.unlink()
        exited = self._reports.exited(code, signal, now=0.0)
        teardown_s = self._dice.choice(TEARDOWN_S)
        self._up.send(lambda: self._world.exited(self, exited), more_s=teardown_s)
