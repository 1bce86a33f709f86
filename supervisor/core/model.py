"""The core's record of one model besides its life: requests, callers, what it reported.

How long it stays loaded while idle belongs to the model and not to the request, so the last request
that says so decides. It does not outlive an unload: a model that went because of a 0 would go again
as soon as a person has loaded it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from mlxsup.protocol.cache_cost import GROWTH_TOKENS
from mlxsup.protocol.ids import Caller, ModelName, RequestKey
from mlxsup.protocol.states import HAS_PROCESS, SERVES, State, WaitReason, Wanted, WorkerPhase
from mlxsup.protocol.worker_messages import Heartbeat, SetBudget
from mlxsup.protocol.worker_messages import Ready as ReadyMessage

from .accounting import UNKNOWN_COST_S, DeviceTime, Meter
from .kv_budget import Part, RowBudget
from .life import Lack, Life, Pending, Ready
from .poison import Blame, Held
from .requests import Queue, Request, Stage
from .watchdog import Watch

FOR_EVER = -1.0
"""The `keep_alive` of a request whose model is not to be unloaded as idle."""

MACHINE_SHARE = 0.9
"""A process that held more than this share of the machine's memory was killed for that."""

GIVING_BACK_S = 0.9
"""So long a worker has to give back what it keeps for reuse before models are evicted instead; a
little less than the time from one measurement to the next."""

ASK_AGAIN_S = 10.0
"""A worker is not asked to give back more often than that."""

RATE_WINDOW_S = 5.0

SHORTEST_FREE_S = 0.1


WATCHED = SERVES | {State.LOADING}
"""States in which a process has to give signs of life."""


RESIDENCY_LOADS = 3.0
"""A turn lasts at least this many times what it costs: the load and the prefill that follows."""


@dataclass(slots=True, kw_only=True)
class Residency:
    """One turn of a model, from READY to the end of its process, which a swap may end.

    It begins with the first tokens and not with READY: a slow machine would otherwise spend its
    turns on reading prompts. Three times the load bounds the time that is lost to loading to a
    quarter.

    The time that it may stay begins when each row that was dispatched at first has gained a token
    or ended: what a turn costs before that is of no use.

    Attributes:
        ready_at: when it became READY.
        tokens_before: how many tokens the model had delivered before.
        began_at: when the time that it may stay began; None: not yet.
        is_open: whether the turn has delivered no token, or its time has not begun.
    """

    ready_at: float
    tokens_before: int
    began_at: float | None = None
    is_open: bool = True
    # Bounded by the rows of the engine. What each had been sent when it was dispatched.
    _awaited: dict[RequestKey, int] = field(default_factory=dict)

    def look(self, running: Mapping[RequestKey, Request], tokens: int, now: float) -> bool:
        """Look at rows that were dispatched, have gained tokens or have ended.

        Args:
            tokens: how many tokens the model has delivered, in all of its turns.

        Returns:
            Whether the time that the model may stay has begun with that.
        """
        if not self.is_open:
            return False
        self._awaited = {
            key: sent
            for key, sent in self._awaited.items()
            if key in running and running[key].tokens_sent == sent
        }
        has_delivered = tokens > self.tokens_before
        if not (has_delivered or self._awaited):  # at first, and if all those ended without a token
            self._awaited = {key: request.tokens_sent for key, request in running.items()}
        if self._awaited:
            self.began_at = None
            return False
        self.is_open = not has_delivered
        if self.began_at is not None:
            return False
        self.began_at = now
        return True

    def ends_at(self, *, load_s: float, min_residency_s: float) -> float:
        """Return from when on a swap may end the turn; infinite while its time has not begun.

        Args:
            min_residency_s: how long every turn may last.
        """
        if self.began_at is None:
            return math.inf
        cost_s = load_s + self.began_at - self.ready_at
        return self.began_at + max(min_residency_s, RESIDENCY_LOADS * cost_s)


