"""The messages between the supervisor and a worker. Each docstring says who sends it to whom.

They travel like those of clients (`client_messages.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

from .cache_layers import CacheLayers
from .codec import ErrorMap, Size
from .delta import pack_body
from .ids import Generation, ModelName, RequestKey
from .message import Logprobs, Message, Record, record
from .states import (
    Batching,
    Channel,
    LoadPhase,
    Priority,
    WorkerPhase,
)
from .step_batch import Row, Rows
from .tasks import Task
from .version import PROTOCOL_VERSION

# ---------------------------------------------------------------- supervisor → worker


@record
class Acceptance(Record):
    """The form that a worker gave a request: enough to continue it in another life.

    Attributes:
        prompt_tokens: the prompt's ids, packed as `ids.pack_tokens` does.
        opening: the end of the prompt that opened the answer, which says which part its first
            token belongs to; empty: content.
        parameters: the effective ones, by name.
        seed: what sampling uses.
        fingerprint: of the engine that accepted it.
        needs_body: whether another life needs the body, too: ids do not tell what pictures show.
    """

    prompt_tokens: bytes
    opening: str
    parameters: dict[str, Any]
    seed: int
    fingerprint: str
    needs_body: bool = False


@record
class Resume(Record):
    """The progress of an answer whose worker died, or whose row was paused.

    Attributes:
        acceptance: what the worker that first took the request had made of it.
        delivered: ids of all tokens that the client was sent, packed as `ids.pack_tokens` does.
        shown: how many pieces of the prompt the client was sent.
    """

    acceptance: Acceptance
    delivered: bytes
    shown: int = 0


@record
class Dispatch(Message):
    """Supervisor → worker: run this request. The body frame is the client's, unchanged.

    Attributes:
        key: the supervisor's name for it.
        resume: an answer to continue; the body is then empty.
        priority: the class in which it runs: short of memory, rows of the lowest leave first.
        may_leave: whether its row may leave the batch and continue later; if not, it leaves last.
        adapter: one of the model's adapters; empty: the model itself.
        body: msgpack of `RequestBody.to_wire()`.
    """

    TYPE: ClassVar[str] = "dispatch"
    key: RequestKey
    resume: Resume | None = None
    adapter: str = ""
    priority: Priority = Priority.NORMAL
    may_leave: bool = True
    body: bytes = b""


@record
class CancelRow(Message):
    """Supervisor → worker: take this request out; it always answers with a finished row, except
    if it does not know the key, because the request's end is already on the way."""

    TYPE: ClassVar[str] = "cancel_row"
    key: RequestKey


@record
class Leases(Message):
    """Supervisor → worker: whether a chunk of a long prompt needs a lease from now on; at first
    none does. A lease that was asked for comes in any case."""

    TYPE: ClassVar[str] = "leases"
    are_needed: bool


@record
class Lease(Message):
    """Supervisor → worker: the lease that it asked for; its next `Step` gives it back."""

    TYPE: ClassVar[str] = "lease"


@record
class PauseRow(Message):
    """Supervisor → worker: take this request out, but not for good; the answer is a row that was
    paused, or its end, if that is already on the way.

    Attributes:
        key: the request to take out.
        keep: whether to keep what was computed for it until it is dispatched again, or dropped.
    """

    TYPE: ClassVar[str] = "pause_row"
    key: RequestKey
    keep: bool


@record
class DropKept(Message):
    """Supervisor → worker: this paused request does not come back; nothing answers."""

    TYPE: ClassVar[str] = "drop_kept"
    key: RequestKey


