"""Draws one token for each of some rows, all of them at once.

Every computation is row by row along the vocabulary, and a filter that a row does not ask for
leaves that row as it is, bit by bit: on the CPU a row draws the same tokens alone and in any batch.
A filter that no row asks for is not computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from .places import column, entries_at, rows_at
from .sampling import RowDraws, derive_key, derive_share

BLOCK = 128
"""How many neighbouring ids form a block: a draw picks a block, and then a token of it."""

MOST_CUT = 1024
"""Up to this `top_k` only the likeliest tokens are sorted, not the whole vocabulary."""

NEVER = 2.0
"""A share that no probability reaches."""


class Picker:
    """Draws the tokens of rows that have a temperature.

    Temperature comes first, then `top_k`, `top_p`, `min_p` and XTC, each looking at what the one
    before has left.

    Args:
        rows: at least one.
        width: of their logits.
    """

    def __init__(self, rows: Sequence[RowDraws], width: int) -> None:
        self._rows = rows
        self._inverse = column(1.0 / row.sampling.temperature for row in rows)
        self._filters = Filters(rows, width)
        self._xtc = Xtc(rows, width) if any(row.sampling.xtc_probability for row in rows) else None

    def pick(self, logprobs: mx.array) -> mx.array:
        """One token for each row (rows,), from its log-probabilities (rows, vocabulary)."""
        return pick_tokens(self.weigh(logprobs), *self._uniforms())

    def weigh(self, logprobs: mx.array) -> mx.array:
        """How often each token should be drawn, next to the likeliest of its row; 0: never."""
        scaled = logprobs * self._inverse
        peak = mx.max(scaled, axis=-1, keepdims=True)
        weights = mx.exp(scaled - peak)
        least = self._filters.find_least(scaled, peak)
        if least is not None:
            weights = mx.where(scaled < least, 0.0, weights)
        return weights if self._xtc is None else self._xtc.exclude(weights)

    def _uniforms(self) -> tuple[mx.array, mx.array]:
        """Two numbers from 0 up to 1 for each row (rows, 1), each with 24 bits of its key."""
        keys = [derive_key(row.seed, row.number) for row in self._rows]
        first, second = ([key >> 40 for key in keys], [key >> 16 & 0xFFFFFF for key in keys])
        return (_fractions(first), _fractions(second))


def _fractions(numbers: list[int]) -> mx.array:
    """Of 2**24 (rows, 1): exact, because float32 has as many bits."""
    return mx.array((np.array(numbers) / 2**24).astype(np.float32)[:, None])


def pick_tokens(weights: mx.array, first: mx.array, second: mx.array) -> mx.array:
    """The token at which a share of each row's weights is reached.

    The first number picks a block, the second one a token of it. One sum over a whole vocabulary
    in float32 would lose the many unlikely tokens behind the likely ones.

    Args:
        weights: (rows, vocabulary), none negative; a token without any is never picked.
        first: from 0 up to 1 (rows, 1).
        second: likewise.
    """
    rows, width = weights.shape
    if rest := -width % BLOCK:
        weights = mx.pad(weights, [(0, 0), (0, rest)])
    blocks = weights.reshape(rows, -1, BLOCK)
    block = _pick(mx.sum(blocks, axis=-1), first)
    within = mx.take_along_axis(blocks, block[:, :, None], axis=1)[:, 0]
    return (block * BLOCK + _pick(within, second))[:, 0]


def _pick(masses: mx.array, share: mx.array) -> mx.array:
    """The first place (rows, 1) where the sum so far is above that share of the whole.

    Never a place without mass, however sums are rounded: in parallel they need not ascend, and the
    share of a tiny whole may be rounded up to it. Then it is the last place with mass.
    """
    ends = mx.where(masses > 0, mx.cumsum(masses, axis=-1), 0.0)
    whole = mx.max(ends, axis=-1, keepdims=True)
    is_beyond = ends > share * whole
    # Of those beyond the one that ends first, because its distance from 2 * whole is the largest.
    return mx.argmax(mx.where(is_beyond, 2 * whole - ends, ends), axis=-1, keepdims=True)


class Filters:
    """`top_k`, `top_p` and `min_p`, each of which is a least value that a token needs.

    Args:
        rows: at least one.
        width: of their logits.
    """

    def __init__(self, rows: Sequence[RowDraws], width: int) -> None:
        cut: list[int] = []
        whole: list[int] = []
        for place, row in enumerate(rows):
            top_k, top_p = row.sampling.top_k, row.sampling.top_p
            if 0 < top_k < width and top_k <= MOST_CUT:
                cut.append(place)
            elif top_p < 1.0 or 0 < top_k < width:
                whole.append(place)
        self._likeliest = [Likeliest(places, rows, width) for places in (cut, whole) if places]
        # Where a row finds its value in those of the sorted rows; the others share the last one.
        found = {place: number for number, place in enumerate([*cut, *whole])}
        order = [found.get(place, len(found)) for place in range(len(rows))]
        self._order = mx.array(order, dtype=mx.int32)
        self._min_p = None
        if any(row.sampling.min_p for row in rows):
            self._min_p = column(_log(row.sampling.min_p) for row in rows)

    def find_least(self, scaled: mx.array, peak: mx.array) -> mx.array | None:
        """What a token needs at least (rows, 1); None if none of them is asked for.

        Args:
            scaled: log-probabilities by temperature (rows, vocabulary).
            peak: the largest of each row (rows, 1).
        """
        least: mx.array | None = None
        if self._likeliest:
            each = [likeliest.find_least(scaled, peak) for likeliest in self._likeliest]
            least = mx.concatenate([*each, mx.array([[-mx.inf]])])[self._order]
        if self._min_p is not None:
            share = peak + self._min_p
            least = share if least is None else mx.maximum(least, share)
        return least


def _log(share: float) -> float:
    return math.log(share) if share > 0 else -math.inf


class Likeliest:
    """`top_k` and `top_p` of some rows, which need their likeliest tokens in order.

    Tokens as likely as the last one kept are kept, too. `top_p` is a share of the `top_k` tokens.

    Args:
        places: of these rows.
        rows: of the batch.
        width: of their logits.
    """

    def __init__(self, places: Sequence[int], rows: Sequence[RowDraws], width: int) -> None:
        asked = [rows[place].sampling for place in places]
        kept = [one.top_k if 0 < one.top_k < width else width for one in asked]
        self._count = max(kept)
        self._places = rows_at(places, len(rows))
        self._first = mx.array([[self._count - number] for number in kept], dtype=mx.int32)
        self._top_p = None
        if any(one.top_p < 1.0 for one in asked):
            self._top_p = column(one.top_p if one.top_p < 1.0 else NEVER for one in asked)
            self._order = mx.arange(self._count)

    def find_least(self, scaled: mx.array, peak: mx.array) -> mx.array:
        """See `Filters.find_least`; of these rows alone."""
        if self._places is not None:
            scaled, peak = scaled[self._places], peak[self._places]
        if self._count < scaled.shape[-1]:
            scaled = mx.topk(scaled, self._count, axis=-1)
        ascending = mx.sort(scaled, axis=-1)
        least = mx.take_along_axis(ascending, self._first, axis=-1)
        if self._top_p is None:
            return least
        # However many others were sorted besides, the sums begin at the likeliest: equal bits.
        weights = mx.where(self._order < self._first, 0.0, mx.exp(ascending - peak))
        above = mx.cumsum(weights, axis=-1, reverse=True, inclusive=False)
        whole = above[:, :1] + weights[:, :1]
        # The likeliest token has nothing above it, and is kept even if `top_p` rounds to 0.
        is_in = (above < self._top_p * whole) | (above == 0)
        nucleus = mx.min(mx.where(is_in, ascending, mx.inf), axis=-1, keepdims=True)
        return mx.maximum(least, nucleus)


class Xtc:
    """Leaves out all but the least likely of the tokens above a threshold, as the dice say.

    Args:
        rows: at least one.
        width: of their logits.
    """

    def __init__(self, rows: Sequence[RowDraws], width: int) -> None:
        self._rows = rows
        asking = [row.spared if row.sampling.xtc_probability else () for row in rows]
        self._spared = entries_at(asking, width)

    def exclude(self, weights: mx.array) -> mx.array:
        """The weights without those tokens (rows, vocabulary)."""
        thresholds = [
            row.sampling.xtc_threshold if self._is_due(row) else NEVER for row in self._rows
        ]
        if min(thresholds) == NEVER:
            return weights
        shares = weights / mx.sum(weights, axis=-1, keepdims=True)
        likely = mx.where(shares > column(thresholds), shares, mx.inf)
        is_out = shares > mx.min(likely, axis=-1, keepdims=True)
        if self._spared is not None:
            is_out[self._spared] = False
        return mx.where(is_out, 0.0, weights)

    @staticmethod
    def _is_due(row: RowDraws) -> bool:
        probability = row.sampling.xtc_probability
        return probability > 0 and derive_share(row.seed, row.number) < probability
