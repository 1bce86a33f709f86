"""What figures are held against: each target's text and rule are made from one number.

Each bound judges all samples of its figure and says kept, MISSED, or not shown where there are too
few of them to judge.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from support.verdict import Verdict

Samples = Mapping[str, Sequence[float]]
"""What all rounds have measured, by key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A target.

    Attributes:
        text: for people.
        judge: of all samples of a measure and the figure's key.
        has_unit: the figure's unit follows the text.
        is_exact: one value is right, however fast the machine is and however few samples there are.
    """

    text: str
    judge: Callable[[Samples, str], Verdict]
    has_unit: bool = True
    is_exact: bool = False


def _verdict(holds: bool) -> Verdict:
    return Verdict.KEPT if holds else Verdict.MISSED


def at_most(limit: float) -> Bound:
    """Every sample keeps to the limit."""
    return Bound(
        text=f"≤{limit:,g}", judge=lambda samples, key: _verdict(max(samples[key]) <= limit)
    )


def equals(value: float, *, is_exact: bool = True) -> Bound:
    """Every sample is that value; what is counted by the clock is not exact."""
    return Bound(
        text=f"{value:,g}",
        judge=lambda samples, key: _verdict(set(samples[key]) == {value}),
        is_exact=is_exact,
    )


def within(low: float, high: float) -> Bound:
    """Every sample lies between the two, both included."""
    return Bound(
        text=f"{low:,g} to {high:,g}",
        judge=lambda samples, key: _verdict(all(low <= one <= high for one in samples[key])),
    )


def median_at_most(limit: float) -> Bound:
    """The median of all samples keeps to the limit."""
    return Bound(
        text=f"median ≤{limit:,g}",
        judge=lambda samples, key: _verdict(statistics.median(samples[key]) <= limit),
    )


def at_most_beside(base: str, name: str, more: float) -> Bound:
    """In every round no more above another figure of the same round.

    Args:
        base: the key of the other figure.
        name: the other figure, for people.
        more: in the figure's unit.
    """

    def judge(samples: Samples, key: str) -> Verdict:
        pairs = zip(samples[key], samples[base], strict=True)
        return _verdict(all(value <= usual + more for value, usual in pairs))

    return Bound(text=f"≤{name} + {more:,g}", judge=judge)


def at_most_share(base: str, name: str, share: float) -> Bound:
    """In every round at most this share of another figure of the same round."""

    def judge(samples: Samples, key: str) -> Verdict:
        pairs = zip(samples[key], samples[base], strict=True)
        return _verdict(all(value <= share * whole for value, whole in pairs))

    return Bound(text=f"≤{share:,g} of {name}", judge=judge, has_unit=False)


def quantile_at_most(share: float, limit: float, *, least: int) -> Bound:
    """A quantile keeps to the limit; with fewer samples than `least` it is not known.

    Args:
        share: 0.99 of p99.
        limit: in the figure's unit.
        least: a p99 of few samples is their maximum.
    """

    def judge(samples: Samples, key: str) -> Verdict:
        if len(samples[key]) < least:
            return Verdict.NOT_SHOWN
        return _verdict(quantile(samples[key], share) <= limit)

    return Bound(text=f"p{100 * share:g} of ≥{least:,} ≤{limit:,g}", judge=judge)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