@dataclass(slots=True, kw_only=True)
class Process:
    """The live process of a model: what it has said, and how it was measured.

    Attributes:
        ready: what it announced with READY; None before.
        watch: what its signs of life say.
        residency: its turn, from READY to its end; None while there is none.
        dying: its message before an exit that was not asked for.
        asked_back_at: when it was last asked to give back what it keeps for reuse.
        rates: how many tokens there were at which times.
    """

    ready: ReadyMessage | None = None
    heartbeat: Heartbeat | None = None
    watch: Watch | None = None
    residency: Residency | None = None
    dying: str = ""
    steps: int = 0
    asked_back_at: float = -math.inf
    rates: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=16))

    @property
    def is_unlinked(self) -> bool:
        """True if it cannot be reached."""
        return self.watch is not None and self.watch.unlinked_at is not None

    @property
    def doing(self) -> Heartbeat | None:
        """Return the latest beat, if it describes what the owner thread is doing: one from the load
        says nothing about a worker that has said READY since."""
        beat = self.heartbeat
        if beat and beat.phase is WorkerPhase.LOADING and self.ready:
            return None
        return beat

    @property
    def reported_bytes(self) -> int:
        """Return what it last said that MLX holds."""
        beat = self.heartbeat
        return beat.active_bytes + beat.cache_bytes if beat else 0

    @property
    def reusable_bytes(self) -> int:
        """Return what it said last that it keeps for reuse, and could give back."""
        beat = self.heartbeat
        return beat.cache_bytes + beat.prefix_bytes if beat else 0

    def is_giving_back(self, now: float) -> bool:
        """True if it may still be giving back what it was asked for."""
        return now < self.asked_back_at + GIVING_BACK_S

    def tokens_per_s(self, now: float) -> float:
        """Return its tokens per second over the last seconds."""
        samples = [s for s in self.rates if s[0] >= now - RATE_WINDOW_S]
        if len(samples) < 2 or samples[-1][0] <= samples[0][0]:
            return 0.0
        return (samples[-1][1] - samples[0][1]) / (samples[-1][0] - samples[0][0])


@dataclass(slots=True, kw_only=True)
class Batch:
    """The rows of the live process.

    Attributes:
        running: requests that were dispatched to it.
        leaving: requests already answered whose row has yet to leave (D11), by key.
        kept: keys of paused requests whose state it keeps.
        keeps_states: whether it kept the state of the last row that gave way to a request of a
            higher class.
        freed: rows that have just left for requests of a higher class; none between events.
        yields_at: when the next row may be asked to leave for such a request that waits, in
            monotonic seconds; None if none does, or no row may.
        lets_newcomers_in: whether, while suspects take turns, new requests start before the next.
        only_waits: whether it computes nothing until it gets the lease that it asked for.
        budget: what its rows may take; None while nothing limits them.
        ended: how many of its rows have ended.
        held_back: the first in line, if it waits until there is memory for its row.
    """

    running: dict[RequestKey, Request] = field(default_factory=dict)
    leaving: dict[RequestKey, Held] = field(default_factory=dict)
    kept: set[RequestKey] = field(default_factory=set)
    keeps_states: bool = True
    freed: int = 0
    yields_at: float | None = None
    lets_newcomers_in: bool = True
    only_waits: bool = False
    budget: RowBudget | None = None
    ended: int = 0
    held_back: RequestKey | None = None

    @property
    def held(self) -> list[Held]:
        """Return the requests that the worker holds: dispatched, and not ended there."""
        return [*(request.held for request in self.running.values()), *self.leaving.values()]

    @property
    def rows(self) -> int:
        """Return how many rows are taken; leaving ones still count."""
        return len(self.running) + len(self.leaving)

    @property
    def computes(self) -> bool:
        """True if the engine holds a request and does not wait for a lease."""
        return self.rows > 0 and not self.only_waits


@dataclass(slots=True, kw_only=True)
class Totals:
    """The sums of a model since the supervisor's start.

    Attributes:
        drafted, draft_accepted: how many tokens its rows have guessed, and how many of them they
            drew.
    """

    tokens: int = 0
    drafted: int = 0
    draft_accepted: int = 0


