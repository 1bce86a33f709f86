"""Draws one token for each of some rows, all of them at once.

Every computation is row by row along the vocabulary, and a filter that a row does not ask for
leaves that row as it is, bit by bit: on the CPU a row draws the same tokens alone and in any batch.
A filter that no row asks for is not computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx

from .draws import Draw, draw_by_share
from .places import column, entries_at, rows_at
from .sampling import RowDraws, derive_key, derive_share

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
        draw: the way that tokens are drawn.
    """

    def __init__(self, rows: Sequence[RowDraws], width: int, draw: Draw = draw_by_share) -> None:
        self._rows = rows
        self._draw = draw
        self._inverse = column(1.0 / row.sampling.temperature for row in rows)
        self._filters = Filters(rows, width)
        self._xtc = Xtc(rows, width) if any(row.sampling.xtc_probability for row in rows) else None

    def pick(self, logprobs: mx.array) -> mx.array:
        """One token for each row (rows,), from its log-probabilities (rows, vocabulary)."""
        keys = [derive_key(row.seed, row.number) for row in self._rows]
        return self._draw(self.weigh(logprobs), keys)

    def weigh(self, logprobs: mx.array) -> mx.array:
        """How often each token should be drawn, next to the likeliest of its row; 0: never."""
        scaled = logprobs * self._inverse
        peak = mx.max(scaled, axis=-1, keepdims=True)
        weights = mx.exp(scaled - peak)
        least = self._filters.find_least(scaled, peak)
        if least is not None:
            weights = mx.where(scaled < least, 0.0, weights)
        return weights if self._xtc is None else self._xtc.exclude(weights)


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
