"""Reads how likely tokens were from a finished step."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from ...engine import RowLogprobs

PASS_BYTES = 32 * 1024 * 1024
"""Of the logits of one pass over prompts: 55 tokens, if there are 150,000 ids. A few times as much
is there while the likeliest are looked for."""

LEAST_LOGPROB = -9999.0
"""Shown for a probability of 0, whose logarithm is not finite."""


class LogprobReader:
    """Reads on a separate stream, so as not to wait for the next step, which is under way.

    Belongs to the thread that makes it.
    """

    def __init__(self) -> None:
        self._stream = mx.new_stream(mx.default_device())

    def read(self, responses: Sequence[Any], wanted: Mapping[int, int]) -> list[RowLogprobs | None]:
        """Read the logprobs of tokens, in one evaluation; None for rows that want none.

        Args:
            responses: the responses of one `next()`; a row may have several.
            wanted: for how many of the likeliest tokens to read them as well, by uid.
        """
        found: list[RowLogprobs | None] = [None] * len(responses)
        arrays: list[tuple[int, mx.array, mx.array, mx.array]] = []
        with mx.stream(self._stream):
            for place, response in enumerate(responses):
                count = wanted.get(response.uid)
                if count is not None:
                    logprobs = _normalised(response.logprobs)
                    ids = _likeliest(logprobs, count)
                    arrays.append((place, logprobs[response.token], ids, logprobs[ids]))
            mx.eval([array for _, *row in arrays for array in row])
        for place, *row in arrays:
            plain: list[Any] = [array.tolist() for array in row]
            found[place] = _to_plain(*plain)
        return found


class PromptLogprobs:
    """The log-probabilities of one prompt's tokens, as far as it was read.

    Args:
        tokens: of the prompt.
        count: for how many of the likeliest to tell it as well, at each place.
    """

    def __init__(self, tokens: list[int], count: int) -> None:
        self._tokens = tokens
        self._count = count
        self._read = 0
        self._found: list[RowLogprobs] = []

    def read(self, logits: mx.array) -> None:
        """Compute the logits of the next tokens (tokens, vocabulary), and keep what they tell."""
        begin = self._read + 1
        self._read += logits.shape[0]
        coming = mx.array(self._tokens[begin : self._read + 1])
        sums = mx.logsumexp(logits, axis=-1, keepdims=True)
        ids = _likeliest(logits, self._count)
        arrays = (
            mx.take_along_axis(logits, coming[:, None], axis=-1) - sums,
            ids,
            mx.take_along_axis(logits, ids, axis=-1) - sums,
        )
        mx.eval(*arrays)
        plain: list[Any] = [array.tolist() for array in arrays]
        self._found += [_to_plain(chosen, *top) for (chosen,), *top in zip(*plain, strict=True)]

    def take(self) -> list[RowLogprobs]:
        """Return what was found since the last call, in the order of the tokens."""
        found, self._found = self._found, []
        return found


def pass_tokens(model: Any, *, rows: int) -> int:
    """Return how many tokens of so many rows a pass may read whose logits are needed.

    Args:
        model: `FloatLogits`.
        rows: in the pass.
    """
    return max(PASS_BYTES // (4 * rows * model.width), 2) if model.width else 2


def _normalised(logprobs: mx.array) -> mx.array:
    """Differences of large logits are off by the rounding of their logarithmic sum, all alike.

    They are float32, because the logits are (see `logits`).
    """
    return logprobs - mx.logsumexp(logprobs)


def _likeliest(logprobs: mx.array, count: int) -> mx.array:
    """Return the ids of the likeliest along the last axis, in any order."""
    count = min(count, logprobs.shape[-1])
    if count <= 0:
        return mx.zeros((*logprobs.shape[:-1], 0), dtype=mx.uint32)
    return mx.argpartition(-logprobs, kth=count - 1)[..., :count]


def _to_plain(chosen: float, ids: Sequence[int], logprobs: Sequence[float]) -> RowLogprobs:
    top = [(token, _finite(logprob)) for token, logprob in zip(ids, logprobs, strict=True)]
    top.sort(key=lambda pair: (-pair[1], pair[0]))
    # Each was rounded to float32; together they may come out above 1 by as much.
    excess = max(0.0, math.log(math.fsum(math.exp(logprob) for _, logprob in top) or 1.0))
    if excess:
        excess += sys.float_info.epsilon * len(top)
        top = [(token, _finite(logprob - excess)) for token, logprob in top]
    return RowLogprobs(logprob=_finite(chosen - excess), top=top)


def _finite(logprob: float) -> float:
    """Handles a broken model's numbers, too."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
