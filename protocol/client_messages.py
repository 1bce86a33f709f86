"""The messages between clients and the supervisor. Each docstring says who sends it to whom.

A message travels as one frame, a msgpack map with `type` and its fields (fields with their default
are left out), followed by a second frame if the message has a `body`. docs/protocol.md
explains the conversation. Messages about open requests of all clients name one by its id or, as
`#12`, by the number that `requests` and `status` show for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, get_args

from .codec import ErrorMap, Form
from .ids import ModelName, RequestId
from .message import Command, Message, Record, record
from .states import FinishReason, NoticeKind, Priority

# ---------------------------------------------------------------- client → supervisor


@record
class Generate(Command):
    """Client → supervisor: answer this. The body frame contains a `RequestBody`.

    Attributes:
        model: the model that must answer.
        client: on whose behalf, for limits and fairness, if `[clients]` lists the name; otherwise
            the process behind the connection, or with the name `ids.TERMINAL` all processes of
            its terminal that give it.
        priority: its class; None for that of its client.
        queue_timeout_s: how long it may wait to be dispatched; None for the configured limit.
        first_token_timeout_s: until the first token; 0 for no limit, None for the configured one.
        timeout_s: until the last token; 0 or None for none.
        notices: whether to send `Notice` messages that say what the request is waiting for.
        resume: whether the answer continues after its worker has died; otherwise it ends there.
        keep_alive: how long the model stays loaded once it is idle, until the next request says
            otherwise, in seconds; -1: for ever; None: as configured.
        body: msgpack of `RequestBody.to_wire()`.
    """

    TYPE: ClassVar[str] = "generate"
    model: ModelName
    client: str | None = None
    priority: Priority | None = None
    queue_timeout_s: float | None = None
    first_token_timeout_s: float | None = None
    timeout_s: float | None = None
    notices: bool = False
    resume: bool = True
    keep_alive: float | None = None
    body: bytes = b""


class Cancel(Command):
    """Client → supervisor: end this request now, at any stage."""

    __slots__ = ()
    TYPE: ClassVar[str] = "cancel"


@record
class OfRequest(Command):
    """Client → supervisor: something about an open request of any connection.

    Attributes:
        request: the id of the request, or, as `#12`, the number that the status shows for it.
    """

    request: RequestId


@record
class Prioritize(OfRequest):
    """Client → supervisor: give a request another class.

    Attributes:
        priority: its class from now on; its wait so far no longer counts.
    """

    TYPE: ClassVar[str] = "prioritize"
    priority: Priority


class Ping(Command):
    """Client → supervisor: answer with `Reply`."""

    __slots__ = ()
    TYPE: ClassVar[str] = "ping"


@record
class StatusQuery(Command):
    """Client → supervisor: answer with `Reply`, whose value is what `status --json` prints.

    Attributes:
        debug: add `flight`, the latest entries of the flight recorder.
    """

    TYPE: ClassVar[str] = "status"
    debug: bool = False


@record
class Load(Command):
    """Client → supervisor: make the model READY; answered when it is, or when it cannot be.

    Attributes:
        dry_run: change nothing; answer at once with what would have to go.
        keep_alive: as in `Generate`, but not 0.
        context_length: tokens of prompt and answer together, as the key of the configuration, until
            that is read again; None: as it is.
    """

    TYPE: ClassVar[str] = "load"
    model: ModelName
    dry_run: bool = False
    keep_alive: float | None = None
    context_length: int | None = None


@record
class Unload(Command):
    """Client → supervisor: end the model's process; answered when it is gone."""

    TYPE: ClassVar[str] = "unload"
    model: ModelName


@record
class Restart(Command):
    """Client → supervisor: start a new generation; answered when it is READY, or when it cannot be.

    Attributes:
        now: do not let running requests finish first.
    """

    TYPE: ClassVar[str] = "restart"
    model: ModelName
    now: bool = False


@record
class RequestsQuery(Command):
    """Client → supervisor: answer with `Reply`: every open request, and how far it is.

    Attributes:
        client: only the requests of this account, or of the process or terminal with this number;
            None for all.
    """

    TYPE: ClassVar[str] = "requests"
    client: str | None = None


