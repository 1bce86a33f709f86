"""The oracle's books of requests, processes and models, from what was said and from the plan."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import TYPE_CHECKING

from mlxsup.protocol.client_messages import Done, Failed, Generate
from mlxsup.protocol.ids import Generation, ModelName, RequestId, RequestKey
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.states import Priority
from mlxsup.protocol.worker_messages import Acceptance, SetBudget
from mlxsup.supervisor.core.actions import WorkerSignal
from mlxsup.supervisor.core.events import Exited
from mlxsup.supervisor.core.settings import ModelSettings

from .plan import Prompt

if TYPE_CHECKING:
    from .worker import PlayedWorker


# ---------------------------------------------------------------- suspicion

HOUR_S = 3600.0
TOKENS_PAST = 3
TIME_PAST_S = 0.015
PLACES = 8
BROKEN_AFTER = 3


class Says(StrEnum):
    """What a death says of the requests that the process held."""

    NOTHING = "nothing"
    ASKED = "it was asked for"
    ACCUSES = "accuses"
    NO_MEMORY = "out of memory"


@dataclass(slots=True, kw_only=True)
class Suspect:
    """A prompt that was held in accusing deaths.

    Attributes:
        since: the latest of them.
        places: tokens delivered at each, those left out that it has come past.
        takes_turns: whether it has to pass them alone.
        gains_since: the first token near one of them, in this life.
    """

    since: float
    places: list[int]
    takes_turns: bool = False
    gains_since: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a death leads to.

    Attributes:
        says: what it was judged by.
        culprit: the prompt that is quarantined.
        is_alone: there was too little memory for the one request that was held.
        is_broken: three quarantines in a row: the engine itself.
    """

    says: Says
    culprit: int | None = None
    is_alone: bool = False
    is_broken: bool = False


@dataclass(slots=True)
class Suspicion:
    """The account of one model; prompts by their numbers."""

    suspects: dict[int, Suspect] = field(default_factory=dict)
    quarantined: dict[int, float] = field(default_factory=dict)
    convicts: list[int] = field(default_factory=list)
    rows: int | None = None
    rows_until: float = 0.0

    def died(self, says: Says, held: Sequence[tuple[int, int]], now: float) -> Finding:
        """A process has died with these in its hands: prompt and tokens delivered of each."""
        self.forget(now)
        for suspect in self.suspects.values():
            suspect.gains_since = None
        if says is Says.NO_MEMORY and held:
            if len(held) == 1:
                return Finding(says=says, is_alone=True)
            self.rows, self.rows_until = len(held) // 2, now + HOUR_S
            return Finding(says=says)
        if says is not Says.ACCUSES or not held:
            return Finding(says=says)
        [first, *others] = held
        if not others and self.takes_turn(first[0]):
            return self._convict(first[0], now)
        is_second = any(number in self.suspects for number, _ in held)
        for number in dict(held):
            places = sorted({tokens for one, tokens in held if one == number})
            known = self.suspects.get(number)
            ahead = [p for p in known.places if p > max(places)] if known else []
            self.suspects[number] = Suspect(since=now, places=[*ahead, *places][-PLACES:])
        if is_second:
            for suspect in self.suspects.values():
                suspect.takes_turns = bool(suspect.places)
        return Finding(says=says)

    def _convict(self, number: int, now: float) -> Finding:
        del self.suspects[number]
        self.convicts.append(number)
        if len(self.convicts) < BROKEN_AFTER:
            self.quarantined[number] = now + HOUR_S
            return Finding(says=Says.ACCUSES, culprit=number)
        for one in self.convicts:
            self.quarantined.pop(one, None)
        self.convicts.clear()
        return Finding(says=Says.ACCUSES, is_broken=True)

    def gained(self, number: int, tokens: int, now: float) -> None:
        """A request has gained tokens."""
        suspect = self.suspects.get(number)
        if suspect is None or not suspect.takes_turns:
            return
        if suspect.gains_since is None:
            suspect.gains_since = now
        ahead = [place for place in suspect.places if tokens < place + TOKENS_PAST]
        if ahead != suspect.places and now - suspect.gains_since >= TIME_PAST_S:
            self.convicts.clear()
            suspect.places, suspect.gains_since = ahead, None
            suspect.takes_turns = bool(ahead)

    def completed(self, number: int) -> None:
        """It came to its own end: it is innocent, and the engine is not broken."""
        self.suspects.pop(number, None)
        self.convicts.clear()

    def forget(self, now: float) -> None:
        """What is an hour old."""
        for number in [n for n, one in self.suspects.items() if now - one.since >= HOUR_S]:
            del self.suspects[number]
        for number in [n for n, until in self.quarantined.items() if now >= until]:
            del self.quarantined[number]
        if now >= self.rows_until:
            self.rows = None

    def lift(self) -> None:
        """Somebody asked for a fresh start."""
        self.rows = None
        self.suspects.clear()
        self.quarantined.clear()
        self.convicts.clear()

    def is_there(self, number: int, tokens: int) -> bool:
        """Whether a prompt has to run alone now: its answer is as long as at a crash."""
        suspect = self.suspects.get(number)
        if suspect is None or not suspect.takes_turns:
            return False
        return any(place <= tokens for place in suspect.places)

    def takes_turn(self, number: int) -> bool:
        """Whether a prompt has to run alone."""
        suspect = self.suspects.get(number)
        return suspect is not None and suspect.takes_turns

    @property
    def turns_are_taken(self) -> bool:
        """Whether anybody has to."""
        return any(suspect.takes_turns for suspect in self.suspects.values())


