"""How fast a model is on a machine, as one life has learned it and the next can use it; pure.

A pace is never trusted blindly: the first pass of a new life is measured against it, and a token
counts as twice as slow until this life has read a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

LONGEST_S = 3600.0
"""No pass, token or step that is remembered took longer."""

MOST = 2**31
"""No number of tokens or rows that is remembered is larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What a pacer knows of a model on a machine.

    Attributes:
        unit_s: seconds for each prompt token of a row.
        pass_s: seconds of a pass besides its tokens.
        largest_cost: rows × tokens of the largest pass that was measured.
        decode_s: seconds of a step that only decodes; 0: not measured.
        decode_rows: the rows of that step.
        burst_prompts: how many prompts the last burst had that one pass read; 0: there was none.
        burst_tokens: of each of them, at most.
    """

    unit_s: float
    pass_s: float
    largest_cost: int
    decode_s: float
    decode_rows: int
    burst_prompts: int = 0
    burst_tokens: int = 0

    def predict_s(self, cost: int) -> float:
        """Seconds of a pass of that cost."""
        return self.pass_s + self.unit_s * cost

    def without_burst(self) -> Pace:
        """The same of a life that has served none."""
        return replace(self, burst_prompts=0, burst_tokens=0)


def pace_from(value: Mapping[str, Any]) -> Pace:
    """Reads what `dataclasses.asdict` made of a pace.

    Raises:
        LookupError, TypeError, ValueError: it is none, or none that a machine can have.
    """
    pace = Pace(
        unit_s=_seconds(value["unit_s"]),
        pass_s=_seconds(value["pass_s"]),
        largest_cost=_count(value["largest_cost"]),
        decode_s=_seconds(value["decode_s"]),
        decode_rows=_count(value["decode_rows"]),
        burst_prompts=_count(value["burst_prompts"], least=0),
        burst_tokens=_count(value["burst_tokens"], least=0),
    )
    if pace.unit_s == 0.0:
        raise ValueError("no token takes no time")
    return pace


def _seconds(value: object) -> float:
    if not isinstance(value, float) or not 0.0 <= value <= LONGEST_S:
        raise ValueError("not seconds")
    return value


def _count(value: object, least: int = 1) -> int:
    if type(value) is not int or not least <= value <= MOST:
        raise ValueError("not a count")
    return value
