"""The life of one model: its states, and what is true of its worker over all generations.

A state holds what is only true while it lasts. Only `transitions.py` changes it, and what is wanted
of the model.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum, auto
from typing import ClassVar

from mlxsup.protocol.download import DownloadProgress
from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.states import (
    HAS_PROCESS,
    DeathCause,
    ExitReason,
    LoadPhase,
    PendingReason,
    Priority,
    State,
    Wanted,
    Why,
)

from .budget import Need
from .settings import ModelSettings, RestartSettings

# ---------------------------------------------------------------- states

KEPT_BACKOFF_S = 5.0
"""A model that crashed keeps the memory that is reserved for it if its next start is nearer."""


class StopCause(StrEnum):
    """The reason why a worker is being ended; decides what follows its exit."""

    ASKED = auto()
    STALL = auto()
    SUSPENDED = auto()
    BROKEN = auto()
    VERSION = auto()
    TOO_LARGE = auto()
    INTERNAL = auto()
    SWAP = auto()


class StopStage(Enum):
    """The stages of ending a worker, ever harder (E5)."""

    ASK = auto()
    DUMP = auto()
    TERM = auto()
    KILL = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Phase:
    """One state of a worker.

    Attributes:
        since: when it was entered, monotonic seconds.
        due_at: when something is due if nothing else happens first; None: nothing is.
    """

    STATE: ClassVar[State]
    since: float
    due_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped(_Phase):
    """No process, none wanted."""

    STATE: ClassVar[State] = State.STOPPED


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """There may be room for a model later.

    Attributes:
        reason: what it needs and what is in the way, a phrase that follows its name.
        until: when a model that is in the way may go; None if nothing is known of that.
        is_under_way: whether enough of the memory is already being freed.
        swaps: the busy models that will be swapped out for it, as things are.
        reclaims: whether the others must also give back what they do not need now.
    """

    reason: str
    until: float | None = None
    is_under_way: bool = False
    swaps: tuple[ModelName, ...] = ()
    reclaims: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    """There is no memory for a model yet.

    Attributes:
        since: when that was found, monotonic seconds.
        wait: what it waits for.
        asked_since: since when a request or a command has been waiting for the model; None: none
            does.
        is_promised: whether others are being swapped out for it: what they free is for it.
    """

    since: float
    wait: Wait
    asked_since: float | None = None
    is_promised: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending(_Phase):
    """Wanted, and waiting to be spawned.

    Attributes:
        is_after_crash: whether it only waits for other loads that follow a crash.
        lack: the memory that it waits for; None if it waits for something else.
        fetching: how far the download has come that it waits for; None if it waits for its turn, or
            for memory.
        download_cause: why the download before that failed; empty if it is the first, or has begun.
    """

    STATE: ClassVar[State] = State.PENDING
    is_after_crash: bool = False
    lack: Lack | None = None
    fetching: DownloadProgress | None = None
    download_cause: str = ""

    @property
    def reason(self) -> PendingReason:
        """Return what it waits for."""
        if self.fetching is not None:
            return PendingReason.DOWNLOAD
        return PendingReason.MEMORY if self.lack else PendingReason.TURN


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading(_Phase):
    """Spawned, not READY yet.

    Attributes:
        due_at: when the load has stalled if there is no progress until then.
        progress: from 0 to 1 over all phases.
        is_restart: whether a restart command caused it; further ones join it.
    """

    STATE: ClassVar[State] = State.LOADING
    due_at: float
    load_phase: LoadPhase = LoadPhase.SPAWN
    progress: float = 0.0
    is_restart: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(_Phase):
    """Serving."""

    STATE: ClassVar[State] = State.READY


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining(_Phase):
    """Finishing running requests.

    Attributes:
        due_at: when requests that still run are cut off.
    """

    STATE: ClassVar[State] = State.DRAINING
    due_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Memory is short, whichever model waits for it.

    Attributes:
        reason: why, a phrase that follows what is done: `because other programs need memory`.
        counted_bytes: what the model that goes for it was counted with.
    """

    reason: str
    counted_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Swapping(_Phase):
    """Its rows leave, because its memory is needed; then its process ends.

    Attributes:
        due_at: when rows that have not left are cut off; they continue as after a crash.
        cause: the model that it makes room for, or the shortage that it goes for.
        ran: the highest class that it ran when it was chosen; None if it ran nothing.
    """

    STATE: ClassVar[State] = State.DRAINING
    due_at: float
    cause: ModelName | Shortage
    ran: Priority | None

    @property
    def what_for(self) -> str:
        """Return what it makes room for, a phrase that follows what is done."""
        return self.cause.reason if isinstance(self.cause, Shortage) else f"for {self.cause}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping(_Phase):
    """Asked to exit, or being killed, until the exit is seen.

    Attributes:
        stage: how hard it is being ended.
        due_at: when the next, harder stage begins; after the last one, when it is given up.
        is_restart: whether a restart was asked for: it then comes up with a clean window.
        detail: a phrase that says what went wrong, or for whom it is swapped out; empty if it was
            only asked to go.
    """

    STATE: ClassVar[State] = State.STOPPING
    cause: StopCause
    stage: StopStage
    due_at: float
    is_restart: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff(_Phase):
    """Crashed, or not downloaded; to be tried again.

    Attributes:
        due_at: when the next attempt begins.
        download_cause: why its download failed; empty after a crash.
    """

    STATE: ClassVar[State] = State.BACKOFF
    due_at: float
    download_cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(_Phase):
    """Cannot recover by itself, or crashed too often.

    Attributes:
        cause: one sentence for people.
    """

    STATE: ClassVar[State] = State.FAILED
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned(Failed):
    """FAILED, with a live process: SIGKILL has not ended it within its limit (P26).

    It holds no turn and is not waited for, but the model gets no other process.
    """


