"""Samplers whose draws depend on (seed, token number) and on nothing else (A6).

mlx-lm's own samplers draw from the global random state, so a row's draws would depend on which
other rows are in the batch.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable

import mlx.core as mx

Sampler = Callable[[mx.array], mx.array]

COLDEST = 1e-5
"""Below this temperature the likeliest token is taken: dividing by it would overflow."""


def greedy(logprobs: mx.array) -> mx.array:
    """The likeliest token of each row; one object for all rows, so that a batch stays one call."""
    return mx.argmax(logprobs, axis=-1)


def make_sampler(*, temperature: float, top_p: float, seed: int, drawn: int = 0) -> Sampler:
    """The sampler of one row; never raises for parameters that a request body accepts.

    Args:
        drawn: tokens of this answer that were drawn in an earlier life of the worker.
    """
    if temperature < COLDEST:
        return greedy
    return SeededSampler(temperature=temperature, top_p=top_p, seed=seed, drawn=drawn)


class SeededSampler:
    """Draws one row's tokens in order; the batch calls it exactly once for each.

    Temperature comes first and `top_p` looks at what it made, as most servers do.
    """

    def __init__(self, *, temperature: float, top_p: float, seed: int, drawn: int = 0) -> None:
        self._temperature = temperature
        self._top_p = top_p
        self._seed = seed
        self._drawn = drawn

    def __call__(self, logprobs: mx.array) -> mx.array:
        """One token for each row of `logprobs` (rows, vocabulary)."""
        logits = logprobs.astype(mx.float32) * (1.0 / self._temperature)
        if self._top_p < 1.0:
            logits = _keep_top_p(logits, self._top_p)
        key = mx.random.key(derive_key(self._seed, self._drawn))
        self._drawn += 1
        return mx.random.categorical(logits, key=key)


def derive_key(seed: int, number: int) -> int:
    """A 64-bit key for token `number` of the answer that has this seed."""
    packed = struct.pack("<QQ", seed & 0xFFFFFFFFFFFFFFFF, number)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def _keep_top_p(logits: mx.array, top_p: float) -> mx.array:
    """Removes all but the smallest set of tokens whose probabilities reach `top_p`."""
    ordered = mx.sort(mx.softmax(logits, axis=-1), axis=-1)
    above = mx.cumsum(ordered, axis=-1, reverse=True, inclusive=False)
    # The likeliest token has nothing above it, so at least one is kept.
    least = mx.min(mx.where(above < top_p, ordered, mx.inf), axis=-1, keepdims=True)
    return mx.where(mx.softmax(logits, axis=-1) < least, -mx.inf, logits)
