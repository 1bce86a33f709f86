"""The open requests of one connection, and what each message means for them. No sockets, no clock.

The synchronous and the asynchronous client share this: a message comes in, deliveries come out.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlxsup.protocol.client_messages import (
    SUPERVISOR_TO_CLIENT,
    Alive,
    Cancel,
    ClientDelta,
    Deltas,
    Done,
    Event,
    Failed,
    MessageToClient,
    Reply,
    Usage,
)
from mlxsup.protocol.client_messages import Notice as NoticeMessage
from mlxsup.protocol.codec import DecodeError, Decoder, encode
from mlxsup.protocol.delta import read_body
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.ids import RequestId, unpack_tokens
from mlxsup.protocol.message import Logprobs
from mlxsup.protocol.states import Channel, FinishReason

from .errors import ConnectionLost, RequestError, SubscriptionClosed, internal
from .results import Delta, Notice, Result
from .text_pieces import TextPiece, read_text_pieces
from .tool_calls import read_tool_calls

SILENCE_LIMIT_S = 3.0
"""The supervisor sends `Alive` each second while something is open; if three are
missing, it is gone, or as good as gone (P2)."""

DOUBT_S = 0.4
"""How long to wait before looking at a silent supervisor once more: if the whole machine stood
still for too short a time for the clock to notice, the supervisor runs again from the same moment
as this process, and sends at once (P2 allows half a second)."""

BUSY_LIMIT_S = 30.0
"""How long a supervisor that wants to run may be silent: others may take the CPU from it, and a
loop that never ends looks the same."""

FORKED = "the client belongs to the process that was forked; make one in this process"


class Owner:
    """The process that made a client; one that is forked from it has neither its threads nor its
    connection."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_forked(self) -> bool:
        """True in a process that was forked from this one."""
        return self._pid != os.getpid()

    def check(self) -> None:
        """Raise RuntimeError in a forked process."""
        if self.is_forked:
            raise RuntimeError(FORKED)


Item = Delta | Notice | Result | dict[str, Any] | Exception
"""What goes into an inbox: pieces, notices, a result, a reply, events, or the error at the end."""


class Inbox(Protocol):
    """The receiver of the deliveries of one request, command or subscription.

    A stream's inbox is bounded by the tokens of its answer, a command's by its one reply, a
    subscription's by the state changes since its owner last looked.
    """

    def put(self, item: Item) -> None:
        """Take one item; never blocks."""


Delivery = tuple[Inbox, Item]
"""An item for an inbox."""


@dataclass(slots=True)
class Outcome:
    """The consequences of a message: items to deliver, in order, and frames to send."""

    deliveries: list[Delivery] = field(default_factory=list)
    sends: list[list[bytes]] = field(default_factory=list)


@dataclass(slots=True)
class _Open:
    """A request, command or subscription that has not ended."""

    inbox: Inbox
    is_stream: bool = False
    is_subscription: bool = False
    is_cancelled: bool = False
    next_seq: int = 0
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] | None = None
    stop: str | None = None
    stop_token: int | None = None
    prompt: str = ""
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] | None = None
    vectors: list[bytes] = field(default_factory=list)

    def result(self, done: Done) -> Result:
        tool_calls, warnings = read_tool_calls("".join(self.tool_calls))
        return Result(
            text="".join(self.text),
            reasoning="".join(self.reasoning),
            tool_calls=tool_calls,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=done.finish_reason,
            stop=self.stop,
            stop_token=self.stop_token,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs,
            vectors=self.vectors,
            usage=done.usage,
            timings=done.timings,
            seed=done.seed,
            resumed=done.resumed,
            paused=done.paused,
            warnings=[*done.warnings, *warnings],
        )

    def cancelled_result(self, request_id: RequestId) -> Result:
        """Return the result of a stream that ends here: no daemon is left to say how it ended."""
        done = Done(
            id=request_id,
            seq=self.next_seq,
            finish_reason=FinishReason.CANCELLED,
            usage=Usage(completion_tokens=len(self.token_ids)),
        )
        return self.result(done)


