"""What is measured of each burst, and how repeats are summed up. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from .burst import Burst, percentile


class Unit(StrEnum):
    """What a figure counts."""

    SECONDS = "s"
    PER_SECOND = "per_s"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure.

    Attributes:
        name: its key for programs.
        title: for people.
        unit: of its values. Seconds should be few, and tokens per second many.
        of: finds it in a burst and the bytes of its process; None if the burst does not show it.
        is_compared: whether a comparison says that it has become slower.
    """

    name: str
    title: str
    unit: Unit
    of: Callable[[Burst, int], float | None]
    is_compared: bool = False


def _gap(percent: int) -> Callable[[Burst, int], float | None]:
    return lambda burst, _: percentile(gaps, percent) if (gaps := burst.gaps_s) else None


FIGURES = (
    Figure(
        name="first_token_s",
        title="FIRST TOKEN",
        unit=Unit.SECONDS,
        of=lambda burst, _: burst.first_s,
        is_compared=True,
    ),
    Figure(name="gap_p50_s", title="GAP P50", unit=Unit.SECONDS, of=_gap(50), is_compared=True),
    Figure(name="gap_p99_s", title="GAP P99", unit=Unit.SECONDS, of=_gap(99), is_compared=True),
    Figure(name="gap_max_s", title="LONGEST", unit=Unit.SECONDS, of=_gap(100)),
    Figure(
        name="stream_tokens_per_s",
        title="TOK/S EACH",
        unit=Unit.PER_SECOND,
        of=lambda burst, _: burst.stream_per_s,
    ),
    Figure(
        name="tokens_per_s",
        title="TOK/S ALL",
        unit=Unit.PER_SECOND,
        of=lambda burst, _: burst.whole_per_s,
        is_compared=True,
    ),
    Figure(
        name="steady_tokens_per_s",
        title="TOK/S STEADY",
        unit=Unit.PER_SECOND,
        of=lambda burst, _: burst.steady_per_s or None,
    ),
    Figure(
        name="prefill_tokens_per_s",
        title="PREFILL TOK/S",
        unit=Unit.PER_SECOND,
        of=lambda burst, _: burst.prefill_per_s,
    ),
    Figure(
        name="memory_bytes",
        title="MEMORY",
        unit=Unit.BYTES,
        of=lambda _, memory_bytes: memory_bytes or None,
    ),
)
BY_NAME = {figure.name: figure for figure in FIGURES}

Values = dict[str, list[float]]
"""By the names of figures; a value for each repeat that showed it."""


def add_burst(values: Values, burst: Burst, memory_bytes: int) -> None:
    """Adds the figures of one more repeat.

    Args:
        values: takes them.
        burst: of this repeat.
        memory_bytes: the most that the model's process took meanwhile; 0 if nobody knows.
    """
    for figure in FIGURES:
        value = figure.of(burst, memory_bytes)
        if value is not None:
            values.setdefault(figure.name, []).append(value)


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, range and values of repeated measurements, of which there is at least one."""
    return {
        "median": statistics.median(values),
        "low": min(values),
        "high": max(values),
        "values": list(values),
    }


def summaries(values: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any] | None]:
    """The summary of each figure; None for one that no repeat showed."""
    return {name: summary(found) if (found := values.get(name)) else None for name in BY_NAME}
