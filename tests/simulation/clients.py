"""Clients as the simulation plays them: each checks its streams as they arrive."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlxsup.protocol.client_messages import ClientDelta, Deltas, Done, Event, Failed, Notice, Reply
from mlxsup.protocol.delta_body import read_body
from mlxsup.protocol.ids import unpack_tokens
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import Channel, FinishReason, NoticeKind

from . import answers
from .asks import Ask
from .links import Link
from .listeners import Listener
from .violation import check


@dataclass(slots=True, kw_only=True)
class Stream:
    """What one client has received for one request."""

    ask: Ask
    tokens: int = 0
    pieces: int = 0
    text: dict[Channel, str] = field(default_factory=dict)
    end: Done | Failed | None = None


@dataclass(slots=True, kw_only=True)
class Client:
    """One connection.

    Attributes:
        process: the process behind it; empty if the shell could not find it.
        up, down: its link, in both directions.
        said: how many ids it has used.
        streams: by request id, ended ones too.
        readers: those that were sent to join a stream, by id.
        commands: whether each command has been answered, by id.
        is_slow: it does not read: what waits for it is thrown away, ends excepted.
        has_left, is_gone: it has left; the supervisor knows.
        twins: second uses of an id that were sent and not answered.
        unheard: what was said after the supervisor had ended.
        subscriptions: ids of those that were sent, the latest last.
    """

    name: bytes
    process: str
    up: Link
    down: Link
    said: int = 0
    streams: dict[str, Stream] = field(default_factory=dict)
    readers: dict[str, Listener] = field(default_factory=dict)
    commands: dict[str, bool] = field(default_factory=dict)
    subscriptions: list[str] = field(default_factory=list)
    is_slow: bool = False
    has_left: bool = False
    is_gone: bool = False
    twins: int = 0
    unheard: set[str] = field(default_factory=set)

    def open_streams(self) -> list[Stream]:
        """Those whose end has not arrived."""
        return [stream for stream in self.streams.values() if stream.end is None]

    def send_down(self, message: Message) -> None:
        """The shell sends it, or drops it: nothing but ends goes to those who do not read."""
        if not (self.is_slow and isinstance(message, Deltas | Event)):
            self.down.send(lambda: self._receive(message))

    def check_ends(self) -> None:
        """Everything was answered."""
        for stream in self.streams.values():
            check("unanswered", stream.end or stream.ask.id in self.unheard, stream.ask)
        for id, reader in self.readers.items():
            check("reader unanswered", reader.end or id in self.unheard, reader)
        for id, is_answered in self.commands.items():
            check("command unanswered", is_answered or id in self.unheard, id)
        check("command unanswered", self.twins == 0, "a second use of an id")

    def _receive(self, message: Message) -> None:
        if self.has_left:
            return
        match message:
            case Deltas(deltas=deltas):
                for delta in deltas:
                    if delta.id in self.readers:
                        self.readers[delta.id].takes(delta)
                    else:
                        self._take(self.streams[delta.id], delta)
            case Done(id=id) | Failed(id=id) if id in self.readers:
                self.readers[id].ends(message, is_slow=self.is_slow)
            case Done():
                self._done(self.streams[message.id], message)
            case Failed(id=id):
                if message.error["code"] == "duplicate_id":
                    self.twins -= 1
                elif id in self.streams:
                    self._failed(self.streams[id], message)
                elif id in self.subscriptions:
                    self.subscriptions.remove(id)
                else:
                    self._answered(id)
            case Reply(id=id):
                self._answered(id)
            case Notice(id=id, kind=kind):
                self._noticed(self.streams[id], kind)
            case Event(id=id):
                check("event without subscription", id in self.subscriptions, id)
            case _:
                raise AssertionError(message)

    def _answered(self, id: str) -> None:
        check("answer to nobody", id in self.commands, id)
        check("answered twice", not self.commands[id], id)
        self.commands[id] = True

    def _noticed(self, stream: Stream, kind: NoticeKind) -> None:
        check("notice after the end", stream.end is None, kind)
        check("notice to nobody", stream.ask.wants_notices, kind)

    def _take(self, stream: Stream, delta: ClientDelta) -> None:
        ask, accepted = stream.ask, stream.ask.acceptance
        check("after the end", stream.end is None, ask)
        check("token before acceptance", accepted is not None, ask)
        assert accepted is not None
        check("sequence", delta.seq == stream.pieces or self.is_slow, f"{ask}: {delta.seq}")
        stream.pieces = delta.seq + 1
        if self.is_slow:
            return
        body = read_body(delta.body)
        for token in unpack_tokens(delta.tokens):
            expected = answers.token(accepted, stream.tokens)
            check("tokens", token == expected, f"{ask}: token {stream.tokens} is {token}")
            check("channel", body.channel == answers.channel(accepted, stream.tokens), ask)
            stream.tokens += 1
        stream.text[body.channel] = stream.text.get(body.channel, "") + body.text
        is_end = stream.tokens == answers.length(accepted)
        shown = answers.shown(accepted, stream.tokens, is_end=is_end)
        received = "".join(stream.text.values())
        check("text", received == shown, f"{ask}: {received!r} and not {shown!r}")

    def _done(self, stream: Stream, done: Done) -> None:
        ask, accepted = stream.ask, stream.ask.acceptance
        check("two ends", stream.end is None, ask)
        stream.end = done
        if self.is_slow:
            return
        check("pieces counted", done.seq == stream.pieces, f"{ask}: {done.seq}")
        check("resumed counted", done.resumed == ask.resumed, f"{ask}: {done.resumed}")
        check("pauses counted", done.paused == ask.paused, f"{ask}: {done.paused}")
        check("warnings", done.warnings == ask.warnings, f"{ask}: {done.warnings}")
        usage = done.usage
        check("usage of the answer", usage.completion_tokens == stream.tokens, f"{ask} {usage}")
        if accepted is None:
            check("usage of the prompt", usage.prompt_tokens == 0, f"{ask} {usage}")
            check("seed", done.seed is None, f"{ask}: {done.seed}")
        else:
            prompt = len(accepted.prompt_tokens) // 4
            check("usage of the prompt", usage.prompt_tokens == prompt, f"{ask} {usage}")
            check("seed", done.seed == accepted.seed, f"{ask}: {done.seed}")
            queued_s = (ask.started_at if ask.has_begun else ask.ended_at) - ask.arrived_at
            check("timings", abs(done.timings.queued_s - queued_s) < 1e-6, f"{ask}: {queued_s}")
        check("usage of the cache", usage.cached_tokens == ask.cached, f"{ask} {usage}")
        times = done.timings
        first_s = 0.0 if ask.first_token_at is None else ask.first_token_at - ask.arrived_at
        check("timings", abs(times.first_token_s - first_s) < 1e-6, f"{ask}: {times}")
        check("timings", abs(times.total_s - (ask.ended_at - ask.arrived_at)) < 1e-6, ask)
        since = ask.ended_at if ask.paused_at is None else ask.paused_at
        paused_s = ask.paused_s + ask.ended_at - since
        check("time paused", abs(times.paused_s - paused_s) < 1e-6, f"{ask}: {times}")
        if done.finish_reason is not FinishReason.CANCELLED:
            check("finished unaccepted", accepted is not None, ask)
            assert accepted is not None
            check("whole answer", stream.tokens == answers.length(accepted), ask)
            check("finish reason", done.finish_reason == answers.finish(accepted), ask)

    def _failed(self, stream: Stream, failed: Failed) -> None:
        check("two ends", stream.end is None, stream.ask)
        stream.end = failed
        sent = failed.error["detail"].get("tokens_sent")
        if not self.is_slow:
            check("tokens_sent", sent in (None, stream.tokens), f"{stream.ask}: {sent}")