@dataclass(slots=True, kw_only=True)
class Model:
    """One model.

    Attributes:
        name: as the configuration has it.
        meter: the engine seconds that its steps have cost.
        paused: requests that a person has paused; they wait outside the queue.
        up_callers, down_callers: who waits for READY, and who for STOPPED.
        keep_alive_s: how long it stays loaded while idle, as its latest request or load has it; -1:
            for ever; None: as configured.
        idle_since: when its last request ended, it was last asked to be loaded, or became READY.
        load_s: how long its latest load took, from the spawn to READY.
        told_waiting: what all who wait were last notified of: the reason, and the load's progress.
    """

    name: ModelName
    life: Life
    queue: Queue
    meter: Meter = field(init=False)
    paused: dict[RequestKey, Request] = field(default_factory=dict)
    process: Process = field(default_factory=Process)
    batch: Batch = field(default_factory=Batch)
    totals: Totals = field(default_factory=Totals)
    blame: Blame = field(default_factory=Blame)
    up_callers: list[Caller] = field(default_factory=list)
    down_callers: list[Caller] = field(default_factory=list)
    keep_alive_s: float | None = None
    idle_since: float = math.inf
    load_s: float = 0.0
    told_waiting: tuple[WaitReason, str, int] | None = None

    def __post_init__(self) -> None:
        self.meter = Meter(self.queue.counters)

    @property
    def has_room(self) -> bool:
        """True if a row is free and the worker can be reached; leaving rows still count."""
        return not self.process.is_unlinked and self.batch.rows < self.row_limit

    def line_up(self, request: Request, now: float) -> None:
        """Queue a request that neither waits nor runs: a new one, or one that was paused.

        What the worker has accepted goes before new ones; everything else is as new. Its account
        may have had nothing here for a while.
        """
        self.meter.settle()
        waiting, account = self.queue.accounts, request.account
        running = {other.account for other in self.batch.running.values()}
        if account not in waiting and account not in running:
            self.queue.counters.join(account, {*waiting, *running})
        self.line_up_again(request, now)

    def line_up_again(self, request: Request, now: float) -> None:
        """Queue a request whose row has left: as new, if it had not been accepted; what was
        accepted has had its turn, and stands before new ones even if it has not begun."""
        if request.acceptance is None:
            self.queue.join(request, now)
        else:
            self.queue.rejoin([request], now)

    @property
    def serves_queue(self) -> bool:
        """True if requests of its queue may be dispatched; while it goes down, only answers that
        were paused are left there."""
        if self.life.state is State.DRAINING:
            return self.life.wanted is not Wanted.UP
        return self.life.state is State.READY

    @property
    def has_drained(self) -> bool:
        """True if nothing is left to finish before its process ends."""
        return not (self.batch.rows or (self.queue and self.serves_queue))

    @property
    def can_start(self) -> bool:
        """True if a request that comes now, of an account that may run it, would be dispatched at
        once, unless it is a suspect."""
        if self.life.state is not State.READY or not self.has_room:
            return False
        if self.queue.first() is not None:
            return False
        return not any(self.blame.is_due(one) for one in self.batch.held)

    @property
    def row_limit(self) -> int:
        """Return how many requests may run at once."""
        limit = self.life.launch.max_concurrency
        return limit if self.blame.rows is None else min(limit, self.blame.rows)

    @property
    def lack(self) -> Lack | None:
        """Return the memory that it waits for; None if it does not."""
        phase = self.life.phase
        return phase.lack if isinstance(phase, Pending) else None

    @property
    def on_turn(self) -> Request | None:
        """Return the suspect that runs alone because its turn is due; None if none does."""
        if len(self.batch.held) > 1:
            return None
        is_due = self.blame.is_due
        return next((r for r in self.batch.running.values() if is_due(r.held)), None)

    @property
    def is_idle(self) -> bool:
        """True if nothing is waiting, paused or running."""
        return not (self.queue or self.paused or self.batch.rows)

    @property
    def open_requests(self) -> list[Request]:
        """Return those that run, wait to continue, or are paused."""
        return [*self.batch.running.values(), *self.queue.again, *self.paused.values()]

    @property
    def has_open_answers(self) -> bool:
        """True if it has answers that a worker has accepted, or is about to."""
        if self.batch.running:
            return True
        return any(one.acceptance is not None for one in self.open_requests)

    @property
    def stays_because(self) -> str:
        """Return what has changed in its files, if no swap may end its process for that: no other
        one could continue its open answers. Empty if it need not stay."""
        change = self.life.files.change
        return change if change and self.has_open_answers else ""

    def may_have_been_restored(self, now: float) -> bool:
        """True if it is time to look again at files that have kept it from being swapped out; they
        are looked at only when a swap depends on it."""
        is_ready = isinstance(self.life.phase, Ready)
        return is_ready and bool(self.stays_because) and self.life.files.may_be_asked(now)

    def may_leave(self, request: Request) -> bool:
        """True if the row of a request may leave the batch and continue later."""
        return request.may_resume and not self.life.launch.deterministic

    @property
    def longest_stream(self) -> int:
        """Return the tokens of its longest answer that has begun, and a step of growth; 0: none
        has."""
        begun = [one.length for one in self.open_requests if one.acceptance is not None]
        return max(begun, default=-GROWTH_TOKENS) + GROWTH_TOKENS

    @property
    def bytes_to_load(self) -> int:
        """Return what must be free before it is loaded, or loaded again, with a row for its longest
        answer."""
        return self.life.needed_for(self.longest_stream)

    @property
    def is_asked_for(self) -> bool:
        """True if a request or a command waits for it to be loaded."""
        return bool(self.up_callers or self.queue)

    @property
    def waits_for_load(self) -> bool:
        """True if it waits for a turn or for memory, and not for its files."""
        return self.life.state is State.PENDING and self.life.settings.download is None

    @property
    def is_about_to_load(self) -> bool:
        """True if it waits for a load that a request, a command, or no lack of memory calls for."""
        return self.waits_for_load and (self.lack is None or self.is_asked_for)

    @property
    def measured_bytes(self) -> int:
        """Return what its process holds of the memory that the budget is for: with CUDA, the
        device's."""
        if self.process.ready is not None and self.process.ready.backend == "cuda":
            return self.process.reported_bytes
        return max(self.life.footprint_bytes, self.process.reported_bytes)

    @property
    def held_bytes(self) -> int:
        """Return what its process holds of the machine's memory. One that was not measured yet, and
        one whose memory is being freed, counts with all that is reserved for it until
        it is gone."""
        if not self.life.has_process:
            return 0
        is_measured = self.life.footprint_bytes > 0 and self.life.state is not State.STOPPING
        return self.measured_bytes if is_measured else self.life.reserved_bytes

    def is_over_memory(self, machine_bytes: int) -> bool:
        """True if its worker last held more memory than its limit or, if it has none, so much of
        the machine's that a SIGKILL must come from the system.

        Args:
            machine_bytes: memory of the machine; 0: it was not measured.
        """
        limit = self.life.launch.memory_limit_bytes or 0
        if not limit:
            return 0 < machine_bytes * MACHINE_SHARE < self.life.footprint_bytes
        return limit < max(self.life.footprint_bytes, self.process.reported_bytes)

    # ------------------------------------------------------------ what its rows may take

    @property
    def has_row_budget(self) -> bool:
        """True if anything is known of what the rows of its live process take."""
        ready = self.process.ready
        return ready is not None and bool(ready.cache_layers) and self.life.need is not None

    @property
    def bare_bytes(self) -> int:
        """Return what the live process takes without any row."""
        ready, need = self.process.ready, self.life.need
        assert ready is not None
        assert need is not None
        own_bytes = need.own.size_bytes if ready.own_bytes is None else ready.own_bytes
        return ready.active_bytes + own_bytes

    @property
    def fixed_bytes(self) -> int:
        """Return what the live process takes without any row, and what is reserved for it besides
        because others before it ran out of memory."""
        return self.bare_bytes + self.life.raise_bytes

    @property
    def planned_bytes(self) -> int:
        """Return what the live process was to hold at most, by what it was told; while it loads, or
        if its rows have no budget, what it was started with."""
        if self.batch.budget is None or not self.has_row_budget:
            return self.life.granted_bytes
        return self.fixed_bytes + self.batch.budget.most_bytes

    def adopt(self, part: Part) -> SetBudget | None:
        """Take its part of the division; return what the worker must be told."""
        if self.batch.budget is None:
            self.batch.budget = RowBudget()
        budget = self.batch.budget
        budget.could_bytes = part.could_bytes
        self.life.raise_bytes = part.raise_bytes
        if part.size_bytes is None:
            return None
        is_more = part.size_bytes > budget.size_bytes or not budget.number
        message = budget.tell(part.size_bytes, gives_back=part.gives_back)
        if is_more:
            self._reserve(budget)
        return message

    def keeps_to(self, number: int) -> bool:
        """Note that the worker keeps to the budget of this number; return whether that is news and
        changes what is reserved."""
        budget = self.batch.budget
        if budget is None or number != budget.awaited or not budget.was_confirmed():
            return False
        if self.has_row_budget:
            self._reserve(budget)
        return True

    def was_measured(self, now: float) -> None:
        """Note that the process was measured: that may change what is reserved, and what it may
        give back."""
        budget = self.batch.budget
        if budget is None or not self.has_row_budget:
            is_serving = self.life.state in SERVES
            may_shrink = is_serving and now < self.process.asked_back_at + ASK_AGAIN_S
            self.life.holds(self.measured_bytes, may_shrink=may_shrink)
            return
        budget.was_measured(now)
        self._reserve(budget)

    def _reserve(self, budget: RowBudget) -> None:
        """Derive what is reserved from what the rows may take, and what the process holds."""
        self.life.reserved_bytes = max(
            self.fixed_bytes + budget.most_bytes,
            self.measured_bytes,
            self.life.pinned_bytes,
        )

    # ------------------------------------------------------------ when something is due

    def deadline(self) -> float | None:
        """Return when something is due for this model or its queue; its process has its own."""
        times = [self.state_deadline(), self.queue.ages_at, self.batch.yields_at]
        if self.queue:
            times.append(self.blame.expires_at)
        return min((when for when in times if when is not None), default=None)

    @property
    def step_timeout_s(self) -> float | None:
        """Return the limit of a step; None while no step can be under way."""
        is_serving = self.life.state in SERVES
        return self.life.launch.step_timeout_s if is_serving else None

    def state_deadline(self) -> float | None:
        """Return the deadline of its state, or its idle unload."""
        if isinstance(self.life.phase, Ready) and self.idle_limit_s is not None and self.is_idle:
            return self.idle_since + self.idle_limit_s
        lack = self.lack
        return self.life.phase.due_at if lack is None else lack.wait.until

    @property
    def idle_limit_s(self) -> float | None:
        """Return the seconds that it stays after it has become idle; None: for ever."""
        if self.keep_alive_s is None:
            return self.life.settings.idle_unload_s or None
        return None if self.keep_alive_s == FOR_EVER else self.keep_alive_s

    def unloads_in_s(self, now: float) -> float | None:
        """Return in how many seconds it goes as idle, if nothing is asked of it; None:
        it does not."""
        if not isinstance(self.life.phase, Ready) or self.idle_limit_s is None:
            return None
        since = self.idle_since if self.is_idle else now
        return max(0.0, since + self.idle_limit_s - now)

    def has_settled_in(self, now: float) -> bool:
        """Look at rows that have come, gained tokens or gone; return whether the time that it may
        stay has begun with that (`Residency`)."""
        residency = self.process.residency
        if residency is None:
            return False
        return residency.look(self.batch.running, self.totals.tokens, now)

    def learn(self, ready: ReadyMessage, device: DeviceTime, now: float) -> None:
        """Take what a worker says at the end of a load, with which a turn begins.

        Args:
            device: that of its backend.
        """
        self.process.ready = ready
        self.meter.device = device
        self.process.residency = Residency(ready_at=now, tokens_before=self.totals.tokens)
        self.idle_since, self.load_s = now, now - self.life.phase.since
        if self.life.launch.max_concurrency > 1:  # with one row there is nothing to find out
            self.life.known_batching = {
                "fingerprint": ready.fingerprint,
                "batching": ready.batching.value,
                "reason": ready.batching_reason,
            }

    def next_free_s(self) -> float:
        """Return how long until a row should be free: what requests cost the engine on average,
        because those that run at the same time share its seconds.

        Those that run cost what they have cost at least. If none has ever ended, they are expected
        to take as long again.
        """
        self.meter.settle()
        spent_s = [request.cost.engine_s for request in self.batch.running.values()]
        cost_s = self.queue.counters.cost_s
        if cost_s is None:
            return max(UNKNOWN_COST_S, sum(spent_s))
        return max(SHORTEST_FREE_S, cost_s, *spent_s)

    def forget_process(self) -> None:
        """Forget what was only true of the process, which is gone."""
        self.process = Process()
        self.batch = Batch()
        for request in (*self.queue, *self.paused.values()):
            request.run.left_short_at = None
        if self.life.pid is None:
            self.life.footprint_bytes = 0

    def check_invariants(self) -> None:
        """Raise AssertionError if the parts disagree."""
        state = self.life.state
        limit = self.life.launch.max_concurrency
        assert all(r.has_row for r in self.batch.running.values())
        assert all(r.stage is Stage.PAUSED for r in self.paused.values())
        assert all(key in self.paused or key in self.queue for key in self.batch.kept)
        assert not self.batch.leaving.keys() & self.batch.running.keys()
        assert self.batch.freed == 0, f"{self.name} has freed a row that no request got"
        if state not in HAS_PROCESS:
            assert not self.batch.running, f"{self.name} runs requests in {state}"
            assert not self.batch.leaving, f"{self.name} has leaving rows in {state}"
            assert not self.batch.kept, f"{self.name} has kept rows in {state}"
            assert not self.down_callers, f"{self.name} lets callers of an unload wait in {state}"
            assert (self.life.pid is None) != self.life.has_process
            assert (self.life.launched is None) != self.life.has_process
        if state in (State.LOADING, State.READY):
            assert not self.life.is_outdated, f"{self.name} keeps a process of an old entry"
        if state in SERVES:
            assert self.batch.rows <= limit
        if state in (State.STOPPED, State.FAILED):
            assert not self.queue, f"{self.name} lets requests wait in {state}"
            assert not self.paused, f"{self.name} has paused requests in {state}"
            assert not self.up_callers, f"{self.name} lets callers wait in {state}"
