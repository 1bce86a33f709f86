"""The states of a worker, what is wanted of it, and the named sets of states that rules use."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """One worker's life; docs/architecture.md says where each one leads."""

    STOPPED = "STOPPED"
    PENDING = "PENDING"
    LOADING = "LOADING"
    READY = "READY"
    DRAINING = "DRAINING"
    STOPPING = "STOPPING"
    BACKOFF = "BACKOFF"
    FAILED = "FAILED"


HAS_PROCESS = frozenset({State.LOADING, State.READY, State.DRAINING, State.STOPPING})
"""States in which there is a live process, from the spawn until its exit is seen."""

SERVES = frozenset({State.READY, State.DRAINING})
"""States in which requests may be running in the engine."""


class Wanted(StrEnum):
    """The state that commands, requests and timers want a model to have."""

    UP = "up"
    DOWN = "down"
    GONE = "gone"


class Why(StrEnum):
    """The reason why that is wanted."""

    USER = "user"
    PRELOAD = "preload"
    REQUEST = "request"
    IDLE = "idle"
    EVICT = "evict"
    SWAP = "swap"
    RESTART = "restart"
    RELOAD = "reload"
    SHUTDOWN = "shutdown"
    MEMORY = "memory"


class PendingReason(StrEnum):
    """The thing that a wanted model waits for before its process is spawned."""

    TURN = "turn"
    MEMORY = "memory"
    DOWNLOAD = "download"


class Priority(StrEnum):
    """The class of a request: a model with several waiting starts those of the first one first."""

    INTERACTIVE = "interactive"
    NORMAL = "normal"
    BATCH = "batch"

    @property
    def rank(self) -> int:
        """Return 0 for the class that goes first, and more for those behind it."""
        return _RANKS[self]

    def is_above(self, other: Priority) -> bool:
        """Return whether this class goes before another one."""
        return self.rank < other.rank


CLASSES = tuple(Priority)
"""By rank."""

_RANKS = {priority: rank for rank, priority in enumerate(CLASSES)}


class PauseReason(StrEnum):
    """The reason why a row leaves the batch although its answer is not complete."""

    USER = "user"
    """`mlxsup pause`: it waits until `mlxsup resume`."""
    TURN = "turn"
    """A suspect of two crashes has to run alone; then it continues by itself."""
    CLASS = "class"
    """A request of a higher class needs its row; it waits in its own class, and continues by
    itself."""
    SWAP = "swap"
    """Its model makes room for another one; it continues when the model has its next turn."""
    MEMORY = "memory"
    """The rows of its model need more memory than they may take, or other programs need some: it
    waits until there is room."""


class RowState(StrEnum):
    """The fate of the computed state of a row that was paused."""

    KEPT = "kept"
    """The answer can continue without reading anything again."""
    DROPPED = "dropped"
    """The prompt and the answer so far are read again, as after a crash."""


class WaitReason(StrEnum):
    """The reason why a request waits to be started."""

    ROWS = "rows"
    """The model is serving, and every row is taken."""
    TURN = "turn"
    """A suspect of two crashes runs alone in its turn, or is about to."""
    LIMIT = "limit"
    """The client has as many requests running as its `max_running` allows."""
    LOAD = "load"
    """The model is loading, or waiting for its turn."""
    MEMORY = "memory"
    """The model is waiting until there is memory for it, or the first request in its line until
    there is memory for one more row."""
    SWAP = "swap"
    """The model has made room for another one, or is about to, and waits for its next turn."""
    RESTART = "restart"
    """The model's process is being replaced."""
    BACKOFF = "backoff"
    """The model's process crashed; another one starts after a delay."""
    DOWNLOAD = "download"
    """The model's download failed, which is no crash; it is tried again after a delay."""


class Batching(StrEnum):
    """The ways to compute the rows of a model in passes; see docs/engine.md."""

    TOGETHER = "together"
    """Prompts of several rows share passes, and so do the tokens of answers."""
    SERIAL_PREFILL = "serial_prefill"
    """A pass reads the prompt of one row; tokens of answers share passes."""
    ONE_ROW = "one_row"
    """Every pass is of one row; rows take turns."""


class LoadPhase(StrEnum):
    """The phases of a load."""

    SPAWN = "spawn"
    IMPORT = "import"
    WEIGHTS = "weights"
    MATERIALISE = "materialise"
    WARMUP = "warmup"


class WorkerPhase(StrEnum):
    """The phases of a worker's owner thread, as its heartbeat says them.

    IDLE means that it waits for something to do; ROWS is everything it does between two steps:
    taking rows in and out, replaying answers, freeing memory. WAITING means that it can do nothing
    without the lease that it has asked for.
    """

    LOADING = "loading"
    IDLE = "idle"
    ROWS = "rows"
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    CLOSING = "closing"


class ExitReason(StrEnum):
    """The end of a worker's life, as the supervisor judged it at the exit."""

    ASKED = "asked"
    CRASH = "crash"
    STALL = "stall"
    LOAD_ERROR = "load_error"
    SPAWN_ERROR = "spawn_error"
    VERSION = "version"
    INTERNAL = "internal"


class DeathCause(StrEnum):
    """The class of a death: what people would look for first."""

    OUT_OF_MEMORY = "out of memory"
    GPU_TIMEOUT = "GPU time-out"
    GPU_FAULT_ELSEWHERE = "GPU fault of another process"
    NO_DEVICE = "no usable device"
    MODEL_MISSING = "model missing"
    BAD_MODEL = "bad model"
    RANK_LOST = "rank lost"
    STREAM_ERROR = "stream error"
    UNKNOWN = "unknown"


class FinishReason(StrEnum):
    """The end of a stream that has no error."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TOOL_CALLS = "tool_calls"


class NoticeKind(StrEnum):
    """The kinds of news of a request that waits, or of its stream."""

    QUEUED = "queued"
    LOADING = "loading"
    PREFILLING = "prefilling"
    INTERRUPTED = "interrupted"
    PAUSED = "paused"
    RESUMED = "resumed"
    CHANGED = "changed"


class AnswerForm(StrEnum):
    """Forms that the content of an answer may have to have."""

    TEXT = "text"
    """Anything, with markers of other parts in it."""
    REGEX = "regex"
    """A text that may have markers, too."""
    JSON = "json"
    """One JSON value: a marker in it is a part of a string."""
    CALL = "call"
    """One call of a function, as JSON."""


class Channel(StrEnum):
    """The part of an answer that a piece of text belongs to."""

    CONTENT = "content"
    REASONING = "reasoning"
    TOOL_CALL = "tool_call"
    PROMPT = "prompt"
    """No part of it: what the request asked to be shown of its prompt, before all others."""