Phase = (
    Stopped
    | Pending
    | Loading
    | Ready
    | Draining
    | Swapping
    | Stopping
    | Backoff
    | Failed
    | Abandoned
)
"""One state of a worker, with the time it was entered."""

# ---------------------------------------------------------------- restarts after crashes


@dataclass(slots=True, kw_only=True)
class RestartPolicy:
    """Counts one model's crashes (F2, P9).

    After the first crash since the first start, a clean window or a stable time, the restart is
    immediate; the delay of later ones doubles from `backoff_initial_s` to `backoff_max_s`, minus a
    random part of up to half, so that workers that died together do not come back together.
    """

    random: random.Random
    _crashes: deque[float] = field(default_factory=deque)
    """Times of crashes within the window; at most `max_restarts` + 1 of them."""
    _in_a_row: int = 0
    _outages_in_a_row: int = 0
    _load_error: str | None = None

    def after_crash(self, settings: RestartSettings, now: float) -> float | None:
        """Return the delay in seconds before the next start, 0 for none; None: the window has had
        too many crashes for another."""
        self._crashes.append(now)
        while self._crashes[0] <= now - settings.window_s:
            self._crashes.popleft()
        if len(self._crashes) > settings.max_restarts:
            return None
        self._in_a_row += 1
        return 0.0 if self._in_a_row == 1 else self._delay_s(settings, self._in_a_row - 2)

    def after_outage(self, settings: RestartSettings) -> float:
        """Return the delay in seconds before the next attempt at what others keep from succeeding.

        It grows like that of a crash, and is no reason to give up, however often it is asked for.
        """
        self._outages_in_a_row += 1
        return self._delay_s(settings, self._outages_in_a_row - 1)

    def outage_ended(self) -> None:
        """Let the delay of the next outage start afresh: an attempt has succeeded."""
        self._outages_in_a_row = 0

    def fails_alike(self, load_error: str | None) -> bool:
        """True if this load failed like the one right before it: another attempt cannot help.

        Args:
            load_error: what two loads that fail alike have in common; None after an exit of
                another kind.
        """
        before, self._load_error = self._load_error, load_error
        return load_error is not None and load_error == before

    @property
    def crashes(self) -> int:
        """Return how many the window had when the latest one came."""
        return len(self._crashes)

    def was_stable(self) -> None:
        """Reset the delay, and not the window: it was READY for `stable_s`."""
        self._in_a_row = 0

    def clean(self) -> None:
        """Forget all crashes: a person asked for a start."""
        self._crashes.clear()
        self._in_a_row = 0
        self._outages_in_a_row = 0
        self._load_error = None

    def _delay_s(self, settings: RestartSettings, doublings: int) -> float:
        delay_s = settings.backoff_initial_s * 2.0 ** min(doublings, 60)
        return min(delay_s, settings.backoff_max_s) * self.random.uniform(0.5, 1.0)