@record
class Render(Message):
    """Supervisor → worker: show once more what was delivered of an answer, for a client that joins
    its stream: the supervisor keeps the ids of the tokens, and not their text.

    Attributes:
        number: the supervisor's name for this question.
        opening, parameters, seed, fingerprint: of the answer's `Acceptance`.
        delivered: ids of the tokens that its client was sent, packed as `ids.pack_tokens` does; at
            least one.
        before: the last token of the prompt, packed likewise, behind which the answer stands if the
            prompt was shown.
    """

    TYPE: ClassVar[str] = "render"
    number: int
    opening: str
    parameters: dict[str, Any]
    seed: int
    fingerprint: str
    delivered: bytes
    before: bytes = b""


@record
class GiveBack(Message):
    """Supervisor → worker: free what is only kept for reuse; nothing answers."""

    TYPE: ClassVar[str] = "give_back"


@record
class SetBudget(Message):
    """Supervisor → worker: how much memory its rows may take from now on; at first there is no
    limit. What does not fit leaves the batch, unasked, for `PauseReason.MEMORY`.

    Attributes:
        number: counts the budgets of one process, from 1; `Heartbeat` says which one is kept to.
        rows_bytes: what the caches of all rows (see `cache_cost`) and the states that are kept of
            paused ones may take together.
        gives_back: whether to free, at once, what is only kept for speed: known prefixes, and
            memory that the allocator keeps for reuse.
    """

    TYPE: ClassVar[str] = "set_budget"
    number: int
    rows_bytes: int
    gives_back: bool = False


@record
class LogLevel(Message):
    """Supervisor → worker: log from this level on; nothing answers."""

    TYPE: ClassVar[str] = "set_log_level"
    level: str


@record
class Exit(Message):
    """Supervisor → worker: close the engine and exit with code 0."""

    TYPE: ClassVar[str] = "exit"


MessageToWorker = (
    Dispatch
    | CancelRow
    | PauseRow
    | DropKept
    | Render
    | Leases
    | Lease
    | SetBudget
    | GiveBack
    | LogLevel
    | Exit
)
"""Everything that the supervisor sends to workers."""

SUPERVISOR_TO_WORKER: tuple[type[MessageToWorker], ...] = get_args(MessageToWorker)

# ---------------------------------------------------------------- worker → supervisor


@record
class Hello(Message):
    """Worker → supervisor: the first message of an incarnation."""

    TYPE: ClassVar[str] = "hello"
    model: ModelName
    generation: Generation
    token: str
    pid: int
    version: str
    v: int = PROTOCOL_VERSION


@record
class LoadProgress(Message):
    """Worker → supervisor: how far the load has come; `progress` is from 0 to 1 over all phases."""

    TYPE: ClassVar[str] = "load_progress"
    phase: LoadPhase
    progress: float


@record
class Ready(Message):
    """Worker → supervisor: loaded, materialised, warmed up; send requests.

    Attributes:
        context_length: tokens of prompt and answer together, at most.
        fingerprint: changes when the same request might give another answer.
        backend: `cpu`, `cuda`, `metal` or `fake`.
        versions: those of mlx and mlx-lm.
        active_bytes: memory the engine holds after the load.
        own_bytes: memory that its process holds besides; None: it cannot tell, as on a GPU.
        cache_layers: what its layers keep for each row; empty: not known.
        batching: how many rows a pass computes without changing an answer.
        batching_reason: why it is not `together`; empty if it is.
        warnings: what users should know about this model, a sentence each.
        task: `generate`, `embed` or `rerank`.
        dimensions: of its embeddings; 0 for a model without any.
        takes_pictures: true if messages may have pictures.
        draft_tokens: how many tokens a row guesses at once, at most; 0: rows do not guess.
        parallel: how several hosts divide the model, `tensor` or `pipeline`; empty: they do not.
        ranks: the other ranks of its group; others of the configuration were left out.
    """

    TYPE: ClassVar[str] = "ready"
    context_length: int
    fingerprint: str
    backend: str
    versions: dict[str, str] = field(default_factory=dict)
    active_bytes: Size = 0
    own_bytes: Size | None = None
    cache_layers: list[CacheLayers] = field(default_factory=list)
    batching: Batching = Batching.TOGETHER
    batching_reason: str = ""
    warnings: list[str] = field(default_factory=list)
    task: Task = Task.GENERATE
    dimensions: int = 0
    takes_pictures: bool = False
    draft_tokens: int = 0
    parallel: str = ""
    ranks: list[int] = field(default_factory=list)