# ---------------------------------------------------------------- asks


class Place(StrEnum):
    """Where a request stands."""

    SENT = "sent"
    """On its way to the supervisor, or refused there."""
    LINE = "line"
    PAUSED = "paused"
    """Outside the line, until somebody resumes it."""
    GIVEN = "given"
    """Dispatched to the process that lives now."""
    ENDED = "ended"


@dataclass(slots=True, kw_only=True, eq=False)
class Ask:
    """One request, from its client's words to its end.

    Attributes:
        connection, id, model, prompt: what was asked, by whom, of whom.
        client, priority: on whose behalf it asks, and how urgently, as the client said.
        may_resume, wants_notices: as the client said.
        queue_s, first_token_s, total_s: its own limits as the client said them; None: not said.
        number: its place in the order of admission.
        arrived_at: when the supervisor read it.
        placed_at: when it came into the line, or came back.
        queue_until, first_token_until, until: when each limit is over; None for none.
        key: the supervisor's name for it, as its first dispatch tells.
        started_at: of the latest dispatch without an acceptance.
        acceptance: the first that the supervisor read.
        sent: packed tokens that the supervisor has sent to its client.
        first_token_at, cached, warnings: as the worker said with the first token.
        deaths: in a row, without a token and without evidence.
        shortages: of memory, while its process held nobody else.
        resumed: how many times it resumed after a death.
        is_interrupted: its process died, and no other has resumed it yet.
        is_yielding: asked to leave the batch, and to come back by itself.
        is_pausing: somebody wants it paused, and its row has yet to leave.
        is_paused: its row has left, and has said nothing since.
        is_by_hand: whether a person, and not a turn, was the last to ask for that.
        is_for_class: whether it was last asked to leave for a request of a higher class.
        is_for_memory: whether its row last left because there was no memory for it.
        is_for_room: whether it was last asked to leave to make room for one of a higher class.
        is_unread: whether its row left for want of memory before anything of it was read: it waits
            as if it were new.
        is_stranded: whether its row has left although its answer must run through.
        short_at: how many rows of its process had ended by then; None once it has one again.
        given_at: when it was last dispatched.
        gains_since: when its row said something for the first time since then.
        prefill_s: as the worker said with the first token.
        paused: how many times it continued after that.
        paused_at, paused_s: since when it waits for that, and how long it has before.
        passed_over: turns of others that came before it while it was the oldest new one.
        is_again: it had been dispatched before.
        account: on whose behalf it is, as the supervisor must see it.
        rank: its class; 0 for interactive.
        standing: the class in which it was dispatched.
        waits_since, waited_s: when it last began to wait, and how long it had waited before.
        engine_s: what its steps have cost.
        read: places of its prompt that some process has read.
    """

    connection: bytes
    id: str
    model: ModelName
    prompt: Prompt
    client: str | None = None
    priority: Priority | None = None
    may_resume: bool = True
    wants_notices: bool = False
    queue_s: float | None = None
    first_token_s: float | None = None
    total_s: float | None = None
    place: Place = Place.SENT
    number: int = 0
    arrived_at: float = 0.0
    ended_at: float = 0.0
    placed_at: float = 0.0
    queue_until: float | None = None
    first_token_until: float | None = None
    until: float | None = None
    key: RequestKey | None = None
    started_at: float = 0.0
    acceptance: Acceptance | None = None
    sent: bytearray = field(default_factory=bytearray)
    first_token_at: float | None = None
    cached: int = 0
    warnings: list[str] = field(default_factory=list)
    deaths: int = 0
    shortages: int = 0
    resumed: int = 0
    is_interrupted: bool = False
    is_yielding: bool = False
    is_pausing: bool = False
    is_paused: bool = False
    is_by_hand: bool = False
    is_for_class: bool = False
    is_for_memory: bool = False
    is_for_room: bool = False
    is_unread: bool = False
    is_stranded: bool = False
    short_at: int | None = None
    given_at: float = 0.0
    gains_since: float | None = None
    prefill_s: float = 0.0
    paused: int = 0
    paused_at: float | None = None
    paused_s: float = 0.0
    is_again: bool = False
    passed_over: int = 0
    account: str = ""
    rank: int = 1
    standing: int = 1
    waits_since: float = 0.0
    waited_s: float = 0.0
    engine_s: float = 0.0
    read: set[int] = field(default_factory=set)
    end: Done | Failed | None = None

    def __str__(self) -> str:
        return f"{self.connection.decode()}/{self.id} of {self.model} ({self.place})"

    @property
    def is_open(self) -> bool:
        """Whether the supervisor owes it an end."""
        return self.place in (Place.LINE, Place.PAUSED, Place.GIVEN)

    @property
    def code(self) -> str:
        """What it failed with; empty if it did not."""
        return str(self.end.error["code"]) if isinstance(self.end, Failed) else ""

    @property
    def is_waiting(self) -> bool:
        """Whether it takes a place in the queue: not if its answer has begun, nor while somebody
        has paused it."""
        return self.place is Place.LINE and not self.has_begun

    @property
    def has_begun(self) -> bool:
        """Whether a worker has accepted it and had memory for its row since."""
        return self.acceptance is not None and not self.is_unread

    def ends_pause(self, now: float) -> None:
        """It is dispatched, or may be."""
        if self.paused_at is not None:
            self.paused_s += now - self.paused_at
            self.paused_at = None

    @property
    def tokens(self) -> int:
        """Sent to its client."""
        return len(self.sent) // 4

    def message(self) -> Generate:
        """What the client sends."""
        return Generate(
            id=RequestId(self.id),
            model=self.model,
            client=self.client,
            priority=self.priority,
            body=self.prompt.body,
            resume=self.may_resume,
            notices=self.wants_notices,
            queue_timeout_s=self.queue_s,
            first_token_timeout_s=self.first_token_s,
            timeout_s=self.total_s,
        )


# ---------------------------------------------------------------- leases


@dataclass(slots=True)
class Turn:
    """What a process has to do with leases.

    Attributes:
        reads: whether it said that a long prompt is left.
        asked: the number of its question, while it waits.
        only_waits: whether it computes nothing until it gets one.
        got_at: when it got the lease that it has not given back.
        was_told: whether it was told last that leases are needed.
    """

    reads: bool = False
    asked: int | None = None
    only_waits: bool = False
    got_at: float | None = None
    was_told: bool = False

    @property
    def takes_part(self) -> bool:
        """Whether it counts as a reader."""
        return self.reads or self.asked is not None or self.got_at is not None


# ---------------------------------------------------------------- books

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
        cancelled: keys of rows that it was told to end.
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
    cancelled: set[RequestKey] = field(default_factory=set)
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
