"""The text of one answer: token ids in, text by channel out."""

from __future__ import annotations

from collections.abc import Sequence

from mlxsup.protocol.message import Logprobs, TokenLogprob
from mlxsup.protocol.states import Channel

from .engine import RowLogprobs, TextCodec
from .text.channels import ChannelParser, Piece
from .text.stops import StopMatcher
from .text.tool_calls import ToolCallReader


class AnswerText:
    """Holds back half characters, stop strings and channel markers until they are decided.

    Stop strings are looked for in everything that the model writes, including markers.

    Attributes:
        count: its tokens so far.

    Args:
        codec: the model's text side.
        stops: the request's stop strings.
        opening: the end of the prompt that opened the answer; see `Prompt`.
        calls: reads tool calls.
        has_form: whether the answer must have a format.
        min_tokens: a stop string that is complete before this many tokens is text.
    """

    def __init__(
        self,
        codec: TextCodec,
        stops: Sequence[str],
        opening: str,
        calls: ToolCallReader,
        *,
        has_form: bool,
        min_tokens: int,
    ) -> None:
        self._codec = codec
        self._min_tokens = min_tokens
        self.count = 0
        self._detokenizer = codec.detokenizer()
        self._matcher = StopMatcher(stops)
        self._channels = ChannelParser(codec.channel_rules, opening, calls, has_form=has_form)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the answer."""
        return self._matcher.is_stopped

    @property
    def channel(self) -> Channel:
        """The channel of the text that comes now."""
        return self._channels.channel

    @property
    def has_calls(self) -> bool:
        """Whether the answer contains a tool call."""
        return self._channels.has_calls

    def add(self, token: int) -> list[Piece]:
        """The text that became certain with this token."""
        self.count += 1
        return self._channels.add(self._match(self._detokenizer.add(token)))

    def finish(self) -> list[Piece]:
        """The text that was still held back, when no more tokens come."""
        text = ""
        if not self.is_stopped:
            text = self._match(self._detokenizer.finish()) + self._matcher.finish()
        return self._channels.add(text) + self._channels.finish()

    def _match(self, text: str) -> str:
        return self._matcher.add(text, may_stop=self.count >= self._min_tokens)

    def describe(self, token: int, logprobs: RowLogprobs) -> Logprobs:
        """Log-probabilities as clients see them, with the tokens' texts."""

        def one(token: int, logprob: float) -> TokenLogprob:
            return TokenLogprob(token=token, logprob=logprob, text=self._codec.token_text(token))

        return Logprobs(
            chosen=one(token, logprobs.logprob),
            top=[one(other, logprob) for other, logprob in logprobs.top],
        )
