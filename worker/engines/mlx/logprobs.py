"""Reads how likely tokens were from a finished step."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from ...engine import RowLogprobs

LEAST_LOGPROB = -9999.0
"""Shown for a probability of 0, whose logarithm is not finite."""


class LogprobReader:
    """Reads on a separate stream, so as not to wait for the next step, which is under way.

    Belongs to the thread that makes it.
    """

    def __init__(self) -> None:
        self._stream = mx.new_stream(mx.default_device())

    def read(self, responses: Sequence[Any], wanted: Mapping[int, int]) -> dict[int, RowLogprobs]:
        """The logprobs of some rows' tokens, by uid; one evaluation for all of them.

        Args:
            responses: the responses of one `next()`.
            wanted: for how many of the likeliest tokens to read them as well, by uid.
        """
        arrays: list[tuple[int, mx.array, mx.array, mx.array]] = []
        with mx.stream(self._stream):
            for response in responses:
                count = wanted.get(response.uid)
                if count is not None:
                    logprobs = _normalised(response.logprobs)
                    ids = _likeliest(logprobs, count)
                    arrays.append((response.uid, logprobs[response.token], ids, logprobs[ids]))
            mx.eval([array for _, *row in arrays for array in row])
        return {uid: _to_plain(*row) for uid, *row in arrays}


def _normalised(logprobs: mx.array) -> mx.array:
    """Differences of large logits are off by the rounding of their logarithmic sum, all alike.

    They are float32, because the logits are (see `logits`).
    """
    return logprobs - mx.logsumexp(logprobs)


def _likeliest(logprobs: mx.array, count: int) -> mx.array:
    size = logprobs.shape[-1]
    if count <= 0:
        return mx.array([], dtype=mx.uint32)
    if count >= size:
        return mx.arange(size)
    return mx.argpartition(-logprobs, kth=count - 1)[:count]


def _to_plain(chosen: mx.array, ids: mx.array, logprobs: mx.array) -> RowLogprobs:
    plain_ids: Any = ids.tolist()
    plain_logprobs: Any = logprobs.tolist()
    chosen_logprob: Any = chosen.item()
    top = [
        (int(token), _finite(logprob))
        for token, logprob in zip(plain_ids, plain_logprobs, strict=True)
    ]
    top.sort(key=lambda pair: (-pair[1], pair[0]))
    # Each was rounded to float32; together they may come out above 1 by as much.
    excess = max(0.0, math.log(math.fsum(math.exp(logprob) for _, logprob in top) or 1.0))
    if excess:
        excess += sys.float_info.epsilon * len(top)
        top = [(token, _finite(logprob - excess)) for token, logprob in top]
    return RowLogprobs(logprob=_finite(chosen_logprob - excess), top=top)


def _finite(logprob: float) -> float:
    """Handles a broken model's numbers, too."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
