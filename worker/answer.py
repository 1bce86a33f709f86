"""The text of one answer: token ids in, text by channel out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlxsup.protocol.message import Logprobs, TokenLogprob
from mlxsup.protocol.states import AnswerForm, Channel
from mlxsup.protocol.tool_choice import UNFIT_CALL

from .engine import RowLogprobs, TextCodec
from .text.channels import ChannelParser, Piece
from .text.grammar import StrictSchemas
from .text.stops import StopMatcher
from .text.tool_calls import ToolCallReader


class AnswerText:
    """Holds back half characters, stop strings and channel markers until they are decided.

    Stop strings are looked for in the content alone: not in the reasoning, and not in calls.

    Attributes:
        count: its tokens so far.
        has_calls: true once a tool call was shown.

    Args:
        codec: the model's text side.
        stops: the request's stop strings.
        opening: the end of the prompt that opened the answer; see `Prompt`.
        calls: reads tool calls.
        form: what its content must look like.
        min_tokens: a stop string that is complete before this many tokens is text.
        strict: the schemas that the arguments of calls must match; None: any arguments do.
        after: the last token of the prompt, whose text the answer's continues; None: it stands
            alone, and a tokenizer may leave out the space that it begins with.
    """

    def __init__(
        self,
        codec: TextCodec,
        stops: Sequence[str],
        opening: str,
        calls: ToolCallReader,
        *,
        form: AnswerForm = AnswerForm.TEXT,
        min_tokens: int,
        strict: StrictSchemas | None = None,
        after: int | None = None,
    ) -> None:
        self._codec = codec
        self._min_tokens = min_tokens
        self._strict = strict
        self.count = 0
        self.has_calls = False
        self._detokenizer = codec.detokenizer()
        if after is not None:
            self._detokenizer.add(after)
        # All of the content of a forced call is the call.
        self._stops = StopMatcher(() if form is AnswerForm.CALL else stops)
        self._channels = ChannelParser(codec.channel_rules, opening, calls, form=form)

    @property
    def is_stopped(self) -> bool:
        """True if a stop string has ended the answer."""
        return self._stops.is_stopped

    @property
    def stopped_by(self) -> str | None:
        """Return the stop string that has ended the answer."""
        return self._stops.found

    @property
    def channel(self) -> Channel:
        """Return the channel of the text that comes now."""
        return self._channels.channel

    def add(self, token: int) -> list[Piece]:
        """Return the text that became certain with this token."""
        return self.sort(self.read(token))

    def replay(self, token: int) -> None:
        """Count a token in whose text was shown before, as `add` does, at a third of the cost."""
        text = self.read(token)
        if self.plain_channel(text) is None:
            self.sort(text)

    def read(self, token: int) -> str:
        """Return the text that became certain with this token, not sorted into channels yet:
        `sort` must follow, unless `plain_channel` says that it is not needed."""
        self.count += 1
        return self._detokenizer.add(token)

    def plain_channel(self, text: str) -> Channel | None:
        """Return the channel of a text that was read, if it is shown as it is and changes
        nothing."""
        return self._channels.plain_channel(text) if self._stops.is_plain(text) else None

    def sort(self, text: str) -> list[Piece]:
        """Return what is shown of a text that was read."""
        return self._until_stop(self._channels.add(text))

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Return the text that was still held back, when no more tokens come; a stop string may
        be in it.

        Args:
            is_cut: whether the model would have written more.
        """
        pieces = self._channels.add(self._detokenizer.finish())
        pieces = self._until_stop([*pieces, *self._channels.finish(is_cut=is_cut)])
        return [*pieces, *self._held()]

    def _until_stop(self, pieces: list[Piece]) -> list[Piece]:
        """Return what is shown of pieces; a stop string ends with its part of the content."""
        shown: list[Piece] = []
        may_stop = self.count >= self._min_tokens
        for piece in pieces:
            if self.is_stopped:
                break
            if piece.channel is Channel.CONTENT:
                text = self._stops.add(piece.text, may_stop=may_stop)
                if text or piece.warning:
                    shown.append(replace(piece, text=text))
            else:
                if piece.channel is Channel.TOOL_CALL:
                    self.has_calls = True
                    piece = self._checked(piece)
                shown += [*self._held(), piece]
        return shown

    def _checked(self, call: Piece) -> Piece:
        """Return a call, with a warning if its arguments do not match a strict schema."""
        if call.is_cut or self._strict is None or self._strict.fit(call.text):
            return call
        return replace(call, warning=UNFIT_CALL)

    def _held(self) -> list[Piece]:
        """Return the content that was held back for a stop string that it does not become."""
        held = self._stops.finish()
        return [Piece(channel=Channel.CONTENT, text=held)] if held else []

    def describe(self, token: int, logprobs: RowLogprobs | None) -> Logprobs:
        """Log-probabilities as clients see them, with the tokens' texts; those of a token before
        which there is nothing are none."""

        def one(token: int, logprob: float | None) -> TokenLogprob:
            text, raw_bytes = self._codec.token_alone(token)
            return TokenLogprob(token=token, logprob=logprob, text=text, raw_bytes=raw_bytes)

        if logprobs is None:
            return Logprobs(chosen=one(token, None))
        return Logprobs(
            chosen=one(token, logprobs.logprob),
            top=[one(other, logprob) for other, logprob in logprobs.top],
        )