@record
class Accepted(Message):
    """Worker → supervisor: the request is valid and tokenised; it will be inserted next.

    Attributes:
        key: the request this belongs to.
        acceptance: what was made of it.
        tokenize_s: how long that took, waiting included.
        warnings: what was changed in its messages, a sentence each.
    """

    TYPE: ClassVar[str] = "accepted"
    key: RequestKey
    acceptance: Acceptance
    tokenize_s: float
    warnings: list[str] = field(default_factory=list)


@record
class Rejected(Message):
    """Worker → supervisor: something is wrong with the request itself; it held no row."""

    TYPE: ClassVar[str] = "rejected"
    key: RequestKey
    error: ErrorMap


@dataclass(slots=True, kw_only=True)
class RowDelta(Row):
    """The work of one step for one row in one channel; not frozen: one is made for every token.

    It arrives as a `PackedRow`. On the channel `tool_call` the text is one complete call, as a line
    of JSON.

    Attributes:
        text: new text.
        channel: which part of the answer.
        logprobs: of each new token, where the request asked for them.
        stop: with `finish`, the stop string that has ended the answer, if one has.
        sampling: with the first token, see `DeltaBody`.
        stop_token: the same for one of the request's `stop_token_ids`.
        prompt_tokens: see `DeltaBody`.
        vector: see `DeltaBody`.
    """

    text: str = ""
    channel: Channel = Channel.CONTENT
    logprobs: list[Logprobs] | None = None
    stop: str | None = None
    sampling: Mapping[str, float] | None = None
    stop_token: int | None = None
    prompt_tokens: bytes = b""
    vector: bytes | None = None

    @property
    def body(self) -> bytes:
        """Return what the client is shown of it, packed; empty if that is nothing."""
        has_end = self.stop is not None or self.stop_token is not None
        if not (self.text or self.tokens or self.logprobs or self.prompt_tokens or has_end):
            return b""
        return pack_body(self)


@record
class PrefillProgress(Record):
    """The progress of reading a row's prompt, and what was delivered of its answer.

    Attributes:
        key: the request this belongs to.
        done: tokens read, those from a cache included.
        total: tokens to read.
        computed: tokens that this step computed.
    """

    key: RequestKey
    done: int
    total: int
    computed: int = 0


@record
class RowDrafts(Record):
    """The outcome of a row's guesses in a step.

    Attributes:
        key: the request this belongs to.
        read: how many tokens it had guessed.
        accepted: how many of them the row drew.
    """

    key: RequestKey
    read: int
    accepted: int


@record
class Step(Message):
    """Worker → supervisor: everything that one engine step produced, in one message.

    Also carries what there is to say between two steps: rows that a cancel or a pause took out, and
    leases.

    Attributes:
        step: how many engine steps this worker has made.
        rows: what each row got.
        prefill: how far prompts have come.
        took_s: how long the engine worked on the step: no socket, no waiting, and no time in which
            this process was stopped or the machine slept; 0 if there was none.
        decode_s: how much of it went to the rows that got a token, as predicted from steps that
            read no prompt; 0 if there are none.
        between_steps: how many of the first rows left between two steps, or had nothing left to
            compute: this step did nothing for them.
        reads_on: whether a long prompt is left to read (see `Engine.has_long_prompt`).
        returns_lease: whether the worker gives its lease back.
        wants_lease: whether it asks for one: until `Lease` comes it only decodes.
        only_waits: whether it has asked for one, and no row decodes: it computes nothing.
        drafts: of the rows that had guessed.
    """

    TYPE: ClassVar[str] = "step"
    step: int
    rows: Rows = field(default_factory=list)
    prefill: list[PrefillProgress] = field(default_factory=list)
    took_s: float = 0.0
    decode_s: float = 0.0
    between_steps: int = 0
    reads_on: bool = False
    returns_lease: bool = False
    wants_lease: bool = False
    only_waits: bool = False
    drafts: list[RowDrafts] = field(default_factory=list)