class CancelRequest(OfRequest):
    """Client → supervisor: end it; answered at once."""

    __slots__ = ()
    TYPE: ClassVar[str] = "cancel_request"


class Attach(OfRequest):
    """Client → supervisor: send me its stream from its first token; under this id come `Deltas` and
    an end as for a request of one's own. A `Cancel` of this id only ends the listening."""

    __slots__ = ()
    TYPE: ClassVar[str] = "attach"


class PauseRequest(OfRequest):
    """Client → supervisor: take this request out of its batch, or out of the line, and let it wait
    until it is resumed; answered at once."""

    __slots__ = ()
    TYPE: ClassVar[str] = "pause"


class ResumeRequest(OfRequest):
    """Client → supervisor: let a paused request continue; answered at once."""

    __slots__ = ()
    TYPE: ClassVar[str] = "resume"


@record
class Stop(Command):
    """Client → supervisor: end everything; answered at once with the pids that will go.

    Attributes:
        now: do not let running requests finish first.
        timeout_s: how long they may take; None for `drain_timeout_s`.
    """

    TYPE: ClassVar[str] = "stop"
    now: bool = False
    timeout_s: float | None = None


class Subscribe(Command):
    """Client → supervisor: send an `Event` for each state change from now on."""

    __slots__ = ()
    TYPE: ClassVar[str] = "subscribe"


@record
class Reload(Command):
    """Client → supervisor: read the configuration file again; answered with the names of the
    models that were added, changed and removed, or with `invalid_request` and the `problems` in its
    detail, in which case nothing has changed.

    Attributes:
        dry_run: change nothing; answered with what would change and what would happen to whom.
    """

    TYPE: ClassVar[str] = "reload"
    dry_run: bool = False


@record
class AddModel(Command):
    """Client → supervisor: write one more model into the configuration file, and serve it; answered
    as `Reload` is, with the `model`, its `files` (OWNER/NAME or a folder), and `config_path`, nil
    if the daemon has no file and forgets the model when it ends.

    Attributes:
        model: OWNER/NAME, its address on the hub, an absolute folder, or the name of a model that
            is found on the daemon's machine.
        name: what to call it; None: by a short name. It becomes an alias of a model that is there,
            and the answer has `alias`.
        revision: of a repository; None: that of the address, or `main`.
    """

    TYPE: ClassVar[str] = "add_model"
    model: str
    name: str | None = None
    revision: str | None = None


@record
class RemoveModel(Command):
    """Client → supervisor: take a model out of the configuration file, and end it once its requests
    have finished; its files stay. An alias is taken from its model. Answered as `AddModel` is."""

    TYPE: ClassVar[str] = "remove_model"
    model: ModelName


@record
class Configure(Command):
    """Client → supervisor: set keys of the configuration file or take them out, and do as for
    `Reload`; answered as `Reload` is, with the `values` by key and `config_path`.

    Attributes:
        changes: by the key's whole name (`models.NAME.KEY`, `defaults.KEY`, `clients.NAME.KEY`),
            the value as a text of the command line; nil takes the key out.
    """

    TYPE: ClassVar[str] = "configure"
    changes: dict[str, Any]


@record
class SettingsQuery(Command):
    """Client → supervisor: tell the `settings` of a model in the configuration file, each with
    `key`, `label`, `does`, `takes`, `value`, `default` and `choices`."""

    TYPE: ClassVar[str] = "settings"
    model: ModelName


ClientMessage = (
    Generate
    | Cancel
    | Prioritize
    | Ping
    | StatusQuery
    | Load
    | Unload
    | Restart
    | PauseRequest
    | ResumeRequest
    | RequestsQuery
    | CancelRequest
    | Attach
    | Stop
    | Subscribe
    | Reload
    | AddModel
    | RemoveModel
    | Configure
    | SettingsQuery
)
"""What a client may send."""

CLIENT_MESSAGES: tuple[type[ClientMessage], ...] = get_args(ClientMessage)

