"""Samplers whose draws depend on (seed, token number) and on nothing else (A6).

mlx-lm's own samplers draw from the global random state, so a row's draws would depend on which
other rows are in the batch. Its logits processors draw nothing and are used as they are.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Sequence

import mlx.core as mx
from mlx_lm.sample_utils import (
    make_frequency_penalty,
    make_presence_penalty,
    make_repetition_penalty,
)

from ...engine import Row
from .grammar import GrammarProcessor

Sampler = Callable[[mx.array], mx.array]
Processor = Callable[[mx.array, mx.array], mx.array]

COLDEST = 1e-5
"""Below this temperature the likeliest token is taken: dividing by it would overflow."""

ALL_TOKENS = 2**31 - 1
"""A window that no context fills."""


def greedy(logprobs: mx.array) -> mx.array:
    """The likeliest token of each row; one object for all rows, so that a batch stays one call."""
    return mx.argmax(logprobs, axis=-1)


def make_sampler(row: Row, spared: Sequence[int] = ()) -> Sampler:
    """The sampler of one row; never raises for parameters that a request body accepts.

    Args:
        row: its parameters, and how many of its tokens were drawn in an earlier life.
        spared: ids that XTC never leaves out, besides the row's own stop tokens: an answer must be
            able to end.
    """
    if row.sampling.temperature < COLDEST:
        return greedy
    return SeededSampler(row, [*spared, *row.stop_token_ids])


class NoEndYet:
    """Forbids the tokens that end an answer until it has `min_tokens`.

    If nothing else is left (a grammar that can only end), they stay allowed: some token must be
    drawn. The batch calls it exactly once for each token, in order, and reads none.

    Args:
        ending: the ids that end an answer, at least one.
        min_tokens: the request's `min_tokens`.
        drawn: how many of them were drawn in an earlier life.
    """

    def __init__(self, ending: Sequence[int], *, min_tokens: int, drawn: int) -> None:
        self._ending = list(ending)
        self._min_tokens = min_tokens
        self._drawn = drawn

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """The logits (1, vocabulary) without those tokens."""
        number = self._drawn
        self._drawn += 1
        if number >= self._min_tokens:
            return logits
        others = logits + 0
        others[:, within(self._ending, logits)] = -mx.inf
        return mx.where(mx.max(others, axis=-1, keepdims=True) > -mx.inf, others, logits)


class SeededSampler:
    """Draws one row's tokens in order; the batch calls it exactly once for each.

    Temperature comes first, then `top_k`, `top_p`, `min_p` and XTC, each looking at what the one
    before has left.
    """

    def __init__(self, row: Row, spared: Sequence[int]) -> None:
        self._row = row
        self._spared = list(spared)
        self._drawn = len(row.delivered)

    def __call__(self, logprobs: mx.array) -> mx.array:
        """One token for each row of `logprobs` (rows, vocabulary)."""
        sampling, seed, number = self._row.sampling, self._row.seed, self._drawn
        self._drawn += 1
        logits = logprobs.astype(mx.float32) * (1.0 / sampling.temperature)
        if 0 < sampling.top_k < logits.shape[-1]:
            logits = _keep_top_k(logits, sampling.top_k)
        if sampling.top_p < 1.0:
            logits = _keep_top_p(logits, sampling.top_p)
        if sampling.min_p > 0.0:
            logits = _keep_min_p(logits, sampling.min_p)
        if sampling.xtc_probability > 0.0 and derive_share(seed, number) < sampling.xtc_probability:
            logits = self._exclude_top_choices(logits)
        return mx.random.categorical(logits, key=mx.random.key(derive_key(seed, number)))

    def _exclude_top_choices(self, logits: mx.array) -> mx.array:
        """Leaves out all but the least likely of the tokens above the threshold."""
        shares = mx.softmax(logits, axis=-1)
        likely = mx.where(shares > self._row.sampling.xtc_threshold, shares, mx.inf)
        is_out = shares > mx.min(likely, axis=-1, keepdims=True)
        is_out[:, within(self._spared, logits)] = False
        return mx.where(is_out, -mx.inf, logits)


def within(tokens: Sequence[int], logits: mx.array) -> mx.array:
    """Those ids that the logits have a place for: a tokenizer may know more than the model."""
    width = logits.shape[-1]
    return mx.array([token for token in tokens if 0 <= token < width], dtype=mx.int32)


def derive_key(seed: int, number: int) -> int:
    """A 64-bit key for token `number` of the answer that has this seed."""
    return _derive(seed, number, b"")


def derive_share(seed: int, number: int) -> float:
    """A number from 0 up to 1, as random as the key and independent of it."""
    return (_derive(seed, number, b"xtc") >> 11) / 2**53


def _derive(seed: int, number: int, purpose: bytes) -> int:
    packed = struct.pack("<QQ", seed & 0xFFFFFFFFFFFFFFFF, number)
    digest = hashlib.blake2b(packed, digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "little")


def _keep_top_k(logits: mx.array, top_k: int) -> mx.array:
    """Removes all but the `top_k` likeliest tokens, and those as likely as the last of them."""
    place = logits.shape[-1] - top_k
    least = mx.partition(logits, kth=place, axis=-1)[..., place : place + 1]
    return mx.where(logits < least, -mx.inf, logits)


def _keep_top_p(logits: mx.array, top_p: float) -> mx.array:
    """Removes all but the smallest set of tokens whose probabilities reach `top_p`."""
    ordered = mx.sort(mx.softmax(logits, axis=-1), axis=-1)
    above = mx.cumsum(ordered, axis=-1, reverse=True, inclusive=False)
    # The likeliest token has nothing above it, and is kept even if `top_p` rounds to 0.
    is_in = (above < top_p) | (above == 0)
    least = mx.min(mx.where(is_in, ordered, mx.inf), axis=-1, keepdims=True)
    return mx.where(mx.softmax(logits, axis=-1) < least, -mx.inf, logits)


def _keep_min_p(logits: mx.array, min_p: float) -> mx.array:
    """Removes tokens less likely than this share of the likeliest one's probability."""
    least = mx.max(logits, axis=-1, keepdims=True) + math.log(min_p)
    return mx.where(logits < least, -mx.inf, logits)


