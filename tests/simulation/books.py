"""What the oracle knows of each model and each process, from what was said and from the plan."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto

from mlxsup.protocol.ids import Generation, ModelName, RequestKey
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.worker_messages import SetBudget
from mlxsup.supervisor.core.actions import WorkerSignal
from mlxsup.supervisor.core.events import Exited
from mlxsup.supervisor.core.settings import ModelSettings

from .asks import Ask
from .leases import Turn
from .suspicion import Says, Suspicion
from .worker import PlayedWorker

MACHINE_SHARE = 0.9
PERMANENT = (64, 65, 66, 69)
OWN_FAULTS = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP")


class Wanted(StrEnum):
    """What was asked for last."""

    UP = "up"
    DOWN = "down"
    GONE = "gone"


class Cause(StrEnum):
    """Why a process is being ended."""

    ASKED = "asked"
    STALL = "stall"
    BROKEN = "broken"
    VERSION = "version"
    TOO_LARGE = "too large"
    SWAP = "swap"


@dataclass(slots=True, kw_only=True, eq=False)
class Life:
    """One process.

    Attributes:
        worker: the truth about it.
        launch: what it was started with.
        pid: once the supervisor knows it.
        ready_at: when the supervisor read READY.
        stopped_serving_at: when it was first told to end.
        cause: why; None while it is not.
        is_restart: a restart was asked for meanwhile.
        told: what ended it: `Exit` or a signal, and when.
        given: requests that it holds as far as is known, by key, ended ones too.
        kept: keys of rows whose state it keeps for their return.
        keeps: whether it kept the state of the last row that was freed for a higher class.
        spoke_at: when it gave its first token.
        settled_at: when all its rows had gained a token, for the first time.
        was_given: whether it was given any request.
        progress_at, progress: of its load.
        works_since: when its engine was last heard of, if it has something to compute.
        turn: what it has to do with leases.
        budgets: what it was told that its rows may take: the latest that it is known to keep to,
            and those told since.
        is_giving_back: it was told to give back, and has not said since that it keeps to that.
        says_it_gave_back: it has said so since, and was not measured yet.
        gave_back_at: when it was first measured after it had said so, for the last time.
        rows_ended: how many of its rows have ended.
    """

    model: ModelName
    generation: Generation
    launch: LaunchSettings
    worker: PlayedWorker
    spawned_at: float
    is_after_crash: bool
    is_of_restart: bool = False
    pid: int | None = None
    has_greeted: bool = False
    ready_at: float | None = None
    stopped_serving_at: float | None = None
    cause: Cause | None = None
    is_restart: bool = False
    told: list[tuple[str, float]] = field(default_factory=list)
    unlinked_at: float | None = None
    broke_at: float | None = None
    given: dict[RequestKey, Ask] = field(default_factory=dict)
    kept: set[RequestKey] = field(default_factory=set)
    keeps: bool = True
    tokens_at_end: dict[RequestKey, int] = field(default_factory=dict)
    footprint: int = 0
    reported: int = 0
    announced: str = ""
    spoke_at: float | None = None
    settled_at: float | None = None
    was_given: bool = False
    progress_at: float = 0.0
    progress: tuple[str, float] = ("", 0.0)
    is_abandoned: bool = False
    hurried_at: float | None = None
    works_since: float | None = None
    granted: int = 0
    asked_back_at: float = -math.inf
    turn: Turn = field(default_factory=Turn)
    budgets: list[SetBudget] = field(default_factory=list)
    is_giving_back: bool = False
    says_it_gave_back: bool = False
    gave_back_at: float = -math.inf
    rows_ended: int = 0

    @property
    def most_bytes(self) -> int:
        """What its rows may take at the worst."""
        return max((one.rows_bytes for one in self.budgets), default=0)

    @property
    def serves(self) -> bool:
        """Whether it is READY and not being ended, as far as the supervisor can know."""
        return self.ready_at is not None and self.cause is None

    @property
    def kill_stage_at(self) -> float | None:
        """When it was first told SIGKILL."""
        return self.was_told(WorkerSignal.KILL)

    def held(self) -> list[tuple[int, int]]:
        """Prompt and delivered tokens of each request in its hands."""
        return [
            (ask.prompt.number, self.tokens_at_end.get(key, ask.tokens))
            for key, ask in self.given.items()
        ]

    def ended_by(self, exited: Exited | None) -> Cause | None:
        """Why it was ended; None if it ended by itself, even if a kill of a broken one crossed."""
        is_killed = exited is None or exited.signal_name == "SIGKILL"
        if self.cause is Cause.BROKEN and not is_killed and not self.is_restart:
            return None
        return self.cause

    def says(self, exited: Exited, machine_bytes: int) -> Says:
        """What its death says of the requests that it held."""
        match self.ended_by(exited):
            case Cause.STALL:
                return Says.ACCUSES if self.ready_at is not None else Says.NOTHING
            case Cause.BROKEN:
                return Says.NOTHING
            case Cause.ASKED | Cause.SWAP | Cause.VERSION | Cause.TOO_LARGE:
                return Says.ASKED
        if self.ready_at is None:
            return Says.NOTHING
        if exited.exit_code == 75:
            return Says.NO_MEMORY
        if exited.signal_name == "SIGKILL" and self.is_over_memory(machine_bytes):
            return Says.NO_MEMORY
        is_own = exited.exit_code in (70, 73, 76) or exited.signal_name in OWN_FAULTS
        return Says.ACCUSES if is_own else Says.NOTHING

    def is_over_memory(self, machine_bytes: int) -> bool:
        """Whether its last measure or beat was over its limit, or, if it has no limit, its last
        measure over a share of the machine."""
        if self.launch.memory_limit_bytes:
            return self.launch.memory_limit_bytes < max(self.footprint, self.reported)
        return 0 < machine_bytes * MACHINE_SHARE < self.footprint

    def was_told(self, what: str | WorkerSignal) -> float | None:
        """When it was first told so."""
        return next((when for one, when in self.told if one == what), None)


class UpFor(Enum):
    """What a model is wanted for."""

    SOMEBODY = auto()
    FILE = auto()
    """The configuration says so: what cannot be loaded now waits on, even if nobody does."""
    NEXT_TURN = auto()
    """It has made room, and is wanted as long as somebody waits for it."""


@dataclass(slots=True, kw_only=True, eq=False)
class Book:
    """One model.

    Attributes:
        entry: of the configuration that counts.
        wanted: up, down or gone.
        is_by_user: whether a person wants it down.
        life: its process until the exit is seen; one given up, too.
        queue: requests that wait, those that had been dispatched before included.
        paused: requests that somebody has paused.
        failed: why it is FAILED; empty if it is not.
        drain_until: when what runs is cut off.
        crashes: times of those that count, the latest last.
        in_a_row: crashes since it was last stable.
        outages_in_a_row: attempts at its download that others kept from succeeding.
        retry: the earliest and the latest time of the next start; None: as soon as it is its turn.
        retry_at: when the supervisor has said, after a crash, that the model will return; None once
            that time has come: it then waits for its turn.
        is_after_crash: the next start follows a crash.
        is_restarting: a restart was asked for, and it has not been READY since.
        engine_s, repeated_s: what its steps have cost, by who pays.
        received: engine seconds over weight, by account.
        latest: the account that was dispatched last.
        freed: rows that have left in this event for requests of a higher class.
        cost_s: what a request is expected to cost; None before any has come to its end.
        held: what its process holds of the memory budget.
        callers: commands that wait for its load.
        waits_since: since when it has been waiting for its load while somebody wants it.
        due_since: since when nothing has forbidden that others are swapped out for it.
        swaps_until: when its rows must have left for another model; None if they need not leave.
        swaps: how often it had to make room.
        up_for: what it was last wanted for.
        keep_alive_s: how long it stays while it is idle, as was said last; None: as configured.
        last_exit: how its latest process ended, in a word or two; empty if none has.
        last_code: the exit code of its latest process; None if that had none.
    """

    entry: ModelSettings
    wanted: Wanted = Wanted.DOWN
    is_by_user: bool = True
    life: Life | None = None
    queue: list[Ask] = field(default_factory=list)
    paused: list[Ask] = field(default_factory=list)
    failed: str = ""
    drain_until: float | None = None
    crashes: deque[float] = field(default_factory=deque)
    in_a_row: int = 0
    outages_in_a_row: int = 0
    retry: tuple[float, float] | None = None
    retry_at: float | None = None
    is_after_crash: bool = False
    is_restarting: bool = False
    last_load_error: str = ""
    batching: dict[str, str] | None = None
    suspicion: Suspicion = field(default_factory=Suspicion)
    busy_at: float = 0.0
    engine_s: float = 0.0
    repeated_s: float = 0.0
    received: dict[str, float] = field(default_factory=dict)
    latest: str = ""
    freed: int = 0
    cost_s: float | None = None
    held: int = 0
    callers: set[tuple[bytes, str]] = field(default_factory=set)
    waits_since: float | None = None
    due_since: float | None = None
    swaps_until: float | None = None
    swaps: int = 0
    up_for: UpFor = UpFor.SOMEBODY
    keep_alive_s: float | None = None
    last_exit: str = ""
    last_code: int | None = None

    @property
    def name(self) -> ModelName:
        """Its name."""
        return self.entry.name

    @property
    def serves(self) -> bool:
        """Whether requests may be dispatched to its process."""
        life = self.life
        is_up = self.wanted is Wanted.UP and self.drain_until is None and self.swaps_until is None
        return is_up and life is not None and life.serves and life.broke_at is None

    @property
    def finishes(self) -> bool:
        """Whether it goes down and may still be given answers that were paused."""
        is_going = self.wanted is not Wanted.UP and self.drain_until is not None
        life = self.life
        return is_going and life is not None and life.serves and life.broke_at is None

    @property
    def waiting(self) -> list[Ask]:
        """Those who wait, in the line or outside it."""
        return [*self.queue, *self.paused]

    @property
    def rows(self) -> int:
        """How many requests may be given at once."""
        rows = (self.life.launch if self.life else self.entry.launch).max_concurrency
        return rows if self.suspicion.rows is None else min(rows, self.suspicion.rows)

    @property
    def is_resting(self) -> bool:
        """Whether nothing happens until somebody asks, or until a back-off is over."""
        return bool(self.failed) or self.retry_at is not None

    def clean(self) -> None:
        """Somebody asked for a start: no crash is held against it."""
        self.crashes.clear()
        self.in_a_row = 0
        self.outages_in_a_row = 0
        self.last_load_error = ""

    def crashed(self, now: float) -> tuple[float, float] | None:
        """Counts a crash.

        Returns:
            The shortest and the longest delay of the next start; None if it is FAILED now.
        """
        policy = self.entry.restart
        self.crashes.append(now)
        recent = [when for when in self.crashes if when > now - policy.window_s]
        if len(recent) > policy.max_restarts:
            return None
        self.in_a_row += 1
        if self.in_a_row == 1:
            return 0.0, 0.0
        return self._delays_s(self.in_a_row - 2)

    def kept_out(self) -> tuple[float, float]:
        """Counts an attempt that others kept from succeeding, which is never the last one.

        Returns:
            The shortest and the longest delay of the next attempt.
        """
        self.outages_in_a_row += 1
        return self._delays_s(self.outages_in_a_row - 1)

    def _delays_s(self, doublings: int) -> tuple[float, float]:
        policy = self.entry.restart
        longest = min(policy.backoff_initial_s * 2**doublings, policy.backoff_max_s)
        return longest / 2, longest