class Session:
    """The open requests, commands and subscriptions of one connection."""

    def __init__(self) -> None:
        self._open: dict[RequestId, _Open] = {}
        self._decoder = Decoder(SUPERVISOR_TO_CLIENT, is_strict=False)
        self._heard_at = 0.0
        self._looked_at = 0.0
        self._was_idle = False

    def __len__(self) -> int:
        return len(self._open)

    @property
    def deadline(self) -> float | None:
        """Return when to call `is_silent`; None while nothing is open."""
        if not self._open:
            return None
        return max(self._heard_at + SILENCE_LIMIT_S, self._looked_at + DOUBT_S)

    def open_stream(self, request_id: RequestId, inbox: Inbox, now: float) -> None:
        """Record that a `Generate` is sent; its deltas and its end go to the inbox."""
        self._add(request_id, _Open(inbox=inbox, is_stream=True), now)

    def open_command(
        self, request_id: RequestId, inbox: Inbox, now: float, *, is_subscription: bool = False
    ) -> None:
        """Record that a command is sent; its reply, or each event, goes to the inbox."""
        self._add(request_id, _Open(inbox=inbox, is_subscription=is_subscription), now)

    def _add(self, request_id: RequestId, opened: _Open, now: float) -> None:
        if not self._open:
            # Nothing was due until now, so silence counts from here.
            self._hear(now)
        self._open[request_id] = opened

    def cancel(self, request_id: RequestId) -> Outcome:
        """Ask for the end of a stream, or end a subscription; anything else is ignored (D6)."""
        opened = self._open.get(request_id)
        if opened is None or opened.is_cancelled:
            return Outcome()
        opened.is_cancelled = True
        outcome = Outcome(sends=[encode(Cancel(id=request_id))])
        if opened.is_subscription:
            del self._open[request_id]
            # A reader may be waiting for the next event.
            outcome.deliveries.append((opened.inbox, SubscriptionClosed()))
        return outcome

    def receive(self, frame: bytes, now: float) -> Outcome:
        """Handle one message from the supervisor, which has one frame."""
        self._hear(now)
        try:
            message = read_text_pieces(frame) or self._decoder.decode([frame])
        except DecodeError as error:
            return self._broken(f"the daemon sent an invalid message: {error.message}")
        try:
            return self._take_texts(message) if isinstance(message, list) else self._handle(message)
        except Exception as error:  # noqa: BLE001 - a bug here must leave no reader waiting
            return self._give_up(message, error)

    def _give_up(self, message: MessageToClient | list[TextPiece], error: Exception) -> Outcome:
        """End what a message was for with an error because the message could not be handled."""
        outcome = Outcome()
        ids: list[Any]
        match message:
            case list():
                ids = [request_id for request_id, *_ in message]
            case Deltas():
                ids = [delta.id for delta in message.deltas]
            case _:
                ids = [getattr(message, "id", None)]
        text = f"internal error in the client: {type(error).__name__}: {error}"
        for request_id in dict.fromkeys(ids):
            opened = self._open.get(request_id)
            if opened is not None:
                self._break_off(request_id, opened, internal(text), outcome)
        return outcome

    def _handle(self, message: MessageToClient) -> Outcome:
        match message:
            case Deltas():
                outcome = Outcome()
                for delta in message.deltas:
                    self._take_delta(delta, outcome)
                return outcome
            case NoticeMessage():
                opened = self._open.get(message.id)
                if opened is None or not opened.is_stream:
                    return Outcome()
                return self._deliver(opened, Notice(kind=message.kind, detail=message.detail))
            case Done():
                return self._take_done(message)
            case Failed():
                return self._take_failed(message)
            case Reply():
                opened = self._open.get(message.id)
                # A subscription may be confirmed; it ends only with an error or a cancel.
                if opened is None or opened.is_subscription:
                    return Outcome()
                del self._open[message.id]
                if opened.is_stream:
                    return self._deliver(
                        opened, internal("the daemon answered a request as a command")
                    )
                return self._deliver(opened, message.value)
            case Event():
                opened = self._open.get(message.id)
                if opened is None or not opened.is_subscription:
                    return Outcome()
                return self._deliver(opened, message.value)
            case Alive():
                return Outcome()

    def _take_texts(self, pieces: list[TextPiece]) -> Outcome:
        outcome = Outcome()
        for request_id, seq, token, text in pieces:
            opened = self._awaiting(request_id, seq, outcome)
            if opened is not None:
                token_ids = [token]
                opened.next_seq += 1
                opened.token_ids += token_ids
                opened.text.append(text)
                piece = Delta(text=text, token_ids=token_ids)
                outcome.deliveries.append((opened.inbox, piece))
        return outcome

    def _take_delta(self, delta: ClientDelta, outcome: Outcome) -> None:
        opened = self._awaiting(delta.id, delta.seq, outcome)
        if opened is None:
            return
        try:
            token_ids = unpack_tokens(delta.tokens)
            body = read_body(delta.body)
            prompt_token_ids = unpack_tokens(body.prompt_tokens) if body.prompt_tokens else []
        except (ValueError, DecodeError) as wrong:
            # The daemon passes on what a worker packed, and only this stream is concerned.
            error = internal(f"piece {delta.seq} of the stream cannot be read: {wrong}")
            self._break_off(delta.id, opened, error, outcome)
            return
        opened.next_seq += 1
        opened.token_ids += token_ids
        if body.channel is Channel.PROMPT:
            opened.prompt += body.text
            opened.prompt_token_ids += prompt_token_ids
            if body.logprobs is not None:
                opened.prompt_logprobs = opened.prompt_logprobs or []
                opened.prompt_logprobs += body.logprobs
        elif body.logprobs is not None:
            opened.logprobs = opened.logprobs or []
            opened.logprobs += body.logprobs
        if body.stop is not None:
            opened.stop = body.stop
        if body.stop_token is not None:
            opened.stop_token = body.stop_token
        if body.vector is not None:
            opened.vectors.append(body.vector)
        elif body.channel is Channel.CONTENT:
            opened.text.append(body.text)
        elif body.channel is Channel.REASONING:
            opened.reasoning.append(body.text)
        elif body.channel is Channel.TOOL_CALL:
            opened.tool_calls.append(body.text)
        piece = Delta(
            text=body.text,
            token_ids=token_ids,
            channel=body.channel,
            logprobs=body.logprobs,
            sampling=body.sampling,
            prompt_token_ids=prompt_token_ids,
            vector=body.vector,
        )
        outcome.deliveries.append((opened.inbox, piece))

    def _awaiting(self, request_id: RequestId, seq: int, outcome: Outcome) -> _Open | None:
        """Return the stream whose next piece this is; end one that has a hole."""
        opened = self._open.get(request_id)
        if opened is None or not opened.is_stream:
            return None  # sent before the supervisor saw that the stream had ended here
        if seq == opened.next_seq:
            return opened
        self._break_off(request_id, opened, _gap(opened.next_seq, seq), outcome)
        return None

    def _break_off(
        self, request_id: RequestId, opened: _Open, error: RequestError, outcome: Outcome
    ) -> None:
        """End a stream with a hole as an error, never as a shorter answer (H7, J2)."""
        del self._open[request_id]
        outcome.sends.append(encode(Cancel(id=request_id)))
        outcome.deliveries.append((opened.inbox, error))

    def _take_done(self, done: Done) -> Outcome:
        opened = self._open.get(done.id)
        if opened is None or not opened.is_stream:
            return Outcome()
        if done.seq != opened.next_seq:
            outcome = Outcome()
            self._break_off(done.id, opened, _gap(opened.next_seq, done.seq), outcome)
            return outcome
        result = opened.result(done)
        del self._open[done.id]  # not earlier: a failure above must still find its inbox
        return self._deliver(opened, result)

    def _take_failed(self, failed: Failed) -> Outcome:
        error = RequestError.of(failed.error)
        if error.code is ErrorCode.DUPLICATE_ID:
            # A second use of an id was refused; what is open under it continues.
            return Outcome()
        if not failed.id:
            return self._broken(f"the daemon could not read a message: {error.message}")
        opened = self._open.pop(RequestId(failed.id), None)
        return Outcome() if opened is None else self._deliver(opened, error)

    def _broken(self, message: str) -> Outcome:
        """End everything that is open: the two sides do not understand each other."""
        outcome = Outcome(
            sends=[encode(Cancel(id=i)) for i, o in self._open.items() if o.is_stream]
        )
        outcome.deliveries = [(o.inbox, internal(message)) for o in self._open.values()]
        self._open.clear()
        return outcome

    @staticmethod
    def _deliver(opened: _Open, item: Item) -> Outcome:
        return Outcome(deliveries=[(opened.inbox, item)])

    def is_silent(self, now: float, is_busy: Callable[[], bool]) -> bool:
        """True if the supervisor is lost: a sign of life is overdue, and two looks saw it idle.

        Called at `deadline`, after reading everything.

        Args:
            now: in seconds.
            is_busy: looks whether the supervisor's process wants to run.
        """
        deadline = self.deadline
        if deadline is None or now < deadline:
            return False
        was_idle = self._was_idle
        self._was_idle = now - self._heard_at >= BUSY_LIMIT_S or not is_busy()
        self._looked_at = now
        return was_idle and self._was_idle

    def _hear(self, now: float) -> None:
        self._heard_at = now
        self._was_idle = False

    def lose(self, error: ConnectionLost) -> list[Delivery]:
        """End everything that was open: the connection is gone (P2).

        A stream that was being cancelled gets what it asked for: it ends as cancelled.
        """
        deliveries = []
        for request_id, opened in self._open.items():
            # Each reader raises its own error, because a traceback belongs to one.
            item: Item = ConnectionLost(
                error.message, error.endpoint, error.hint, is_turned_away=error.is_turned_away
            )
            if opened.is_stream and opened.is_cancelled:
                item = opened.cancelled_result(request_id)
            deliveries.append((opened.inbox, item))
        self._open.clear()
        return deliveries

    def close(self, endpoint: str) -> Outcome:
        """End all streams as cancelled and all commands with an error: the client is closed."""
        outcome = Outcome()
        for request_id, opened in self._open.items():
            if opened.is_stream:
                outcome.sends.append(encode(Cancel(id=request_id)))
                opened.is_cancelled = True
        outcome.deliveries = self.lose(ConnectionLost("the client was closed", endpoint))
        return outcome


def _gap(expected: int, got: int) -> RequestError:
    return internal(f"piece {expected} of the stream is missing; the next one is number {got}")
