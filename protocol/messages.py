"""Every message of both links. Each docstring says who sends it to whom.

A message travels as one frame, a msgpack map with `type` and its fields (fields that hold their
default are left out), followed by a second frame where the message has a `body`. docs/protocol.md
explains the conversation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from .ids import Generation, ModelName, RequestId, RequestKey
from .states import Batching, Channel, FinishReason, LoadPhase, NoticeKind, WorkerPhase
from .version import PROTOCOL_VERSION


class Message:
    """What can be encoded; `TYPE` is its name on the wire."""

    __slots__ = ()
    TYPE: ClassVar[str]


# ---------------------------------------------------------------- client → supervisor


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate(Message):
    """Client → supervisor: answer this. The body frame holds a `RequestBody`.

    Attributes:
        id: the client's name for the request, unique among its open ones.
        model: who shall answer.
        client: on whose behalf, for fairness; the connection where absent.
        queue_timeout_s: how long it may wait to be dispatched; None for the configured limit.
        first_token_timeout_s: until the first token; 0 or None for no limit of its own.
        timeout_s: until the last token; 0 or None for none.
        notices: whether to be told what the request waits for, with `Notice`.
        resume: whether the answer goes on after its worker has died; it ends there otherwise.
        body: msgpack of `RequestBody.to_wire()`.
        v: the sender's protocol version.
    """

    TYPE: ClassVar[str] = "generate"
    id: RequestId
    model: ModelName
    client: str | None = None
    queue_timeout_s: float | None = None
    first_token_timeout_s: float | None = None
    timeout_s: float | None = None
    notices: bool = False
    resume: bool = True
    v: int = PROTOCOL_VERSION
    body: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(Message):
    """Client → supervisor: end this request now, in whatever state it is."""

    TYPE: ClassVar[str] = "cancel"
    id: RequestId
    v: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping(Message):
    """Client → supervisor: answer with `Reply`."""

    TYPE: ClassVar[str] = "ping"
    id: RequestId
    v: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusQuery(Message):
    """Client → supervisor: answer with `Reply`, whose value is what `status --json` prints.

    Attributes:
        debug: add `stories`, the latest events of each model and what they led to.
    """

    TYPE: ClassVar[str] = "status"
    id: RequestId
    debug: bool = False
    v: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Load(Message):
    """Client → supervisor: have the model READY; answered when it is, or cannot be."""

    TYPE: ClassVar[str] = "load"
    id: RequestId
    model: ModelName
    v: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Unload(Message):
    """Client → supervisor: end the model's process; answered when it is gone."""

    TYPE: ClassVar[str] = "unload"
    id: RequestId
    model: ModelName
    v: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart(Message):
    """Client → supervisor: one new generation; answered when it is READY, or cannot be.

    Attributes:
        now: do not let running requests finish first.
    """

    TYPE: ClassVar[str] = "restart"
    id: RequestId
    model: ModelName
    now: bool = False
    v: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Message):
    """Client → supervisor: end everything; answered at once with the pids that will go.

    Attributes:
        now: do not let running requests finish first.
        timeout_s: how long they may take; None for `drain_timeout_s`.
    """

    TYPE: ClassVar[str] = "stop"
    id: RequestId
    now: bool = False
    timeout_s: float | None = None
    v: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscribe(Message):
    """Client → supervisor: send an `Event` for each state change from now on."""

    TYPE: ClassVar[str] = "subscribe"
    id: RequestId
    v: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Reload(Message):
    """Client → supervisor: read the configuration file again; answered with the names of the
    models that were added, changed and removed, or with `invalid_request`, whose detail has
    `problems`, and nothing has changed then."""

    TYPE: ClassVar[str] = "reload"
    id: RequestId
    v: int = PROTOCOL_VERSION


CLIENT_MESSAGES: tuple[type[Message], ...] = (
    Generate,
    Cancel,
    Ping,
    StatusQuery,
    Load,
    Unload,
    Restart,
    Stop,
    Subscribe,
    Reload,
)

