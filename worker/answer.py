"""The text of one answer: token ids in, text by channel out."""

from __future__ import annotations

from collections.abc import Sequence

from mlxsup.protocol.message import Logprobs, TokenLogprob
from mlxsup.protocol.states import AnswerForm, Channel

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
        form: what its content must look like.
        min_tokens: a stop string that is complete before this many tokens is text.
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
        after: int | None = None,
    ) -> None:
        self._codec = codec
        self._min_tokens = min_tokens
        self.count = 0
        self._detokenizer = codec.detokenizer()
        if after is not None:
            self._detokenizer.add(after)
        self._matcher = StopMatcher(stops) if stops else None
        self._channels = ChannelParser(codec.channel_rules, opening, calls, form=form)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the answer."""
        return self._matcher is not None and self._matcher.is_stopped

    @property
    def stopped_by(self) -> str | None:
        """The stop string that has ended the answer."""
        return None if self._matcher is None else self._matcher.found

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
        return self.sort(self.read(token))

    def replay(self, token: int) -> None:
        """Counts a token in whose text was shown before, as `add` does, at a third of the cost."""
        text = self.read(token)
        if self.plain_channel(text) is None:
            self.sort(text)

    def read(self, token: int) -> str:
        """The text that became certain with this token, not sorted into channels yet: `sort` must
        follow, unless `plain_channel` says that it is not needed."""
        self.count += 1
        text = self._detokenizer.add(token)
        return text if self._matcher is None else self._match(text, self._matcher)

    def plain_channel(self, text: str) -> Channel | None:
        """The channel of a text that was read, if it is shown as it is and changes nothing."""
        if self._matcher is not None and self._matcher.is_stopped:
            return None
        return self._channels.plain_channel(text)

    def sort(self, text: str) -> list[Piece]:
        """What is shown of a text that was read."""
        return self._channels.add(text)

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """The text that was still held back, when no more tokens come.

        Args:
            is_cut: whether the model would have written more.
        """
        text = ""
        if not self.is_stopped:
            text = self._detokenizer.finish()
            if self._matcher is not None:
                text = self._match(text, self._matcher) + self._matcher.finish()
        return self._channels.add(text) + self._channels.finish(
            is_cut=is_cut, is_stopped=self.is_stopped
        )

    def _match(self, text: str, matcher: StopMatcher) -> str:
        return matcher.add(text, may_stop=self.count >= self._min_tokens)

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
