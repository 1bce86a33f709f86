"""The pieces of a prompt that its client is shown before the answer: text and log-probabilities.

It goes in pieces that begin at the same places in every life of a worker: the supervisor counts
those that the client has, and another life continues with the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.ids import RequestKey, pack_tokens
from mlxsup.protocol.message import Logprobs
from mlxsup.protocol.states import Channel
from mlxsup.protocol.worker_messages import RowDelta

from .engine import Prompt, RowLogprobs

TOKENS_PER_PIECE = 64
"""With 20 others at each place a piece has 50 KiB, which a client reads in 2 ms."""

IDS_PER_PIECE = 16 * 1024
"""64 KiB, which a client reads in 1 ms."""

MAX_TEXT_BYTES = 4 * 1024 * 1024
"""Of a prompt whose text is shown, which is one piece: half of what a client may leave unread."""

Describe = Callable[[int, RowLogprobs | None], Logprobs]
"""Adds the texts of the tokens: see `AnswerText.describe`."""


def shown_tokens(body: RequestBody, prompt: Prompt, pieces: int) -> int:
    """Return of how many tokens so many pieces have shown how likely they were."""
    return min(max(pieces - (body.echo is True), 0) * TOKENS_PER_PIECE, len(prompt.tokens))


class PromptPieces:
    """The pieces of one prompt, made as the engine reads it.

    Args:
        key: of the request.
        tokens: of the prompt.
        text: of the prompt; None: it is not shown, or was.
        has_logprobs: whether it is shown how likely the tokens were.
        shown: how many tokens the client was shown that of.
        describe: adds texts to log-probabilities.
        has_ids: whether the ids of the tokens are shown, all before anything is read.
    """

    def __init__(
        self,
        key: RequestKey,
        tokens: Sequence[int],
        *,
        text: str | None,
        has_logprobs: bool,
        shown: int,
        describe: Describe,
        has_ids: bool = False,
    ) -> None:
        self._key = key
        self._tokens = tokens
        self._shown = shown
        self._describe = describe
        self._read = 0
        self._held: list[Logprobs] = []  # fewer than are one piece
        self._first = [] if text is None else [self._piece(text=text)]
        if has_logprobs:
            self._first += self.take([None])
        if has_ids:
            self._first += [
                RowDelta(
                    key=key,
                    channel=Channel.PROMPT,
                    prompt_tokens=pack_tokens(tokens[start : start + IDS_PER_PIECE]),
                    is_prompt=True,
                )
                for start in range(0, len(tokens), IDS_PER_PIECE)
            ]

    def begin(self) -> list[RowDelta]:
        """Return, once, what is shown before anything is read."""
        first, self._first = self._first, []
        return first

    def take(self, logprobs: Sequence[RowLogprobs | None]) -> list[RowDelta]:
        """Return what is shown after the engine has read more.

        Args:
            logprobs: of the next tokens.
        """
        pieces = []
        for one in logprobs:
            token, self._read = self._tokens[self._read], self._read + 1
            if self._read <= self._shown:
                continue
            self._held.append(self._describe(token, one))
            if not self._read % TOKENS_PER_PIECE or self._read == len(self._tokens):
                pieces.append(self._piece(logprobs=self._held))
                self._held = []
        return pieces

    def _piece(self, text: str = "", logprobs: list[Logprobs] | None = None) -> RowDelta:
        return RowDelta(
            key=self._key, text=text, channel=Channel.PROMPT, logprobs=logprobs, is_prompt=True
        )
