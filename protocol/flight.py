"""The entries of the flight recorder, which `mlxsup why` explains, and their form in its files.

The core makes an entry when a model changes its state, a worker dies, or a request starts, leaves
its batch, continues or ends; the daemon adds its own start and end. An entry has no text of a
prompt or an answer.
"""

from __future__ import annotations

import json
from dataclasses import field
from typing import ClassVar

from .client_messages import Timings, Usage
from .codec import MAX_LINE_BYTES, DecodeError, read_part, to_map
from .message import Record, record
from .text import escaped

MODELS_FILE_NAME = "mlxsup-flight.jsonl"
"""In the log folder: what happened to the daemon and its models, an entry on each line."""
REQUESTS_FILE_NAME = "mlxsup-flight-requests.jsonl"
"""Next to it: what happened to requests, which come far more often."""

CONTINUES = "continues"
"""The fate of a row that waits to be resumed by the next process."""
PAUSED = "paused"
"""The fate of a row that a user has paused."""

GIVEN_UP = "given_up"
"""The reason of an end that has not been seen: SIGKILL had no effect within its limit."""


class Entry(Record):
    """A fact; `KIND` is its name in the files."""

    __slots__: ClassVar[tuple[str, ...]] = ()
    KIND: ClassVar[str]


@record
class DaemonStarted(Entry):
    """A daemon accepts clients.

    Attributes:
        pid: its process.
        version: of mlxsup.
        before_alive_at: when the daemon before it gave its last sign of life, in seconds since the
            epoch; None if there was none.
    """

    KIND: ClassVar[str] = "daemon_started"
    pid: int
    version: str
    before_alive_at: float | None = None


@record
class DaemonEnded(Entry):
    """A daemon is about to exit with this code."""

    KIND: ClassVar[str] = "daemon_ended"
    code: int


@record
class ModelChanged(Entry):
    """A model has another state.

    Attributes:
        model: its name.
        generation: of its latest process.
        before, after: the states.
        why: why it is wanted, or not.
        note: one phrase for people; may be empty.
    """

    KIND: ClassVar[str] = "model_changed"
    model: str
    generation: int
    before: str
    after: str
    why: str = ""
    note: str = ""


@record
class LostRow(Record):
    """A request that ran when its worker died.

    Attributes:
        id, number: how people, and the supervisor, name it.
        tokens: of its answer, delivered by then.
        fate: `continues`, `paused`, or the code of the error that it ended with.
        is_suspect: whether this death, or one before, accuses it.
    """

    id: str
    number: int
    tokens: int = 0
    fate: str = CONTINUES
    is_suspect: bool = False


@record
class WorkerDied(Entry):
    """A process has ended, or could not be started, or could not be ended.

    Attributes:
        model, generation, pid: which process.
        reason: `asked`, `crash`, `stall`, `load_error`, `spawn_error`, `version`, `internal` or
            `given_up`.
        code, signal: what it exited with; empty: the other one says how it ended.
        cause: the class of its cause, `out of memory`.
        detail: what was wrong with it, or its last words.
        ended_by: why the supervisor was ending it, `stall`; empty if it ended by itself.
        evidence: what its end says about its requests: `none`, `asked`, `accuses`, `out of memory`.
        verdict: what was decided about them, in one sentence; may be empty.
        doing: what it was doing, `decode` or `weights 40%`; may be empty.
        steps: engine steps that it had ended.
        footprint_bytes: resident memory of the process, as last measured.
        active_bytes, cache_bytes: what its engine held, and kept for reuse, by its last beat.
        limit_bytes: its memory limit; 0 for none.
        machine_bytes: memory of the machine; 0 if it was not measured.
        ready_s: how long it had been READY; None: it never was.
        rows: the requests that ran, and what became of each.
        more_rows: how many are left out of `rows`.
        after: the model's state after that.
        retry_in_s: when it is started again, if that has a time.
        failure: why the model is FAILED; empty if it is not.
        crashes, most_crashes, window_s: how many crashes its restart window counts, how many it
            may, and how long that is.
    """

    KIND: ClassVar[str] = "worker_died"
    model: str
    generation: int
    reason: str
    after: str
    pid: int | None = None
    code: int | None = None
    signal: str = ""
    cause: str = "unknown"
    detail: str = ""
    ended_by: str = ""
    evidence: str = "none"
    verdict: str = ""
    doing: str = ""
    steps: int = 0
    footprint_bytes: int = 0
    active_bytes: int = 0
    cache_bytes: int = 0
    limit_bytes: int = 0
    machine_bytes: int = 0
    ready_s: float | None = None
    rows: list[LostRow] = field(default_factory=list)
    more_rows: int = 0
    retry_in_s: float | None = None
    failure: str = ""
    crashes: int = 0
    most_crashes: int = 0
    window_s: float = 0.0


