"""How two answers to the same request compare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from mlxsup.worker.engine import RowToken
from mlxsup.worker.engines.mlx.logprobs import LEAST_LOGPROB

BOUND = 1e-3
"""By how much a log-probability in float32 may differ for the answers to count as equal."""


class Kind(StrEnum):
    """What came out of a trial."""

    BITS = "bits"
    ROUNDING = "rounding"
    WRONG = "WRONG"
    RAISED = "RAISED"
    SKIPPED = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of one trial.

    Attributes:
        kind: of the result.
        difference: the largest one between two log-probabilities; infinite if ids differ.
        detail: the exception, or what is wrong first.
        cached: how many tokens of each prompt came from earlier ones, if the trial is about that.
    """

    kind: Kind
    difference: float = 0.0
    detail: str = ""
    cached: tuple[int, ...] = ()

    @property
    def is_right(self) -> bool:
        """Whether the answers are equal but for rounding."""
        return self.kind in (Kind.BITS, Kind.ROUNDING)

    def __str__(self) -> str:
        if self.kind is Kind.ROUNDING:
            return f"{self.difference:.0e}"
        if self.kind is Kind.RAISED:
            return f"**RAISED** {self.detail}"
        if self.kind is Kind.WRONG:
            return f"**WRONG** {self.detail}".strip()
        return str(self.kind)


def compare(name: str, got: Sequence[RowToken], wanted: Sequence[RowToken]) -> Verdict:
    """An answer against the one it should be: ids, ends, and log-probabilities.

    Args:
        name: of the answer, for the detail.
        got: what an engine gave; it may have been cut off by a cancel.
        wanted: what it should be, as far as `got` goes.
    """
    worst = 0.0
    is_same = True
    for place, (mine, theirs) in enumerate(zip(got, wanted, strict=False)):
        if (mine.token, mine.finish) != (theirs.token, theirs.finish):
            return Verdict(
                kind=Kind.WRONG,
                difference=math.inf,
                detail=f"{name}: token {place} is {mine.token}, not {theirs.token}",
            )
        if mine.logprobs is None or theirs.logprobs is None:
            continue
        is_same = is_same and mine.logprobs == theirs.logprobs
        mine_values = [mine.logprobs.logprob, *(value for _, value in mine.logprobs.top)]
        their_values = [theirs.logprobs.logprob, *(value for _, value in theirs.logprobs.top)]
        if not all(LEAST_LOGPROB < value <= 0.0 for value in mine_values + their_values):
            return Verdict(kind=Kind.WRONG, detail=f"{name}: token {place} has no probability")
        # The likeliest tokens by place: equally likely ones may change places.
        pairs = zip(mine_values, their_values, strict=True)
        worst = max(worst, *(abs(one - other) for one, other in pairs))
    if len(got) > len(wanted):
        return Verdict(kind=Kind.WRONG, detail=f"{name}: {len(got)} tokens, not {len(wanted)}")
    if worst > BOUND:
        return Verdict(kind=Kind.WRONG, difference=worst, detail=f"{name}: differs by {worst:.0e}")
    kind = Kind.BITS if is_same else Kind.ROUNDING
    return Verdict(kind=kind, difference=worst)


def worst_of(verdicts: Sequence[Verdict]) -> Verdict:
    """The one that matters: what is not right before what is, then the largest difference."""
    order = list(Kind)
    worst = max(verdicts, key=lambda v: (order.index(v.kind), v.difference))
    cached = tuple(count for verdict in verdicts for count in verdict.cached)
    return Verdict(kind=worst.kind, difference=worst.difference, detail=worst.detail, cached=cached)
