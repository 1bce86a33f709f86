"""One request as the record of what was said knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from mlxsup.protocol.client_messages import Done, Failed, Generate
from mlxsup.protocol.ids import ModelName, RequestId, RequestKey
from mlxsup.protocol.states import Priority
from mlxsup.protocol.worker_messages import Acceptance

from .plan import Prompt


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
        keep_alive_s: how long its model stays once it is idle, as the client said; None: not said.
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
    keep_alive_s: float | None = None
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
            keep_alive=self.keep_alive_s,
        )
