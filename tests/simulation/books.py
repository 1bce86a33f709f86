"""The oracle's books of requests, processes and models, from what was said and from the plan."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import TYPE_CHECKING

from mlxsup.protocol.client_messages import ClientDelta, Done, Failed, Generate
from mlxsup.protocol.delta import read_body
from mlxsup.protocol.ids import Generation, ModelName, RequestId, RequestKey, unpack_tokens
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.states import FinishReason, Priority
from mlxsup.protocol.worker_messages import Acceptance, SetBudget
from mlxsup.supervisor.core.actions import WorkerSignal
from mlxsup.supervisor.core.events import Exited
from mlxsup.supervisor.core.settings import ModelSettings

from .ground import check
from .plan import Prompt, answer_channel, answer_finish, answer_length, answer_shown, answer_token

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
    """A prompt that was held in accusing deaths."""

    since: float  # the latest of them
    places: list[int]  # tokens delivered at each, without those that it has come past
    takes_turns: bool = False  # it has to pass them alone
    gains_since: float | None = None  # the first token near one of them, in this life


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a death leads to."""

    says: Says
    culprit: int | None = None  # the prompt that is quarantined
    is_alone: bool = False  # there was too little memory for the only request
    is_broken: bool = False  # three quarantines in a row: the engine itself


@dataclass(slots=True)
class Suspicion:
    """Suspects and quarantined prompts of one model, by their numbers."""

    suspects: dict[int, Suspect] = field(default_factory=dict)
    quarantined: dict[int, float] = field(default_factory=dict)
    convicts: list[int] = field(default_factory=list)
    rows: int | None = None
    rows_until: float = 0.0

    def died(self, says: Says, held: Sequence[tuple[int, int]], now: float) -> Finding:
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
        self.suspects.pop(number, None)
        self.convicts.clear()

    def forget(self, now: float) -> None:
        for number in [n for n, one in self.suspects.items() if now - one.since >= HOUR_S]:
            del self.suspects[number]
        for number in [n for n, until in self.quarantined.items() if now >= until]:
            del self.quarantined[number]
        if now >= self.rows_until:
            self.rows = None

    def lift(self) -> None:
        self.rows = None
        self.suspects.clear()
        self.quarantined.clear()
        self.convicts.clear()

    def takes_turn(self, number: int) -> bool:
        suspect = self.suspects.get(number)
        return suspect is not None and suspect.takes_turns

    @property
    def turns_are_taken(self) -> bool:
        return any(suspect.takes_turns for suspect in self.suspects.values())


# ---------------------------------------------------------------- requests


class Place(StrEnum):
    """Where a request stands."""

    SENT = "sent"  # on its way to the supervisor, or refused there
    LINE = "line"
    PAUSED = "paused"  # outside the line, until it is resumed by hand
    GIVEN = "given"  # dispatched to the process that lives now
    ENDED = "ended"


