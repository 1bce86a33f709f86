"""Clients that have joined the stream of a request: each checks what it gets, from the start."""

from __future__ import annotations

from dataclasses import dataclass

from mlxsup.protocol.client_messages import ClientDelta, Done, Failed
from mlxsup.protocol.delta_body import read_body
from mlxsup.protocol.ids import unpack_tokens
from mlxsup.protocol.states import FinishReason

from . import answers
from .asks import Ask
from .books import Life
from .violation import check


@dataclass(slots=True, kw_only=True, eq=False)
class Listener:
    """One that was sent, from its client's words to its end.

    Attributes:
        connection, id: whose, and under which name its stream comes.
        ask: the request that it has joined; None before, and if it was refused.
        asked: the process that renders what was delivered before; None: nothing was.
        number: of that question.
        is_waiting: whether that has not been answered yet.
        has_nothing: the answer was that nothing can be shown.
        has_left, is_slow: its client listens no longer, or does not read.
        sent: tokens that the supervisor has sent to it.
        ended: the supervisor has sent its end.
        tokens, pieces, text, end: what has arrived.
    """

    connection: bytes
    id: str
    ask: Ask | None = None
    asked: Life | None = None
    number: int | None = None
    is_waiting: bool = False
    has_nothing: bool = False
    has_left: bool = False
    is_slow: bool = False
    sent: int = 0
    ended: bool = False
    tokens: int = 0
    pieces: int = 0
    text: str = ""
    end: Done | Failed | None = None

    def __str__(self) -> str:
        return f"{self.connection.decode()}/{self.id} listens to {self.ask}"

    def takes(self, delta: ClientDelta) -> None:
        """A piece arrives: with the tokens of the answer, in order, and their text."""
        check("reader: after the end", self.end is None, self)
        check("reader: sequence", delta.seq == self.pieces, f"{self}: {delta.seq}")
        self.pieces += 1
        assert self.ask is not None
        accepted = self.ask.acceptance
        check("reader: before acceptance", accepted is not None, self)
        assert accepted is not None
        for token in unpack_tokens(delta.tokens):
            expected = answers.token(accepted, self.tokens)
            check("reader: tokens", token == expected, f"{self}: {token} is no. {self.tokens}")
            self.tokens += 1
        self.text += read_body(delta.body).text
        is_end = self.tokens == answers.length(accepted)
        shown = answers.shown(accepted, self.tokens, is_end=is_end)
        check("reader: text", shown.startswith(self.text), f"{self}: {self.text!r} of {shown!r}")

    def ends(self, end: Done | Failed, *, is_slow: bool) -> None:
        """Its end arrives: if that is the end of the answer, all of it has been there."""
        check("reader: two ends", self.end is None, self)
        self.end = end
        if is_slow or not isinstance(end, Done):
            return
        check("reader: pieces counted", end.seq == self.pieces, f"{self}: {end.seq}")
        if end.finish_reason is FinishReason.CANCELLED:
            return
        assert self.ask is not None
        assert self.ask.acceptance is not None
        accepted = self.ask.acceptance
        check("reader: whole answer", self.tokens == answers.length(accepted), self)
        shown = answers.shown(accepted, self.tokens, is_end=True)
        check("reader: whole text", self.text == shown, f"{self}: {self.text!r} of {shown!r}")
