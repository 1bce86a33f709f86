"""A worker's process as the world plays it: it obeys, answers token by token, and fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from mlxsup.protocol import worker_messages as messages
from mlxsup.protocol.cache_cost import cache_bytes
from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.delta import DeltaBody, pack_body
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import RequestKey, pack_tokens, unpack_tokens
from mlxsup.protocol.message import Message
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
from mlxsup.protocol.worker_messages import Render, Rendered
from mlxsup.supervisor.core import events
from mlxsup.supervisor.core.actions import Spawn, WorkerSignal
from mlxsup.worker.engine import Engine, EngineBytes
from mlxsup.worker.row_memory import RowMemory

from .ground import check
from .plan import (
    HOLDS_BACK,
    REASONING_TOKENS,
    Prompt,
    accept,
    answer_channel,
    answer_finish,
    answer_length,
    answer_logprobs,
    answer_shown,
    answer_token,
    answer_warning,
    number_of,
)

if TYPE_CHECKING:
    from .world import World

ACCUSING = ("SIGSEGV", "SIGABRT", "SIGBUS")
HANGS = ("stall", "gil", "blocked", "waits_on", "stop", "load_stalls", "load_stops")
MUTE = ("gil", "stop", "load_stops", "mute")
BEAT_S = 0.5
LONG_STEPS, LONG_TOKENS = 4, 16


class Fault(NamedTuple):
    """What is wrong with a process that lives, by the name in the plan, and since when."""

    name: str
    since: float


# ---------------------------------------------------------------- rows


@dataclass(slots=True, kw_only=True)
class Row:
    """One request that the worker holds."""

    key: RequestKey
    prompt: Prompt
    acceptance: messages.Acceptance | None = None  # None while it is being prepared
    resumes: messages.Acceptance | None = None  # of an earlier life
    count: int = 0  # tokens computed, those of earlier lives too
    unread_steps: int = 0
    read: int = 0
    has_spoken: bool = False
    priority: Priority = Priority.NORMAL
    may_leave: bool = True

    @property
    def tokens(self) -> int:
        assert self.acceptance is not None
        return len(self.acceptance.prompt_tokens) // 4 + self.count


class _KeepsNothing:
    """An engine for which what is kept of paused rows takes nothing."""

    def bytes_held(self) -> EngineBytes:
        return EngineBytes()

    def give_back(self) -> None:
        pass

    def bound_rows(self, rows_bytes: int) -> None:
        pass

    def free_kept(self, spared: RequestKey | None = None) -> None:
        pass


class Has(Enum):
    """What a worker has of a lease."""

    NOTHING = auto()
    ASKED = auto()
    A_LEASE = auto()


@dataclass(slots=True, kw_only=True)
class Batch:
    """All rows of one worker, its turns to read long prompts, and the memory that rows may take."""

    dice: Random
    generation: int
    max_rows: int
    prompts: dict[int, Prompt]
    bodies: dict[bytes, Prompt]
    say: Callable[[messages.WorkerMessage], None]
    keeps: float  # the share of paused rows whose state there is memory for
    layers: tuple[CacheLayers, ...]
    rows: dict[RequestKey, Row] = field(default_factory=dict)
    ended: list[messages.RowDelta] = field(default_factory=list)  # taken out since the last step
    kept: set[RequestKey] = field(default_factory=set)
    steps: int = 0
    are_leases_needed: bool = False
    has: Has = Has.NOTHING
    # What was said of leases since the step under way began.
    unheard: list[messages.Leases | messages.Lease] = field(default_factory=list)
    memory: RowMemory = field(init=False)

    def __post_init__(self) -> None:
        self.memory = RowMemory(cast(Engine, _KeepsNothing()), self.layers)

    @property
    def running(self) -> list[Row]:
        return [row for row in self.rows.values() if row.acceptance is not None]

    @property
    def is_reading(self) -> bool:
        """True if the next step reads a long prompt, if it may."""
        return any(row.unread_steps for row in self.running)

    @property
    def may_read(self) -> bool:
        """True if it may, or has nothing to read."""
        is_free = self.has is Has.NOTHING and not self.are_leases_needed
        return is_free or self.has is Has.A_LEASE or not self.is_reading

    @property
    def can_step(self) -> bool:
        may_read = self.may_read
        return any(may_read or not row.unread_steps for row in self.running)

    @property
    def wants_lease(self) -> bool:
        return self.has is Has.NOTHING and self.are_leases_needed and self.is_reading

    @property
    def has_news(self) -> bool:
        """True if there is something to say without a step."""
        return bool(self.ended) or self.wants_lease or self.has is Has.A_LEASE

    def hear(self) -> None:
        """Read what the supervisor has said about leases, once no step is under way."""
        for message in self.unheard:
            if isinstance(message, messages.Leases):
                check("told again", message.are_needed != self.are_leases_needed, message)
                self.are_leases_needed = message.are_needed
            else:
                check("lease for nobody's question", self.has is Has.ASKED, self.has)
                self.has = Has.A_LEASE
        self.unheard.clear()

    def begin(self, dispatch: messages.Dispatch) -> None:
        key, resume = dispatch.key, dispatch.resume
        check("dispatched twice", key not in self.rows, key)
        if resume is None:
            check("dispatched body", dispatch.body in self.bodies, dispatch.body)
            row = Row(key=key, prompt=self.bodies[dispatch.body])
        else:
            row = Row(
                key=key,
                prompt=self.prompts[number_of(resume.acceptance)],
                resumes=resume.acceptance,
                count=len(resume.delivered) // 4,
            )
        row.priority, row.may_leave = dispatch.priority, dispatch.may_leave
        if key in self.kept:
            self.kept.remove(key)
        elif row.prompt.is_long:
            row.unread_steps = LONG_STEPS
            row.read = key % 3  # from a cache
        self.rows[key] = row
        check("too many rows", len(self.rows) <= self.max_rows, f"{len(self.rows)} rows")

    def cancel(self, key: RequestKey) -> bool:
        """Take a row out; one that is not there has its end under way already."""
        if self.rows.pop(key, None) is None:
            return False
        self.ended.append(messages.RowDelta(key=key, finish=FinishReason.CANCELLED))
        return True

    def pause(self, key: RequestKey, *, keep: bool) -> bool:
        """Take a row out, sometimes after a token; one that is not there has its end under way."""
        row = self.rows.pop(key, None)
        if row is None:
            return False
        has_read = row.acceptance is not None and not row.unread_steps
        is_safe = has_read and row.count != row.prompt.poison_at
        delta = messages.RowDelta(key=key)
        if row.acceptance is not None and is_safe and self.dice.random() < 0.5:
            delta = self._advance(row, row.acceptance)
        if delta.finish is None:
            is_kept = keep and has_read and self.dice.random() < self.keeps
            delta.paused = RowState.KEPT if is_kept else RowState.DROPPED
        if delta.paused is RowState.KEPT:
            self.kept.add(key)
        self.ended.append(delta)
        return True

    def lose_one(self) -> None:
        """Forget a row, and notify nobody: a bug."""
        del self.rows[self.dice.choice(list(self.rows))]

    def keep_to_budget(self) -> None:
        for key in self.memory.leaving(self.running):
            self._lacks_memory(key)

    def taken_bytes(self) -> int:
        rows = self.running
        longest = max((row.tokens for row in rows), default=0)
        return cache_bytes(self.layers, rows=len(rows), longest=longest)

    def _lacks_memory(self, key: RequestKey) -> None:
        del self.rows[key]
        self.ended.append(
            messages.RowDelta(key=key, paused=RowState.DROPPED, pause_reason=PauseReason.MEMORY)
        )

    def prepare(self) -> None:
        """Accept or reject prompts, in any order, some later."""
        for key, row in list(self.rows.items()):
            if row.acceptance is not None or self.dice.random() < 0.25:
                continue
            if row.prompt.is_refused:
                del self.rows[key]
                error = RemoteError(ErrorCode.INVALID_REQUEST, f"no {key}")
                self.say(messages.Rejected(key=key, error=error))
                continue
            others = self.running
            row.acceptance = row.resumes or accept(row.prompt, self.generation)
            self.say(messages.Accepted(key=key, acceptance=row.acceptance, tokenize_s=0.01))
            if not self.memory.has_room(row, others):
                self._lacks_memory(key)

    def is_poisoned(self) -> bool:
        """True if a row is about to kill the engine."""
        return any(
            not row.unread_steps and row.count == row.prompt.poison_at for row in self.running
        )

    def step(self, took_s: float) -> None:
        """Make one engine step, and say so."""
        may_read = self.may_read
        self.steps += 1
        deltas, self.ended = self.ended, []
        between_steps, prefill = len(deltas), []
        for row in self.running:
            assert row.acceptance is not None
            if not row.unread_steps:
                deltas.append(self._advance(row, row.acceptance))
            elif may_read:
                prefill.append(self._read(row))
        decode_s = took_s * (self.steps % 4) / 4 if len(deltas) > between_steps else 0.0
        self._say(deltas, between_steps, prefill=prefill, took_s=took_s, decode_s=decode_s)

    def flush(self) -> None:
        """Tell of what happened between two steps."""
        if self.has_news:
            deltas, self.ended = self.ended, []
            self._say(deltas, len(deltas))

    def _say(self, deltas: list[messages.RowDelta], between_steps: int, **more: Any) -> None:
        is_reading = self.is_reading
        can_decode = any(not row.unread_steps for row in self.running)
        returns = self.has is Has.A_LEASE
        if returns:
            self.has = Has.NOTHING
        wants = self.wants_lease
        if wants:
            self.has = Has.ASKED
        self.say(
            messages.Step(
                step=self.steps,
                rows=deltas,
                between_steps=between_steps,
                reads_on=is_reading,
                returns_lease=returns,
                wants_lease=wants,
                only_waits=self.has is Has.ASKED and is_reading and not can_decode,
                **more,
            )
        )

    @staticmethod
    def _read(row: Row) -> messages.PrefillProgress:
        row.unread_steps -= 1
        total = LONG_TOKENS + row.count
        before, row.read = row.read, total // (row.unread_steps + 1)
        return messages.PrefillProgress(
            key=row.key, done=row.read, total=total, computed=row.read - before
        )

    def _advance(self, row: Row, accepted: messages.Acceptance) -> messages.RowDelta:
        before, poison_at = row.count, row.prompt.poison_at
        row.count = min(before + self.dice.choice((1, 1, 1, 2)), answer_length(accepted))
        if poison_at is not None and before < poison_at < row.count:
            row.count = poison_at
        if answer_channel(accepted, before) != answer_channel(accepted, row.count - 1):
            row.count = before + 1
        is_last = row.count == answer_length(accepted)
        text = answer_shown(accepted, row.count, is_end=is_last)
        tokens = [answer_token(accepted, index) for index in range(before, row.count)]
        is_first, row.has_spoken = not row.has_spoken, True
        if is_last:
            self.rows.pop(row.key, None)
        return messages.RowDelta(
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


def rendered_bodies(question: Render) -> list[bytes]:
    """Return what its client was shown: a body for each part of the answer."""
    tokens = unpack_tokens(question.delivered)
    reasoning = REASONING_TOKENS if question.opening else 0
    is_held_back = tokens[-1] % HOLDS_BACK == 0
    texts = [f"<{token}>" for token in tokens[: len(tokens) - is_held_back]]
    parts = {Channel.REASONING: texts[:reasoning], Channel.CONTENT: texts[reasoning:]}
    bodies = [
        pack_body(DeltaBody(text="".join(part), channel=channel))
        for channel, part in parts.items()
        if part
    ]
    return bodies or [pack_body(DeltaBody())]


# ---------------------------------------------------------------- worker


class PlayedWorker:
    """One process of a model.

    Attributes:
        fault: what is wrong with it while it lives: the truth, by which kills are judged.
        is_alive: until it exits; that is seen later.
        is_frozen: SIGKILL has no effect on it.
        works_since, waits_since: when its step began, and when it last found nothing to do.
    """

    def __init__(self, world: World, spawn: Spawn, pid: int) -> None:
        plan = world.plan
        self._world, self._dice, self._time = world, plan.random, world.time
        self.model, self.generation, self.pid = spawn.model, spawn.generation, pid
        self.fault: Fault | None = None
        self.is_alive = self.is_linked = True
        self.is_ready = self.is_asked = self.has_greeted = False
        self.has_given_back = self.is_frozen = self.is_abandoned = False
        self.is_known = self.is_broken = False
        self.sent = self.received = 0
        self.predicted_s = 0.0
        self._up, self._down, self._beats = map(world.link, ("worker_up", "worker_down", "beat"))
        self._layers = plan.layers_of(spawn.launch)
        self.batch = Batch(
            dice=self._dice,
            generation=int(spawn.generation),
            max_rows=spawn.launch.max_concurrency,
            prompts=world.prompts,
            bodies=world.bodies,
            say=self.say,
            keeps=plan.kept_share,
            layers=self._layers,
        )
        self._fixed_bytes = plan.needs[spawn.model] - plan.row_bytes
        self._timeout_s = spawn.launch.step_timeout_s
        self.works_since: float | None = None
        self.waits_since = 0.0
        self._time.after(self._dice.uniform(0.0, 0.1), self._start)

    def footprint_bytes(self, granted_bytes: int) -> int:
        """Return what it holds; `granted_bytes` as long as it is unknown what its rows take."""
        if not (self._layers and self.is_ready):
            return granted_bytes
        return self._fixed_bytes + self.batch.taken_bytes()

    @property
    def is_hung(self) -> bool:
        """True if it no longer does anything by itself."""
        return self.fault is not None and self.fault.name in HANGS

    def _report(self, kind: Callable[..., events.Event], **fields: Any) -> None:
        self._world.handle(
            kind(now=self._time.now, model=self.model, generation=self.generation, **fields)
        )

    # ------------------------------------------------------------ coming up

    def _start(self) -> None:
        if self._world.happens("spawn_fails"):
            self.is_alive = False
            self._forget()
            self._report(events.SpawnFailed, detail="no processes")
            return
        self._report(events.Spawned, pid=self.pid)
        self._time.after(0.02, self._greet)

    def _greet(self) -> None:
        if not self.is_alive:
            return
        if self._world.happens("load_stops"):
            self.hang("load_stops")
            return
        version = VERSION
        if self._world.happens("other_version"):
            self._breaks_down("other_version")
            if self._dice.random() < 0.5:
                self._say_garbage(is_other_version=True)
                return
            version = "0.0.0"
        self.has_greeted = True
        self.say(
            messages.Hello(
                model=self.model,
                generation=self.generation,
                token="t",
                pid=self.pid,
                version=version,
            )
        )
        self._beat_on()
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
            self.say(messages.LoadProgress(phase=LoadPhase.WEIGHTS, progress=(part + 1) / 3))
            self._time.after(self._dice.uniform(0.02, 0.5), lambda: self._load(part + 1))
        else:
            self.is_ready = True
            self.say(
                messages.Ready(
                    context_length=100,
                    fingerprint="f",
                    backend="cpu",
                    active_bytes=self._fixed_bytes if self._layers else 0,
                    own_bytes=0 if self._layers else None,
                    cache_layers=list(self._layers),
                    batching=self._dice.choice(list(Batching)),
                    batching_reason=f"seen in life {self.generation}",
                )
            )
            if happens("idle_dies"):
                self._time.after(self._dice.uniform(0.0, 6.0), self._die_idle)

    def _die_idle(self) -> None:
        if not self._world.is_healing:
            self.exit(signal="SIGKILL")

    # ------------------------------------------------------------ beats

    def _beat_on(self) -> None:
        """Beat from now on, until it is dead or mute."""
        fault = self.fault.name if self.fault else ""
        if self.is_alive and not self.is_frozen and fault not in MUTE:
            self._beat()
            self._time.after(BEAT_S, self._beat_on)

    def _beat(self) -> None:
        phase, phase_s, predicted_s = self._phase()
        memory = self._world.reported_bytes.get(self.pid, 150)
        beat = messages.Heartbeat(
            step=self.batch.steps,
            phase=phase,
            phase_s=phase_s,
            predicted_s=predicted_s,
            requests=len(self.batch.rows) + len(self.batch.ended),
            preparing=len(self.batch.rows) - len(self.batch.running),
            budget=self.batch.memory.budget,
            sent=self.sent,
            received=self.received,
            active_bytes=memory - memory // 3,
            cache_bytes=0 if self.has_given_back else memory // 3,
        )
        self._beats.send(lambda: self._hand_over(beat))

    def _phase(self) -> tuple[WorkerPhase, float, float]:
        now, fault = self._time.now, self.fault
        if not self.is_ready:
            return WorkerPhase.LOADING, 0.0, 0.0
        if fault is not None and fault.name == "waits_on":
            return WorkerPhase.WAITING, now - fault.since, 0.0
        if self.works_since is None and self.batch.rows and self.batch.has is Has.ASKED:
            return WorkerPhase.WAITING, now - self.waits_since, 0.0
        if self.works_since is None:
            return WorkerPhase.IDLE, 0.0, 0.0
        took_s = now - self.works_since
        if fault is not None and fault.name == "blocked":
            return WorkerPhase.ROWS, took_s, 0.0
        if self.predicted_s:
            return WorkerPhase.PREFILL, took_s, self.predicted_s
        return WorkerPhase.DECODE, took_s, 0.0

    # ------------------------------------------------------------ what it receives

    def tell(self, message: Message) -> None:
        """Take a message of the supervisor, which may find the process gone."""
        self._down.send(lambda: self._take(message))

    def _take(self, message: Message) -> None:
        if not self.is_alive or not self.is_linked or self.is_frozen or self.is_hung:
            return
        self.received += 1
        batch = self.batch
        match message:
            case messages.Dispatch():
                check("dispatched before READY", self.is_ready, message.key)
                check("dispatched after Exit", not self.is_asked, message.key)
                batch.begin(message)
                self._wake()
            case messages.CancelRow(key=key):
                if batch.cancel(key):
                    self._wake()
            case messages.Leases() | messages.Lease():
                batch.unheard.append(message)
                self._wake()
            case messages.PauseRow(key=key, keep=keep):
                if batch.pause(key, keep=keep):
                    self._wake()
            case messages.DropKept(key=key):
                check("drops what is not kept", key in batch.kept, key)
                batch.kept.remove(key)
            case messages.SetBudget():
                batch.memory.heard(message)
                if self.works_since is None:
                    batch.keep_to_budget()
                    self._wake()
            case messages.GiveBack():
                self.has_given_back = True
            case Render():
                self._render(message)
            case messages.Exit():
                self.is_asked = True
                self._wake()
            case _:
                raise AssertionError(message)

    def _render(self, question: Render) -> None:
        """Answer in a helper thread; now and then with nothing, as if of another model by now."""
        dice = self._world.renders
        bodies = [] if dice.random() < 0.05 else rendered_bodies(question)

        def say() -> None:
            if not (self.is_hung or self.is_frozen):
                self.say(Rendered(number=question.number, bodies=bodies))

        self._time.after(dice.choice((0.0, 0.05, 0.5)), say)

    def signalled(self, signal: WorkerSignal) -> None:
        """Take a signal; whether it was deserved is for the oracle."""
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
        batch.hear()
        if batch.has is Has.A_LEASE and batch.is_reading and self._world.happens("waits_on"):
            self.hang("waits_on")
            return
        is_preparing = len(batch.rows) > len(batch.running)
        if not (batch.can_step or is_preparing or batch.has_news or self.is_asked):
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
        batch = self.batch
        if self.is_asked:
            self._time.after(self._dice.uniform(0.0, 0.1), lambda: self.exit(code=0))
            return
        if self._lacks_memory() or (batch.rows and not self._world.is_healing and self._strikes()):
            return
        batch.keep_to_budget()
        batch.prepare()
        if batch.is_poisoned():
            self._world.faults["poison"] += 1
            self.exit(signal=self._dice.choice(ACCUSING))
        elif batch.can_step:
            batch.step(took_s)
        else:
            batch.flush()
        if batch.rows:
            self._wake()

    # ------------------------------------------------------------ mishaps

    def _lacks_memory(self) -> bool:
        """True if a request that needs too much memory ends this step."""
        rows: Iterable[Row] = self.batch.rows.values()
        if not any(row.prompt.is_too_large for row in rows) or self._dice.random() >= 0.5:
            return False
        self._world.faults["too_large"] += 1
        self.die(75, "one request needs too much")
        return True

    def _strikes(self) -> bool:
        """True if a fault ends this step."""
        happens, dice = self._world.happens, self._dice
        for name, codes in (("fault_71", (71,)), ("gpu_72", (72,)), ("raise_70", (70,)),
                            ("oom_75", (75,)), ("odd_exit", (1, 65, 0))):  # fmt: skip
            if happens(name):
                self.die(dice.choice(codes), f"{name} at {dice.randrange(10**6)}")
                return True
        for name, signals in (("kill", ("SIGKILL",)), ("term", ("SIGTERM",)), ("segv", ACCUSING)):
            if happens(name):
                self.exit(signal=dice.choice(signals))
                return True
        for name in ("oom_kill", "oom_near", "oom_beat"):
            if happens(name):
                self._world.measure(self, name)
                self._beat()
                self._time.after(0.001, lambda: self.exit(signal="SIGKILL"))
                return True
        if self.fault is not None:
            return False  # one at a time, so that it is known what a kill is for
        for name in ("stop", "stall", "gil", "blocked"):
            if happens(name):
                self.hang(name)
                return True
        if happens("link_drops"):
            self._breaks_down("link_drops")
            self._unlink()
            return True
        if happens("garbage"):
            self._breaks_down("garbage")
            self._say_garbage()
            return True
        if happens("row_lost"):
            self._breaks_down("row_lost")
            self.batch.lose_one()
        elif happens("mute"):
            self._breaks_down("mute")
        return False

    def _breaks_down(self, name: str) -> None:
        self.fault = Fault(name, self._time.now)

    def hang(self, name: str) -> None:
        """Do nothing by itself from now on."""
        self._breaks_down(name)
        self.works_since = self._time.now

    # ------------------------------------------------------------ speaking and ending

    @property
    def _is_forgotten(self) -> bool:
        """True if its end has been seen: nothing that it said is still read."""
        is_gone = self._world.workers.get((self.model, self.generation)) is not self
        return self.is_abandoned or is_gone

    def _forget(self) -> None:
        self._world.workers.pop((self.model, self.generation), None)

    def say(self, message: messages.WorkerMessage) -> None:
        if self.is_alive and self.is_linked:
            self.sent += 1
            self._up.send(lambda: self._hand_over(message))

    def _hand_over(self, message: messages.WorkerMessage) -> None:
        self.is_known = self.is_known or isinstance(message, messages.Hello)
        if not (self.is_broken or self._is_forgotten):
            self._report(events.WorkerSaid, message=message)

    def _say_garbage(self, *, is_other_version: bool = False) -> None:
        """Send what is no message: nothing more is read from it, and nothing said to it."""
        self.is_linked = False

        def report() -> None:
            self.is_broken = True
            if not self._is_forgotten:
                self._report(
                    events.WorkerBroke, detail="garbage", is_other_version=is_other_version
                )

        self._up.send(report)

    def _unlink(self) -> None:
        self.is_linked = False

        def report() -> None:
            if self.is_known and not self.is_abandoned:
                self._report(events.WorkerUnlinked)

        self._up.send(report)

    def die(self, code: int, message: str) -> None:
        """Say why it ends, and end."""
        self.say(messages.Dying(code=code, message=message))
        self.exit(code=code)

    def exit(self, *, code: int | None = None, signal: str = "") -> None:
        """End; what it had said is read before that is seen, if it left at all."""
        if not self.is_alive or self.is_frozen:
            return
        self.is_alive = False
        if signal:
            self._up.lose_end()
        if self.has_greeted and self.is_linked:
            self._unlink()

        def seen() -> None:
            self._forget()
            self._report(events.Exited, exit_code=code, signal_name=signal)

        # The kernel may take some time from an exit to its being seen.
        self._up.send(seen, more_s=self._dice.choice((0.0, 0.0, 0.01, 0.3, 3.0)))