@dataclass(slots=True, kw_only=True, eq=False)
class Ask:
    """One request, from its client's words to its end."""

    # What its client says.
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
    # Where it stands, and since when.
    place: Place = Place.SENT
    number: int = 0  # in the order of admission
    key: RequestKey | None = None  # of its last dispatch
    arrived_at: float = 0.0
    placed_at: float = 0.0
    started_at: float = 0.0
    first_token_at: float | None = None
    ended_at: float = 0.0
    end: Done | Failed | None = None
    queue_until: float | None = None
    first_token_until: float | None = None
    until: float | None = None
    # What workers have made of it.
    acceptance: Acceptance | None = None
    sent: bytearray = field(default_factory=bytearray)  # tokens that its client was sent
    cached: int = 0
    prefill_s: float = 0.0
    warnings: list[str] = field(default_factory=list)
    engine_s: float = 0.0
    read: set[int] = field(default_factory=set)  # places of its prompt, in whichever process
    gains_since: float | None = None
    # Deaths and pauses.
    deaths: int = 0  # in a row, without a token and without evidence
    shortages: int = 0  # deaths for want of memory, alone
    resumed: int = 0
    is_interrupted: bool = False
    is_yielding: bool = False  # its row was asked to leave, and will queue again
    is_pausing: bool = False  # its row was asked to leave, and will be put aside
    is_paused: bool = False
    is_by_hand: bool = False
    is_for_class: bool = False
    is_for_memory: bool = False
    is_for_room: bool = False  # of another row, which has no memory
    is_unread: bool = False  # its row has left for want of memory before anything was computed
    is_stranded: bool = False  # the same, and it may not have a row again
    short_at: int | None = None  # rows that had ended in its process when its row left
    paused: int = 0
    paused_at: float | None = None
    paused_s: float = 0.0
    # Its turn.
    is_again: bool = False
    passed_over: int = 0
    account: str = ""
    rank: int = 1
    standing: int = 1
    waits_since: float = 0.0
    waited_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.connection.decode()}/{self.id} of {self.model} ({self.place})"

    @property
    def is_open(self) -> bool:
        """True if the supervisor owes it an end."""
        return self.place in (Place.LINE, Place.PAUSED, Place.GIVEN)

    @property
    def is_put_aside(self) -> bool:
        return self.is_pausing or self.place is Place.PAUSED

    @property
    def is_leaving(self) -> bool:
        return self.is_yielding or self.is_pausing

    @property
    def code(self) -> str:
        """What it failed with; empty if it did not."""
        return str(self.end.error.code) if isinstance(self.end, Failed) else ""

    @property
    def is_waiting(self) -> bool:
        """True if it must be a place in the queue: not once its answer has begun."""
        return self.place is Place.LINE and not self.has_begun

    @property
    def has_begun(self) -> bool:
        return self.acceptance is not None and not self.is_unread

    @property
    def number_name(self) -> str:
        """The supervisor's name for it, as people write it; its id, if it was never started."""
        return self.id if self.key is None else f"#{self.key}"

    @property
    def tokens(self) -> int:
        return len(self.sent) // 4

    def ends_pause(self, now: float) -> None:
        if self.paused_at is not None:
            self.paused_s += now - self.paused_at
            self.paused_at = None

    def message(self) -> Generate:
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


@dataclass(slots=True, kw_only=True, eq=False)
class Stream:
    """What one client has received of an answer; checked piece by piece."""

    ask: Ask | None = None
    tokens: int = 0
    pieces: int = 0
    text: str = ""
    end: Done | Failed | None = None

    def __str__(self) -> str:
        return str(self.ask)

    def accepted(self) -> Acceptance:
        accepted = self.ask.acceptance if self.ask is not None else None
        check("token before acceptance", accepted is not None, self)
        assert accepted is not None
        return accepted

    def take(self, delta: ClientDelta) -> None:
        """Take a piece: with the tokens of the answer, in order, and their text."""
        check("after the end", self.end is None, self)
        check("sequence", delta.seq == self.pieces, f"{self}: {delta.seq}")
        self.pieces += 1
        accepted, body = self.accepted(), read_body(delta.body)
        for token in unpack_tokens(delta.tokens):
            expected = answer_token(accepted, self.tokens)
            check("tokens", token == expected, f"{self}: {token} is no. {self.tokens}")
            self.check_channel(body.channel == answer_channel(accepted, self.tokens))
            self.tokens += 1
        self.text += body.text
        is_end = self.tokens == answer_length(accepted)
        self.check_text(answer_shown(accepted, self.tokens, is_end=is_end))

    def check_channel(self, is_right: bool) -> None:
        check("channel", is_right, self)

    def check_text(self, shown: str) -> None:
        check("text", self.text == shown, f"{self}: {self.text!r} and not {shown!r}")

    def ends(self, end: Done | Failed, *, is_slow: bool) -> None:
        """Take the end: if it is that of the answer, all of it has been there."""
        check("two ends", self.end is None, self)
        self.end = end
        if is_slow:
            return
        if isinstance(end, Failed):
            self.check_failed(end)
            return
        check("pieces counted", end.seq == self.pieces, f"{self}: {end.seq}")
        if end.finish_reason is not FinishReason.CANCELLED:
            accepted = self.accepted()
            check("whole answer", self.tokens == answer_length(accepted), self)
            shown = answer_shown(accepted, self.tokens, is_end=True)
            check("whole text", self.text == shown, f"{self}: {self.text!r} of {shown!r}")
            check("finish reason", end.finish_reason == answer_finish(accepted), self)
        self.check_done(end)

    def check_failed(self, failed: Failed) -> None:
        sent = failed.error.detail.get("tokens_sent")
        check("tokens_sent", sent in (None, self.tokens), f"{self}: {sent}")

    def check_done(self, done: Done) -> None:
        ask, accepted, usage, times = self.ask, None, done.usage, done.timings
        assert ask is not None
        accepted = ask.acceptance
        check("resumed counted", done.resumed == ask.resumed, f"{ask}: {done.resumed}")
        check("pauses counted", done.paused == ask.paused, f"{ask}: {done.paused}")
        check("warnings", done.warnings == ask.warnings, f"{ask}: {done.warnings}")
        check("usage of the answer", usage.completion_tokens == self.tokens, f"{ask} {usage}")
        prompt = len(accepted.prompt_tokens) // 4 if accepted else 0
        check("usage of the prompt", usage.prompt_tokens == prompt, f"{ask} {usage}")
        check("usage of the cache", usage.cached_tokens == ask.cached, f"{ask} {usage}")
        check("seed", done.seed == (accepted.seed if accepted else None), f"{ask}: {done.seed}")
        started_at = ask.started_at if ask.has_begun else ask.ended_at
        first_at = ask.arrived_at if ask.first_token_at is None else ask.first_token_at
        known_s = [at - ask.arrived_at for at in (started_at, first_at, ask.ended_at)]
        said_s = [times.queued_s, times.first_token_s, times.total_s]
        if accepted is None:
            known_s[0] = said_s[0]
        is_right = all(abs(a - b) < 1e-6 for a, b in zip(known_s, said_s, strict=True))
        check("timings", is_right, f"{ask}: {times}, {known_s}")
        since = ask.ended_at if ask.paused_at is None else ask.paused_at
        paused_s = ask.paused_s + ask.ended_at - since
        check("time paused", abs(times.paused_s - paused_s) < 1e-6, f"{ask}: {times}")


