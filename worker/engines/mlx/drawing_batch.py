"""mlx-lm's batch of rows that decode, with one sampler for all: its own calls one for each row.

On a GPU that costs the thread that steps 0.18 ms for each row with a temperature, and more with
filters. mlx-lm's batch keeps what belongs to a row in lists with an entry for each; of these,
`samplers` has our `RowDraws`; what mlx-lm would call for rows without a sampler is the way that
tokens are drawn.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationBatch

from .batch_sampler import BatchSampler


class TableRow:
    """One row of an array, cut out when it is asked for: for most tokens nobody asks.

    Args:
        table: of all rows.
        place: of the row.
    """

    __slots__ = ("_place", "_table")

    def __init__(self, table: mx.array, place: int) -> None:
        self._table, self._place = table, place

    def cut(self) -> mx.array:
        """The row, on the stream of whoever asks."""
        return self._table[self._place]


class DrawnToken:
    """What a step says of one row, in the words of mlx-lm's `GenerationBatch.Response`.

    Attributes:
        uid: of the row.
        token: its id.
        finish_reason: `stop` or `length`; None: the answer continues.
        prompt_cache: of a row that has ended.
        all_tokens: in that cache.

    Args:
        logprobs: of all ids at this token.
    """

    __slots__ = ("_logprobs", "all_tokens", "finish_reason", "prompt_cache", "token", "uid")

    def __init__(
        self,
        *,
        uid: int,
        token: int,
        logprobs: TableRow,
        finish_reason: str | None,
        prompt_cache: list[Any] | None,
        all_tokens: list[int] | None,
    ) -> None:
        self.uid, self.token, self.finish_reason = uid, token, finish_reason
        self.prompt_cache, self.all_tokens = prompt_cache, all_tokens
        self._logprobs = logprobs

    @property
    def logprobs(self) -> mx.array:
        """Of all ids (vocabulary,), float32."""
        return self._logprobs.cut()


class DrawingBatch(GenerationBatch):  # type: ignore[misc]
    """Rows that decode."""

    Response = DrawnToken
    _next_tokens: Any
    _next_logprobs: Any
    _sampler: BatchSampler | None = None

    def _step(self) -> tuple[list[int], list[TableRow]]:
        """Computes each row's next token, and returns the one before with its log-probabilities.

        The next one is under way when this returns. What is returned is not kept, as mlx-lm would
        (`_current_tokens`, `_current_logprobs`), which never looks at it again.
        """
        latest, logprobs = self._next_tokens, self._next_logprobs
        logits = self.model(latest[:, None], cache=self.prompt_cache)[:, -1, :]
        sampler = self._sampler_for(logits.shape[-1])
        logits = sampler.shape(logits.astype(mx.float32), latest)
        coming = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        self._next_tokens = sampler.draw(coming)
        self._next_logprobs = [TableRow(coming, place) for place in range(len(self.uids))]
        mx.async_eval(self._next_tokens, coming)  # type: ignore[no-untyped-call]
        mx.eval(latest)
        tokens: Any = latest.tolist()
        for held, token in zip(self.tokens, tokens, strict=True):
            held.append(token)
        return tokens, logprobs

    def filter(self, keep: list[int]) -> None:
        """Keeps only these rows; without any, nothing that was made for rows is left."""
        super().filter(keep)
        if not keep:
            self._sampler = None

    def _sampler_for(self, width: int) -> BatchSampler:
        """The sampler of these rows, made anew if any has joined or left."""
        if self._sampler is None or self._sampler.rows != self.samplers:
            self._sampler = BatchSampler(self.samplers, self.tokens, width, self.fallback_sampler)
        return self._sampler