def make_processors(row: Row, ending: Sequence[int] = ()) -> list[Processor]:
    """What changes one row's logits before they become probabilities; empty for most rows.

    Each sees the prompt's tokens and the answer's, so a row that continues an answer needs
    nothing else.

    Args:
        row: its parameters, and how many of its tokens were drawn in an earlier life.
        ending: the ids that end its answer.
    """
    window = row.sampling.penalty_window or ALL_TOKENS
    processors: list[Processor] = []
    if row.logit_bias:
        processors.append(_make_bias(row.logit_bias))
    if row.sampling.repetition_penalty != 1.0:
        processors.append(make_repetition_penalty(row.sampling.repetition_penalty, window))
    if row.sampling.presence_penalty:
        processors.append(make_presence_penalty(row.sampling.presence_penalty, window))
    if row.sampling.frequency_penalty:
        processors.append(make_frequency_penalty(row.sampling.frequency_penalty, window))
    if row.grammar is not None:
        processors.append(GrammarProcessor(row.grammar))
    if ending and row.min_tokens > len(row.delivered):
        # After the grammar, which is not asked again: it may leave nothing but an end.
        processors.append(NoEndYet(ending, min_tokens=row.min_tokens, drawn=len(row.delivered)))
    return [_keep_type(processor) for processor in processors]


def _make_bias(bias: dict[int, float]) -> Processor:
    ids, values = mx.array(list(bias)), mx.array(list(bias.values()))
    return lambda tokens, logits: logits.at[:, ids].add(values.astype(logits.dtype))


def _keep_type(processor: Processor) -> Processor:
    """With a wider type, one row's logits would widen those of the whole batch, and change them."""
    return lambda tokens, logits: processor(tokens, logits).astype(logits.dtype)