@dataclass(slots=True, kw_only=True, eq=False)
class Listener(Stream):
    """The stream of a client that has joined a request, and what the supervisor owes it."""

    name: str
    asked: Life | None = None  # the process that renders what was delivered before
    number: int | None = None  # of that question
    is_waiting: bool = False  # for its answer
    has_nothing: bool = False  # nothing can be shown
    has_left: bool = False
    is_slow: bool = False
    sent: int = 0  # tokens
    ended: bool = False

    def __str__(self) -> str:
        return f"{self.name} listens to {self.ask}"

    def check_channel(self, is_right: bool) -> None:
        """Let what was rendered come in one piece with all its tokens, whatever its channel."""

    def check_text(self, shown: str) -> None:
        """Let text be behind the tokens: what was rendered comes in several pieces."""
        check("text", shown.startswith(self.text), f"{self}: {self.text!r} of {shown!r}")

    def check_failed(self, failed: Failed) -> None:
        """Let an end be that of the listening alone."""

    def check_done(self, done: Done) -> None:
        """Let the account of a request be for its own client."""


# ---------------------------------------------------------------- processes

MACHINE_SHARE = 0.9
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


@dataclass(slots=True)
class Turn:
    """What a process has to do with leases."""

    reads: bool = False  # it said that a long prompt is left
    asked: int | None = None  # the number of its question, while it waits
    only_waits: bool = False  # it computes nothing until it gets a lease
    got_at: float | None = None  # when it got the lease that it has not given back
    was_told: bool = False  # that leases are needed

    @property
    def takes_part(self) -> bool:
        return self.reads or self.asked is not None or self.got_at is not None