# ---------------------------------------------------------------- supervisor → client


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """How likely a token was: the natural logarithm of its probability, at least -9999.

    Attributes:
        token: its id.
        logprob: after biases, penalties and grammar, before temperature and what follows it.
        text: the token alone; half a character shows as a replacement character.
    """

    token: int
    logprob: float
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """How likely one token of an answer was, and which others were likeliest there.

    Attributes:
        chosen: the token of the answer.
        top: the likeliest ones, the likeliest first; `chosen` may be among them.
    """

    chosen: TokenLogprob
    top: list[TokenLogprob] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class ClientDelta:
    """One piece of one stream, inside `Deltas`; not frozen, since one is made for every token.

    Attributes:
        id: whose.
        seq: counts the pieces of this stream from 0 without a gap.
        text: new text; may be empty while a character or a stop string is half there.
        tokens: new token ids, packed as `ids.pack_tokens` does.
        channel: which part of the answer it belongs to.
        logprobs: of each new token, where the request asked for them.
    """

    id: RequestId
    seq: int
    text: str = ""
    tokens: bytes = b""
    channel: Channel = Channel.CONTENT
    logprobs: list[Logprobs] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Deltas(Message):
    """Supervisor → client: what one engine step gave the streams of this connection."""

    TYPE: ClassVar[str] = "deltas"
    deltas: list[ClientDelta]


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice(Message):
    """Supervisor → client: what a request waits for, when that is news, where it asked to be
    told.

    Attributes:
        id: whose.
        kind: which.
        detail: `queued`: position, from 1, and reason (a `WaitReason`) · `loading`: state, phase,
            fraction · `prefilling`: done and total, in tokens · `interrupted`: cause, tokens_sent
            · `resumed`: times.
    """

    TYPE: ClassVar[str] = "notice"
    id: RequestId
    kind: NoticeKind
    detail: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens counted for one request; `cached_tokens` of the prompt needed no prefill."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where one request's time went, in seconds; `first_token_s` and `total_s` from its arrival."""

    queued_s: float = 0.0
    tokenize_s: float = 0.0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(Message):
    """Supervisor → client: the stream ended well; nothing follows for this id.

    Attributes:
        id: whose.
        seq: the number of pieces that were sent.
        finish_reason: how it ended.
        usage: tokens counted.
        timings: seconds spent.
        seed: what sampling used; None where the request ended before it was dispatched.
        resumed: how many times the stream went on after a crash.
        warnings: sentences for people.
    """

    TYPE: ClassVar[str] = "done"
    id: RequestId
    seq: int
    finish_reason: FinishReason
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    seed: int | None = None
    resumed: int = 0
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Message):
    """Supervisor → client: the request or command ended with an error; nothing follows for this id.

    Attributes:
        id: whose; empty where the message could not be read so far.
        error: what `RemoteError.to_wire` makes.
    """

    TYPE: ClassVar[str] = "failed"
    id: str
    error: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply(Message):
    """Supervisor → client: the answer to a command."""

    TYPE: ClassVar[str] = "reply"
    id: RequestId
    value: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event(Message):
    """Supervisor → client: a model changed its state (to those who subscribed under this id)."""

    TYPE: ClassVar[str] = "event"
    id: RequestId
    value: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive(Message):
    """Supervisor → client: a sign of life each second while something of this client is open."""

    TYPE: ClassVar[str] = "alive"


SUPERVISOR_TO_CLIENT: tuple[type[Message], ...] = (
    Deltas,
    Notice,
    Done,
    Failed,
    Reply,
    Event,
    Alive,
)

# ---------------------------------------------------------------- supervisor → worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """What a worker made of a request: enough to go on with it in another life.

    Attributes:
        prompt_tokens: the prompt's ids, packed as `ids.pack_tokens` does.
        opening: the end of the prompt that opened the answer, which says what part its first token
            belongs to; empty: content.
        parameters: the effective ones, by name.
        seed: what sampling uses.
        fingerprint: of the engine that accepted it.
    """

    prompt_tokens: bytes
    opening: str
    parameters: dict[str, Any]
    seed: int
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where an answer stood when its worker died.

    Attributes:
        acceptance: what the worker that died had made of the request.
        delivered: ids of all tokens that the client was sent, packed as `ids.pack_tokens` does.
    """

    acceptance: Acceptance
    delivered: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch(Message):
    """Supervisor → worker: run this request. The body frame is the client's, unread.

    Attributes:
        key: the supervisor's name for it.
        resume: goes on with an answer; the body is then empty.
        body: msgpack of `RequestBody.to_wire()`.
    """

    TYPE: ClassVar[str] = "dispatch"
    key: RequestKey
    resume: Resume | None = None
    body: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRow(Message):
    """Supervisor → worker: take this request out; it answers with a finished row in any case
    but one: a key it does not know, because its end is already on the way."""

    TYPE: ClassVar[str] = "cancel_row"
    key: RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit(Message):
    """Supervisor → worker: close the engine and exit with code 0."""

    TYPE: ClassVar[str] = "exit"