@record
class Rendered(Message):
    """Worker → supervisor: the answer to `Render`.

    Attributes:
        number: of the question.
        bodies: what a client is shown, packed by `delta.pack_body`, at least one; empty if
            this worker cannot say, because it is of another model than the one that answers.
    """

    TYPE: ClassVar[str] = "rendered"
    number: int
    bodies: list[bytes]


@record
class RankState(Record):
    """The state of another rank, as the leader of its group sees it.

    Attributes:
        rank: its place among the hosts of the configuration, from 1.
        name: of the rank and its host, for people.
        state: `starting` until its first frame, then `loading`, then `ready`; `stopped` without a
            process.
        silent_s: seconds since its latest frame.
        is_behind: whether it has not begun the latest call, or has become silent.
        active_bytes: memory that its arrays took after the load.
    """

    rank: int = 0
    name: str = ""
    state: str = "stopped"
    silent_s: float = 0.0
    is_behind: bool = False
    active_bytes: int = 0


@record
class Heartbeat(Message):
    """Worker → supervisor: twice a second, from its own thread; numbers that the owner published.

    Attributes:
        step: how many engine steps have ended.
        phase: what the owner thread is doing.
        phase_s: for how long.
        predicted_s: how long the step under way was predicted to take; 0 when idle.
        requests: how many it holds: being tokenised, waiting for a row, in the batch, or ended
            but not yet reported.
        preparing: how many of them are being tokenised.
        sent, received: how many messages the owner thread had sent and taken when it counted them.
        active_bytes: memory held by the engine's arrays.
        cache_bytes: memory kept by the allocator for reuse.
        peak_bytes: the most memory ever held.
        kept_bytes: those of the active ones that hold the state of paused rows.
        prefix_bytes: those of them that hold the prefixes of earlier prompts.
        budget: the number of the latest `SetBudget` that its rows keep to; 0 for none.
        interleaved_s: how long steps took since the load in which rows decoded while prompts were
            read.
        interleaved_decode_s: how much of that the rows would have needed alone.
        shapes_seen: steps for requests that were the first of their shape, where the device
            compiles or plans something for each; what the warm-up has run is not among them.
        shapes_s: how long these steps took.
        ranks: the other ranks of its group, from rank 1.
    """

    TYPE: ClassVar[str] = "heartbeat"
    step: int
    phase: WorkerPhase
    phase_s: float
    predicted_s: float = 0.0
    requests: int = 0
    preparing: int = 0
    sent: int = 0
    received: int = 0
    active_bytes: int = 0
    cache_bytes: int = 0
    peak_bytes: int = 0
    kept_bytes: int = 0
    prefix_bytes: int = 0
    budget: int = 0
    interleaved_s: float = 0.0
    interleaved_decode_s: float = 0.0
    shapes_seen: int = 0
    shapes_s: float = 0.0
    ranks: list[RankState] = field(default_factory=list)


@record
class Dying(Message):
    """Worker → supervisor: the last message before an exit that was not asked for.

    Attributes:
        code: the exit code to come.
        message: one sentence that names the file or the cause; no prompt or answer text.
    """

    TYPE: ClassVar[str] = "dying"
    code: int
    message: str


WorkerMessage = (
    Hello | LoadProgress | Ready | Accepted | Rejected | Step | Rendered | Heartbeat | Dying
)
"""Everything that workers send."""

WORKER_TO_SUPERVISOR: tuple[type[WorkerMessage], ...] = get_args(WorkerMessage)