# ---------------------------------------------------------------- supervisor → client


@dataclass(slots=True)
class ClientDelta:
    """One piece of one stream, inside `Deltas`; not frozen, because one is made for every token.

    Attributes:
        id: the request this belongs to.
        seq: counts the pieces of this stream from 0, without gaps.
        tokens: new token ids, packed as `ids.pack_tokens` does.
        body: what else there is to show, as the worker packed it: see `delta.read_body`.
    """

    id: RequestId
    seq: int
    tokens: bytes
    body: bytes


def _plain(deltas: list[ClientDelta]) -> list[dict[str, Any]]:
    """Return all fields of each piece, in a fifth of the time of looking for those to leave out."""
    return [
        {"id": one.id, "seq": one.seq, "tokens": one.tokens, "body": one.body} for one in deltas
    ]


@record
class Deltas(Message):
    """Supervisor → client: what one engine step produced for the streams of this connection."""

    TYPE: ClassVar[str] = "deltas"
    deltas: Annotated[list[ClientDelta], Form(to_plain=_plain)]


@record
class Notice(Message):
    """Supervisor → client: what a request is waiting for, when that changes and if it asked for
    notices.

    Attributes:
        id: the request this belongs to.
        kind: what it is waiting for, or what happened.
        detail: `queued`: position, from 1, and reason (a `WaitReason`) · `loading`: state, phase,
            fraction · `prefilling`: done and total, in tokens · `interrupted`: cause, tokens_sent
            · `paused`: reason (a `PauseReason`), tokens_sent · `resumed`: times, after (`crash` or
            `pause`).
    """

    TYPE: ClassVar[str] = "notice"
    id: RequestId
    kind: NoticeKind
    detail: dict[str, Any]


@record
class Usage(Record):
    """The cost of one request: tokens, of which `cached_tokens` needed no prefill, its share of the
    time that the engine worked, in seconds, and how many tokens were guessed for it (`drafted`), of
    which `draft_accepted` are tokens of the answer."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    engine_s: float = 0.0
    drafted: int = 0
    draft_accepted: int = 0


@record
class Timings(Record):
    """The times of one request, in seconds; `first_token_s` and `total_s` from its arrival.

    `paused_s` is the time from each pause until it was dispatched again.
    """

    queued_s: float = 0.0
    tokenize_s: float = 0.0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0
    paused_s: float = 0.0


CHANGED = "changed: "
"""The beginning of a warning that says what was changed in the messages of a request."""


@record
class Done(Message):
    """Supervisor → client: the stream ended well; nothing follows for this id.

    Attributes:
        id: the request this belongs to.
        seq: the number of pieces that were sent.
        finish_reason: how it ended.
        usage: tokens counted, and engine seconds.
        timings: seconds spent.
        seed: the one that sampling used; None if the request ended before it was dispatched.
        resumed: how many times the stream continued after a crash or a restart.
        paused: how many times it continued after a pause.
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
    paused: int = 0
    warnings: list[str] = field(default_factory=list)


@record
class Failed(Message):
    """Supervisor → client: the request or command ended with an error; nothing follows for this id.

    Attributes:
        id: the request this belongs to; empty if the message could not be read that far.
    """

    TYPE: ClassVar[str] = "failed"
    id: str
    error: ErrorMap


@record
class Reply(Message):
    """Supervisor → client: the answer to a command."""

    TYPE: ClassVar[str] = "reply"
    id: RequestId
    value: dict[str, Any]


@record
class Event(Message):
    """Supervisor → client: a model changed its state; sent for a subscription under this id."""

    TYPE: ClassVar[str] = "event"
    id: RequestId
    value: dict[str, Any]


@record
class Alive(Message):
    """Supervisor → client: a sign of life every second while this client has anything open."""

    TYPE: ClassVar[str] = "alive"


MessageToClient = Deltas | Notice | Done | Failed | Reply | Event | Alive
"""Everything that the supervisor sends to clients."""

SUPERVISOR_TO_CLIENT: tuple[type[MessageToClient], ...] = get_args(MessageToClient)
