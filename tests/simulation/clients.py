"""Clients as the simulation plays them: each stream is checked token by token (P1)."""

from __future__ import annotations

from dataclasses import dataclass

from mlxsup.protocol.ids import unpack_tokens
from mlxsup.protocol.messages import Deltas, Done, Event, Failed, Message, Notice, Reply
from mlxsup.protocol.states import FinishReason

from .plan import Prompt


@dataclass(slots=True, kw_only=True)
class Stream:
    """What one client has received for one request."""

    prompt: Prompt
    may_resume: bool
    received: int = 0
    pieces: int = 0
    end: Done | Failed | None = None
    is_given_up: bool = False
    """The client has left: nothing may be expected, and nothing may come."""


class PlayedClients:
    """Every connection's open streams and commands."""

    def __init__(self) -> None:
        self.streams: dict[tuple[bytes, str], Stream] = {}
        self.commands: dict[tuple[bytes, str], bool] = {}
        """Whether each has been answered."""
        self.quarantined: list[Stream] = []
        self.resumed = 0

    def receive(self, connection: bytes, message: Message) -> None:
        """Takes what the core sends."""
        match message:
            case Deltas(deltas=deltas):
                for delta in deltas:
                    self._take(self.streams[connection, delta.id], delta.seq, delta.tokens)
            case Done() | Failed():
                self._end(connection, message)
            case Reply(id=id):
                assert self.commands[connection, id] is False, f"{id} was answered twice"
                self.commands[connection, id] = True
            case Notice() | Event():
                pass
            case _:
                raise AssertionError(message)

    @staticmethod
    def _take(stream: Stream, seq: int, packed: bytes) -> None:
        assert stream.end is None, "a piece after the end"
        assert not stream.is_given_up
        assert seq == stream.pieces, "a gap in the numbers"
        stream.pieces += 1
        for token in unpack_tokens(packed):
            assert token == stream.prompt.token(stream.received), "another token, or one twice"
            stream.received += 1

    def _end(self, connection: bytes, message: Done | Failed) -> None:
        if (connection, message.id) in self.commands:
            assert not self.commands[connection, message.id]
            self.commands[connection, message.id] = True
            return
        stream = self.streams[connection, message.id]
        assert stream.end is None, "two ends"
        assert not stream.is_given_up
        stream.end = message
        if isinstance(message, Failed):
            sent = message.error["detail"].get("tokens_sent")
            assert sent is None or sent == stream.received, "tokens_sent is wrong"
            if message.error["code"] == "quarantined":
                self.quarantined.append(stream)
            return
        assert message.seq == stream.pieces
        assert message.usage.completion_tokens == stream.received
        self.resumed += message.resumed
        assert stream.may_resume or not message.resumed
        if message.finish_reason is FinishReason.LENGTH:
            assert stream.received == stream.prompt.length, "an answer that is cut short"
            assert stream.prompt.poison_at is None