@dataclass(slots=True, kw_only=True, eq=False)
class Life:
    """One process."""

    model: ModelName
    generation: Generation
    launch: LaunchSettings
    worker: PlayedWorker  # the truth about it
    spawned_at: float
    is_after_crash: bool
    is_of_restart: bool = False
    pid: int | None = None
    has_greeted: bool = False
    progress_at: float = 0.0
    progress: tuple[str, float] = ("", 0.0)
    ready_at: float | None = None
    spoke_at: float | None = None  # its first token
    settled_at: float | None = None  # all its first rows have gained a token or ended
    unlinked_at: float | None = None
    broke_at: float | None = None
    announced: str = ""
    # Its end.
    cause: Cause | None = None
    stopped_serving_at: float | None = None
    is_restart: bool = False  # a restart was asked for meanwhile
    told: list[tuple[str, float]] = field(default_factory=list)  # `exit` or a signal, and when
    hurried_at: float | None = None
    is_abandoned: bool = False
    # Its rows.
    given: dict[RequestKey, Ask] = field(default_factory=dict)  # as far as is known, ended ones too
    kept: set[RequestKey] = field(default_factory=set)
    cancelled: set[RequestKey] = field(default_factory=set)
    keeps: bool = True  # it kept the state of the last row that was freed for a higher class
    tokens_at_end: dict[RequestKey, int] = field(default_factory=dict)
    was_given: bool = False
    rows_ended: int = 0
    works_since: float | None = None  # its engine was last heard of, if it has something to compute
    turn: Turn = field(default_factory=Turn)
    # Its memory.
    footprint: int = 0  # measured
    reported: int = 0  # by its beats
    granted: int = 0
    asked_back_at: float = -math.inf
    budgets: list[SetBudget] = field(default_factory=list)  # the one that it keeps to, and later
    is_giving_back: bool = False  # it was told to, and has not said since that it keeps to that
    says_it_gave_back: bool = False  # it has, and was not measured yet
    gave_back_at: float = -math.inf

    @property
    def most_bytes(self) -> int:
        """What its rows may take at the worst."""
        return max((one.rows_bytes for one in self.budgets), default=0)

    @property
    def serves(self) -> bool:
        """True if it is READY and not being ended, as far as the supervisor can know."""
        return self.ready_at is not None and self.cause is None

    @property
    def is_linked(self) -> bool:
        return self.serves and self.unlinked_at is None

    @property
    def running(self) -> list[Ask]:
        """Its rows whose requests are open."""
        return [ask for ask in self.given.values() if ask.is_open]

    @property
    def staying(self) -> list[Ask]:
        """Its rows that were not asked to leave."""
        return [ask for ask in self.running if not ask.is_leaving]

    def held(self) -> list[tuple[int, int]]:
        """Return prompt and delivered tokens of each request in its hands."""
        return [
            (ask.prompt.number, self.tokens_at_end.get(key, ask.tokens))
            for key, ask in self.given.items()
        ]

    def ended_by(self, exited: Exited | None) -> Cause | None:
        """Return why it was ended; None if by itself, even if a kill of a broken one crossed."""
        is_killed = exited is None or exited.signal_name == "SIGKILL"
        if self.cause is Cause.BROKEN and not is_killed and not self.is_restart:
            return None
        return self.cause

    def says(self, exited: Exited, machine_bytes: int) -> Says:
        """Return what its death says of the requests that it held."""
        match self.ended_by(exited):
            case Cause.STALL:
                return Says.ACCUSES if self.ready_at is not None else Says.NOTHING
            case Cause.BROKEN:
                return Says.NOTHING
            case Cause.ASKED | Cause.SWAP | Cause.VERSION | Cause.TOO_LARGE:
                return Says.ASKED
        if self.ready_at is None:
            return Says.NOTHING
        is_short = exited.signal_name == "SIGKILL" and self.is_over_memory(machine_bytes)
        if exited.exit_code == 75 or is_short:
            return Says.NO_MEMORY
        is_own = exited.exit_code in (70, 73, 76) or exited.signal_name in OWN_FAULTS
        return Says.ACCUSES if is_own else Says.NOTHING

    def is_over_memory(self, machine_bytes: int) -> bool:
        """True if it was over its limit, or without one over a share of the machine."""
        if self.launch.memory_limit_bytes:
            return self.launch.memory_limit_bytes < max(self.footprint, self.reported)
        return 0 < machine_bytes * MACHINE_SHARE < self.footprint

    def was_told(self, what: str | WorkerSignal) -> float | None:
        """Return when it was first told so."""
        return next((when for one, when in self.told if one == what), None)


class UpFor(Enum):
    """What a model is wanted for."""

    SOMEBODY = auto()
    FILE = auto()  # the configuration says so: what cannot be loaded now waits on
    NEXT_TURN = auto()  # it has made room, and is wanted as long as a request waits for it