# ---------------------------------------------------------------- what is known of a process

NEVER_SPAWNED = Generation(0)
STORY_LENGTH = 200

KILL_LIMIT_S = 10.0
KILL_LIMIT_S_PER_GB = 0.5
"""How long after SIGKILL an exit may take: the kernel frees a resident GB in about 0.17 s."""

FILES_COUNT_FOR_S = 5.0
"""What was found of files is believed for so long; no folder is looked at more often than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The state of the files that a process has loaded: whether it could load them again.

    Attributes:
        is_being_seen: whether the shell is looking at them now.
        seen_at: when the latest answer came, monotonic seconds; None before the first.
        change: what had changed since they were loaded, a phrase; empty if nothing had.
    """

    is_being_seen: bool = False
    seen_at: float | None = None
    change: str = ""

    def may_be_asked(self, now: float) -> bool:
        """True if what was found is too old, and the shell is not looking."""
        return not self.is_being_seen and not self.is_fresh(now)

    def is_fresh(self, now: float) -> bool:
        """True if what was found last may be believed."""
        return self.seen_at is not None and now < self.seen_at + FILES_COUNT_FOR_S


UNSEEN = Files()
"""The shell has not looked at them since the process was started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastExit:
    """The end of the last process, as `status` shows it; `at` is in wall-clock seconds, `cause` is
    the class of its cause, and `last_words` are of its output."""

    reason: ExitReason
    code: int | None
    signal: str | None
    detail: str
    at: float | None
    cause: DeathCause
    last_words: str


STEP = 0.01
"""Between two places that are kept: at most a hundred of them."""

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTimes:
    """The phases of one load, in the order in which they began.

    Attributes:
        took_s: seconds of each phase that is over.
        phase: the one that lasts; None once the load has ended, or before there was any.
        since: when that one began, monotonic seconds.
        places: how far the engine said it was, from 0 to 1, and after how many seconds.
        usual: the places of the latest load that came to its end, and the share of its time.
    """

    took_s: Mapping[LoadPhase, float] = field(default_factory=dict)
    phase: LoadPhase | None = None
    since: float = 0.0
    places: Points = ()
    usual: Points = ()

    @classmethod
    def begun(cls, now: float, before: LoadTimes | None = None) -> LoadTimes:
        """Return a load whose process is being spawned, after another one."""
        usual = () if before is None else before.usual
        if before is not None and before.places and before.places[-1][0] >= 1.0:
            whole_s = sum(before.took_s.values()) or 1.0
            usual = tuple((place, min(after_s / whole_s, 1.0)) for place, after_s in before.places)
        return cls(phase=LoadPhase.SPAWN, since=now, usual=usual)

    def reached(self, place: float, now: float) -> LoadTimes:
        """Return the load at this place; a small step is not kept."""
        if self.phase is None or (self.places and place < min(self.places[-1][0] + STEP, 1.0)):
            return self
        after_s = sum(self.seconds(now).values())
        return replace(self, places=(*self.places, (place, after_s)))

    def share_of_time(self, place: float) -> float:
        """Return how much of the time of a load is usually over at this place, from 0 to 1.

        Engines count bytes and steps: half of those may take a tenth of the time.
        """
        (low, begin), points = (0.0, 0.0), (*self.usual, (1.0, 1.0))
        for high, end in points if self.usual else ():
            if place <= high:
                part = (place - low) / (high - low) if high > low else 1.0
                return begin + (end - begin) * part
            low, begin = high, end
        return place

    def entered(self, phase: LoadPhase, now: float) -> LoadTimes:
        """Return the load in this phase; one that comes again is counted as one."""
        if phase is self.phase:
            return self
        return replace(self.ended(now), phase=phase, since=now)

    def ended(self, now: float) -> LoadTimes:
        """Return the load once it has ended, however it did; the same if it had ended before."""
        if self.phase is None:
            return self
        return replace(self, took_s=self.seconds(now), phase=None)

    def seconds(self, now: float) -> dict[LoadPhase, float]:
        """Return the seconds of each phase, of the one that lasts until now."""
        if self.phase is None:
            return dict(self.took_s)
        before_s = self.took_s.get(self.phase, 0.0)
        return {**self.took_s, self.phase: before_s + now - self.since}


NO_LOAD = LoadTimes()
"""There has been none yet."""


@dataclass(slots=True, kw_only=True)
class Life:
    """One model's worker, over all its generations.

    Attributes:
        exit_grace_s: seconds from asking to SIGTERM, and from there to SIGKILL.
        phase: the state, with what belongs to it.
        wanted, why: what commands, requests and timers want.
        generation: counts spawns.
        launched: what the live process was started with; None while there is none.
        pid: pid of the process, once it is known.
        is_after_crash: whether the live process was started because of a crash.
        ready_at: when the live process became READY; None before.
        crash_restarts: number of starts that followed a crash, since the supervisor's start.
        last_exit: how the last process ended.
        exits: how many processes have ended each way, since the supervisor's start.
        refusal: what ends requests that wait for it although it is no longer wanted; None while it
            is, and before it ever was.
        footprint_bytes: resident memory of the process, as last measured.
        need: what the model was appraised at; None before, and if its files cannot be read, unless
            a process of it lives.
        granted_bytes: what its live process was started with of the memory budget.
        stream_tokens: how long its longest answer is that has begun, as of the exit of its last
            process, and from then on while it waits for a load, which has room for it.
        raise_bytes: how much of that is there because processes before it ran out of memory.
        reserved_bytes: its part of the memory budget: from before the spawn until the exit is seen,
            and across a restart; if it is pinned, for as long as it is configured.
        known_batching: what a worker of this model found out about how rows may be batched, in the
            form of a launch spec; None before any has. The fingerprint says whether it is valid.
        files: what is known of the files that its live process has loaded.
        load_times: how long each phase of its latest load took.
        story: the latest events and what they led to, oldest first.
    """

    settings: ModelSettings
    exit_grace_s: float
    restarts: RestartPolicy
    phase: Phase
    wanted: Wanted = Wanted.DOWN
    why: Why = Why.USER
    generation: Generation = NEVER_SPAWNED
    launched: LaunchSettings | None = None
    pid: int | None = None
    is_after_crash: bool = False
    ready_at: float | None = None
    crash_restarts: int = 0
    last_exit: LastExit | None = None
    exits: Counter[tuple[ExitReason, DeathCause]] = field(default_factory=Counter)
    refusal: RemoteError | None = None
    footprint_bytes: int = 0
    need: Need | None = None
    granted_bytes: int = 0
    raise_bytes: int = 0
    stream_tokens: int = 0
    reserved_bytes: int = 0
    known_batching: dict[str, str] | None = None
    files: Files = UNSEEN
    load_times: LoadTimes = NO_LOAD
    story: deque[str] = field(default_factory=lambda: deque(maxlen=STORY_LENGTH))

    @classmethod
    def new(cls, settings: ModelSettings, *, exit_grace_s: float, random: random.Random) -> Life:
        """Return a model that was never started."""
        return cls(
            settings=settings,
            exit_grace_s=exit_grace_s,
            restarts=RestartPolicy(random=random),
            phase=Stopped(since=0.0),
        )

    @property
    def name(self) -> ModelName:
        """Return the model's name."""
        return self.settings.name

    @property
    def state(self) -> State:
        """Return the state's name."""
        return self.phase.STATE

    @property
    def launch(self) -> LaunchSettings:
        """Return what the process is judged by: its own launch while it lives, even if the entry
        has changed since; otherwise that of the next one."""
        return self.launched or self.settings.launch

    @property
    def is_outdated(self) -> bool:
        """True if the live process was started with a launch that differs from the entry's."""
        return self.launch != self.settings.launch

    @property
    def is_loading(self) -> bool:
        """True if it holds a load turn: from the spawn to READY or the exit."""
        return self.state in HAS_PROCESS and self.ready_at is None

    @property
    def has_process(self) -> bool:
        """True if a process is alive, even if its end is no longer waited for."""
        return self.state in HAS_PROCESS or isinstance(self.phase, Abandoned)

    @property
    def needed_bytes(self) -> int:
        """Return what must be free before it is loaded, as far as `stream_tokens` is known."""
        return self.needed_for(self.stream_tokens)

    @property
    def pinned_bytes(self) -> int:
        """Return what is kept for it even if no answer is open, because it is pinned."""
        return self.needed_for(0) if self.settings.pinned else 0

    @property
    def kill_limit_s(self) -> float:
        """Return how long after SIGKILL to give up the process."""
        return KILL_LIMIT_S + KILL_LIMIT_S_PER_GB * self.footprint_bytes / 1e9

    @property
    def failure(self) -> str:
        """Return why it is FAILED; empty in other states."""
        return self.phase.cause if isinstance(self.phase, Failed) else ""

    @property
    def download_cause(self) -> str:
        """Return why its download is tried again, or will be; empty if that is not what it waits
        for."""
        return self.phase.download_cause if isinstance(self.phase, Backoff | Pending) else ""

    # ------------------------------------------------------------ memory

    def needed_for(self, stream_tokens: int) -> int:
        """Return what must be free before it is loaded if an answer that has begun is that long:
        the `memory` of its entry, or else what it was appraised at; 0 if nothing is known of it."""
        given_bytes = self.settings.launch.memory_limit_bytes
        if given_bytes is not None:
            return given_bytes
        return self.need.needed_for(stream_tokens) if self.need else 0

    def appraise(self, need: Need | None) -> None:
        """Plan the next load with this need. If it is no longer known, what was known still counts
        for the live process and its rows."""
        if need is not None or not self.has_process:
            self.need = need
        self.keep_books()

    def keep_books(self) -> None:
        """Derive what stays reserved from the state, and from being pinned.

        Without a process it is no more than the next one needs, even if the last one held more.
        """
        held_bytes = self.reserved_bytes if self._keeps_memory else 0
        if not self.has_process:
            held_bytes = min(held_bytes, self.needed_bytes)
        self.reserved_bytes = max(held_bytes, self.pinned_bytes)

    @property
    def _keeps_memory(self) -> bool:
        """True if it has a process, or the next one is near."""
        if isinstance(self.phase, Backoff):
            return self.phase.due_at - self.phase.since < KEPT_BACKOFF_S
        return self.has_process or self.state is State.PENDING

    def holds(self, measured_bytes: int, *, may_shrink: bool) -> None:
        """Correct what is reserved by what the process was measured at.

        Args:
            may_shrink: whether it may have given back what it was not started with.
        """
        least_bytes = self.granted_bytes if may_shrink else self.reserved_bytes
        if self.has_process:
            self.reserved_bytes = max(least_bytes, measured_bytes)
            self.keep_books()

    def ready_for_s(self, now: float) -> float | None:
        """Return how long its process has been READY, or had been before it was asked to end; None:
        never, or it was given up."""
        if self.ready_at is None or isinstance(self.phase, Abandoned):
            return None
        return (self.phase.since if isinstance(self.phase, Stopping) else now) - self.ready_at