@record
class RequestStarted(Entry):
    """A request was handed to a worker for the first time.

    Attributes:
        id, number, model, client: which, and on whose behalf.
        generation: of the process.
        queued_s: how long it had waited.
    """

    KIND: ClassVar[str] = "request_started"
    id: str
    number: int
    model: str
    client: str = ""
    generation: int = 0
    queued_s: float = 0.0


@record
class RequestPaused(Entry):
    """The row of a request has left its batch without an end.

    Attributes:
        reason: see `protocol.states.PauseReason`.
        tokens: of its answer, delivered by then.
    """

    KIND: ClassVar[str] = "request_paused"
    id: str
    number: int
    model: str
    reason: str
    tokens: int = 0


@record
class RequestContinued(Entry):
    """A request says something again.

    Attributes:
        after: `crash` or `pause`.
        generation: of the process that continues it.
        tokens: of its answer, delivered before.
    """

    KIND: ClassVar[str] = "request_continued"
    id: str
    number: int
    model: str
    after: str
    generation: int = 0
    tokens: int = 0


PROMPT_ONLY = "prompt_only"
"""The outcome of a request that asked for no token: it has its prompt counted or judged."""


@record
class RequestEnded(Entry):
    """A request has its end.

    Attributes:
        outcome: its finish reason, the code of its error, `gone` if its client is, or
            `prompt_only`.
        usage, timings: what it took, and where its time went.
        resumed, paused: how many times it has continued after a crash, and after a pause.
        warnings: sentences of its result.
    """

    KIND: ClassVar[str] = "request_ended"
    id: str
    number: int
    model: str
    outcome: str
    client: str = ""
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    resumed: int = 0
    paused: int = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float | None:
        """Return the speed of its answer after its first token, pauses and crashes included; None
        before its second token."""
        took_s = self.timings.total_s - self.timings.first_token_s
        tokens = self.usage.completion_tokens
        return (tokens - 1) / took_s if tokens > 1 and took_s > 0 else None


OF_DAEMON = (DaemonStarted, DaemonEnded)
OF_MODELS = (ModelChanged, WorkerDied)
OF_REQUESTS = (RequestStarted, RequestPaused, RequestContinued, RequestEnded)

_KINDS: dict[str, type[Entry]] = {cls.KIND: cls for cls in (*OF_DAEMON, *OF_MODELS, *OF_REQUESTS)}


@record
class Recorded(Record):
    """An entry with its place and time.

    Attributes:
        number: counts the entries of one daemon, from 1; 0 for its start.
        at: seconds since the epoch.
        entry: what happened.
    """

    number: int
    at: float
    entry: Entry

    def to_map(self) -> dict[str, object]:
        """Return `n`, `at` and `kind`, and the fields that do not have their default."""
        return {"n": self.number, "at": self.at, "kind": self.entry.KIND, **to_map(self.entry)}

    def to_line(self) -> bytes:
        """Return a line of a file."""
        return escaped(json.dumps(self.to_map(), ensure_ascii=False)).encode() + b"\n"


def read_recorded(value: object) -> Recorded:
    """Read what `Recorded.to_map` made; fields that this version does not know are ignored.

    Raises:
        ValueError: it is damaged, or of a kind that this version does not know.
    """
    if not isinstance(value, dict):
        raise ValueError("an entry is a map")
    rest = dict(value)
    number, at, kind = rest.pop("n", None), rest.pop("at", None), rest.pop("kind", None)
    if type(number) is not int or type(at) not in (int, float) or not 0 <= at < 1e11:
        raise ValueError("an entry has a number and a time")
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ValueError("an entry has a kind")
    try:
        return Recorded(number=number, at=float(at), entry=read_part(cls, rest, is_strict=False))
    except DecodeError as error:
        raise ValueError(error.message) from None


def read_line(line: str) -> Recorded:
    """Read a line of a file.

    Raises:
        ValueError: it is damaged.
    """
    if len(line) > MAX_LINE_BYTES:  # no entry takes that much
        raise ValueError("a line is too long")
    try:
        return read_recorded(json.loads(line))
    except RecursionError:
        raise ValueError("a line is nested too deeply") from None