@dataclass(slots=True, kw_only=True, eq=False)
class Book:
    """One model."""

    entry: ModelSettings  # of the configuration that counts
    wanted: Wanted = Wanted.DOWN
    is_by_user: bool = True  # a person wants it down
    life: Life | None = None  # until the exit is seen; one given up, too
    queue: list[Ask] = field(default_factory=list)
    paused: list[Ask] = field(default_factory=list)  # by hand
    callers: set[tuple[bytes, str]] = field(default_factory=set)  # commands that wait for its load
    suspicion: Suspicion = field(default_factory=Suspicion)
    failed: str = ""  # why it is FAILED
    drain_until: float | None = None
    # Crashes.
    crashes: deque[float] = field(default_factory=deque)  # that count, the latest last
    in_a_row: int = 0
    outages_in_a_row: int = 0
    retry: tuple[float, float] | None = None  # the earliest and the latest next start
    retry_at: float | None = None  # as announced; None once that time has come
    is_after_crash: bool = False
    is_restarting: bool = False  # a restart was asked for, and it has not been READY since
    last_load_error: str = ""
    last_code: int | None = None
    batching: dict[str, str] | None = None
    # Accounts.
    busy_at: float = 0.0
    entry_since: float = 0.0  # the reload that its entry came with
    engine_s: float = 0.0
    repeated_s: float = 0.0
    received: dict[str, float] = field(default_factory=dict)  # engine seconds over weight
    latest: str = ""  # the account that was dispatched last
    begun: set[str] = field(default_factory=set)  # whose new requests have, since the last turn
    cost_s: float | None = None  # what a request is expected to cost
    freed: int = 0  # rows that have left in this event for requests of a higher class
    # Memory.
    held: int = 0  # what its process holds of the budget
    waits_since: float | None = None  # for its load while a request or command wants it
    due_since: float | None = None  # nothing has forbidden since that others are swapped out for it
    swaps_until: float | None = None  # its rows must have left for another model
    up_for: UpFor = UpFor.SOMEBODY

    @property
    def name(self) -> ModelName:
        return self.entry.name

    @property
    def _is_able(self) -> bool:
        return self.life is not None and self.life.serves and self.life.broke_at is None

    @property
    def serves(self) -> bool:
        """True if requests may be dispatched to its process."""
        is_up = self.wanted is Wanted.UP and self.drain_until is None and self.swaps_until is None
        return is_up and self._is_able

    @property
    def finishes(self) -> bool:
        """True if it goes down and may still be given answers that were paused."""
        return self.wanted is not Wanted.UP and self.drain_until is not None and self._is_able

    @property
    def waiting(self) -> list[Ask]:
        return [*self.queue, *self.paused]

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or (self.life and self.life.given))

    @property
    def is_awaited(self) -> bool:
        """True if a request or a command waits for its load."""
        return bool(self.queue or self.callers)

    @property
    def is_going(self) -> bool:
        return self.drain_until is not None or self.swaps_until is not None

    @property
    def rows(self) -> int:
        """How many requests may be given at once."""
        rows = (self.life.launch if self.life else self.entry.launch).max_concurrency
        return rows if self.suspicion.rows is None else min(rows, self.suspicion.rows)

    @property
    def is_resting(self) -> bool:
        """True if nothing happens until it is asked for, or until a back-off is over."""
        return bool(self.failed) or self.retry_at is not None

    @property
    def is_at_door(self) -> bool:
        """True if it is wanted, has no process, and none to come after a delay."""
        return self.wanted is Wanted.UP and self.life is None and not self.is_resting

    @property
    def waits_for_files(self) -> bool:
        return self.is_at_door and self.entry.download is not None

    @property
    def waits_for_memory(self) -> bool:
        return self.is_at_door and self.entry.download is None

    def clean(self) -> None:
        """Hold no crash against it: a start was asked for."""
        self.crashes.clear()
        self.in_a_row = self.outages_in_a_row = 0
        self.last_load_error = ""

    def crashed(self, now: float) -> tuple[float, float] | None:
        """Count a crash; return the shortest and the longest delay, None if it is FAILED now."""
        policy = self.entry.restart
        self.crashes.append(now)
        recent = [when for when in self.crashes if when > now - policy.window_s]
        if len(recent) > policy.max_restarts:
            return None
        self.in_a_row += 1
        return (0.0, 0.0) if self.in_a_row == 1 else self._delays_s(self.in_a_row - 2)

    def kept_out(self) -> tuple[float, float]:
        """Count an attempt that others kept from succeeding, which is never the last one."""
        self.outages_in_a_row += 1
        return self._delays_s(self.outages_in_a_row - 1)

    def _delays_s(self, doublings: int) -> tuple[float, float]:
        policy = self.entry.restart
        longest = min(policy.backoff_initial_s * 2**doublings, policy.backoff_max_s)
        return longest / 2, longest