SUPERVISOR_TO_WORKER: tuple[type[Message], ...] = (Dispatch, CancelRow, Exit)

# ---------------------------------------------------------------- worker → supervisor


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """Worker → supervisor: the first message of an incarnation."""

    TYPE: ClassVar[str] = "hello"
    model: ModelName
    generation: Generation
    token: str
    pid: int
    version: str
    v: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress(Message):
    """Worker → supervisor: how far the load has come; `progress` is from 0 to 1 over all phases."""

    TYPE: ClassVar[str] = "load_progress"
    phase: LoadPhase
    progress: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Message):
    """Worker → supervisor: loaded, materialised, warmed up; send requests.

    Attributes:
        context_length: tokens of prompt and answer together, at most.
        fingerprint: changes when the same request might give another answer.
        backend: `cpu`, `cuda`, `metal` or `fake`.
        versions: of mlx and mlx-lm.
        active_bytes: memory the engine holds after the load.
        batching: how many rows a pass computes without changing an answer.
        batching_reason: why it is not `together`; empty if it is.
        warnings: what a user should know of this model, a sentence each.
    """

    TYPE: ClassVar[str] = "ready"
    context_length: int
    fingerprint: str
    backend: str
    versions: dict[str, str] = field(default_factory=dict)
    active_bytes: int = 0
    batching: Batching = Batching.TOGETHER
    batching_reason: str = ""
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted(Message):
    """Worker → supervisor: the request is valid and tokenised; it will be inserted next."""

    TYPE: ClassVar[str] = "accepted"
    key: RequestKey
    acceptance: Acceptance
    tokenize_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected(Message):
    """Worker → supervisor: the request is wrong, by itself; it held no row.

    Attributes:
        key: whose.
        error: what `RemoteError.to_wire` makes.
    """

    TYPE: ClassVar[str] = "rejected"
    key: RequestKey
    error: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class RowDelta:
    """What one step did for one row in one channel; not frozen, since one is made for every token.

    On the channel `tool_call` the text is one whole call, as a line of JSON.

    Attributes:
        key: whose.
        text: new text.
        tokens: new token ids, packed; absent for a row that only ended.
        channel: which part of the answer.
        finish: set on the row's last delta; by then the row has left the batch.
        prefill_s: from insert to the first token; set with the first token.
        cached_tokens: of the prompt, taken from a cache; set with the first token.
        logprobs: of each new token, where the request asked for them.
        warning: a sentence for people, shown with the result.
    """

    key: RequestKey
    text: str = ""
    tokens: bytes = b""
    channel: Channel = Channel.CONTENT
    logprobs: list[Logprobs] | None = None
    warning: str | None = None
    finish: FinishReason | None = None
    prefill_s: float | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillProgress:
    """How many of a row's prompt tokens have been processed."""

    key: RequestKey
    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Message):
    """Worker → supervisor: everything one engine step gave, in one message.

    Also carries rows that a cancel took out between two steps.

    Attributes:
        step: how many engine steps this worker has made.
        rows: what each row got.
        prefill: how far prompts have come.
    """

    TYPE: ClassVar[str] = "step"
    step: int
    rows: list[RowDelta] = field(default_factory=list)
    prefill: list[PrefillProgress] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat(Message):
    """Worker → supervisor: each second, from a thread of its own; numbers the owner published.

    Attributes:
        step: how many engine steps have ended.
        phase: what the owner thread is doing.
        phase_s: for how long.
        predicted_s: how long the step under way was predicted to take; 0 when idle.
        requests: how many it holds: being tokenised, waiting for a row, in the batch, or ended
            without the supervisor's having been sent so.
        preparing: how many of them are being tokenised.
        sent, received: how many messages the owner thread had sent and taken when it counted them.
        active_bytes: held by the engine's arrays.
        cache_bytes: kept by the allocator for reuse.
        peak_bytes: the most ever held.
        prefill_chunk: tokens of each waiting prompt that a step would process now.
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
    prefill_chunk: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dying(Message):
    """Worker → supervisor: the last message before an exit that nobody asked for.

    Attributes:
        code: the exit code that follows.
        message: one sentence that names the file or the cause; no prompt or answer text.
    """

    TYPE: ClassVar[str] = "dying"
    code: int
    message: str


WORKER_TO_SUPERVISOR: tuple[type[Message], ...] = (
    Hello,
    LoadProgress,
    Ready,
    Accepted,
    Rejected,
    Step,
    Heartbeat,
    Dying,
)
