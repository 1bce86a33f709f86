"""What is measured for a promise: figures, what they are held against, how a round gets them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mlxsup.client import RequestError

from .bounds import Bound, quantile
from support.verdict import NotShown, Verdict

FAKE = "fake engine"
CPU = "MLX, CPU"

Values = Mapping[str, float | list[float]]
"""What one round has measured, by key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much a run does; the defaults are what is published.

    Attributes:
        repeats: rounds, interleaved: each holds every measure, with and without its fault.
        crashes: P3, of 64 running rows, in each round.
        cycles: P14.
        unloads: P21.
        flood: P16, requests at once.
        connects: P18.
        starts: P19.
        storms, storm_connects: P24, over two processes; connections of one process in a storm.
        many_models: P24.
        silent: P15, processes of 50 connections each.
        pause_s: P7, for which the whole tree is stopped.
        long_prompt: P7, in tokens.
        long_answer: P25, in tokens.
        patience_s: how long a peer is waited for.
        peer_flood: requests; each has its own connection.
    """

    repeats: int = 5
    crashes: int = 100
    cycles: int = 1000
    unloads: int = 50
    flood: int = 10_000
    connects: int = 10_000
    starts: int = 20
    storms: int = 20
    storm_connects: int = 3000
    many_models: int = 24
    silent: int = 5
    pause_s: float = 60.0
    long_prompt: int = 40_000
    long_answer: int = 2000
    patience_s: float = 30.0
    peer_flood: int = 1000


SMALL = Sizes(
    repeats=1,
    crashes=2,
    cycles=10,
    unloads=4,
    flood=600,
    connects=300,
    starts=4,
    storms=4,
    storm_connects=1500,
    many_models=2,
    silent=1,
    pause_s=6.0,
    long_prompt=5000,
    long_answer=150,
    patience_s=3.0,
    peer_flood=50,
)
"""For the test, and while something is changed here: seconds, and no figure to publish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What every round is given.

    Attributes:
        sizes: how much it does.
        tiny: the folder of a real model.
    """

    sizes: Sizes
    tiny: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the report.

    Attributes:
        key: of the values measured with the fault.
        what: for people.
        unit: for people.
        bound: what it is held against; None where the figure is only reported.
        without: the key of the same without the fault; empty where there is no such thing.
        theirs: the key of the same of the peer; such a figure stands in the table beside it.
        digits: after the point.
        quantile: named beside the median.
    """

    key: str
    what: str
    unit: str = "s"
    bound: Bound | None = None
    without: str = ""
    theirs: str = ""
    digits: int = 2
    quantile: float | None = None

    @property
    def target(self) -> str:
        """The bound, for people."""
        if self.bound is None:
            return "–"
        return f"{self.bound.text} {self.unit}".rstrip() if self.bound.has_unit else self.bound.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A promise, and how to measure it.

    Attributes:
        promise: its id.
        name: apart from the other measures of the promise.
        where: on what it runs (J5).
        round: measures once, with the fault and without.
        figures: what comes of it.
        most_repeats: fewer than the run has, where one round is long.

    Raises:
        AssertionError: out of `round`, where what is promised is not so.
        NotShown: out of `round`, where the fault could not strike or the machine could not judge.
    """

    promise: str
    name: str
    where: str
    round: Callable[[Place], Values]
    figures: tuple[Figure, ...]
    most_repeats: int = 5

    @property
    def key(self) -> str:
        """Of its results; no other measure has it."""
        return f"{self.promise}-{self.name}".lower()


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of a measure in all rounds.

    Attributes:
        measure: it.
        samples: what the rounds measured, by key.
        rounds: that ended well.
        problem: why the last round did not; empty if it did.
        problem_verdict: what that means for the figures.
    """

    measure: Measure
    samples: dict[str, list[float]] = field(default_factory=dict)
    rounds: int = 0
    problem: str = ""
    problem_verdict: Verdict = Verdict.NOT_SHOWN

    def add(self, values: Values) -> None:
        """Another round."""
        self.rounds += 1
        for key, value in values.items():
            self.samples.setdefault(key, []).extend(value if isinstance(value, list) else [value])

    def fail(self, error: Exception) -> None:
        """A round that raised: a broken promise if it asserted one, else nothing is known."""
        if isinstance(error, NotShown):
            self.problem = str(error)
        else:
            self.problem = f"{type(error).__name__}: {error}"[:500]
        # A request or a connection that fails where it must not is a broken promise, too.
        is_judged = isinstance(error, AssertionError | RequestError | ConnectionError)
        self.problem_verdict = Verdict.MISSED if is_judged else Verdict.NOT_SHOWN

    def verdict(self, figure: Figure) -> Verdict:
        """How the promise stands, by this figure."""
        if self.problem:
            return self.problem_verdict
        if not self.samples.get(figure.key):
            return Verdict.NOT_SHOWN
        if figure.bound is None:
            return Verdict.REPORTED
        return figure.bound.judge(self.samples, figure.key)


def require(is_so: bool, reason: str) -> None:
    """For what a round needs before it can judge anything.

    Raises:
        NotShown: it is not so.
    """
    if not is_so:
        raise NotShown(reason)


def spread(figure: Figure, values: Sequence[float], patience_s: float) -> str:
    """Median and range, for people; what never came is infinite, and was waited for so long."""
    if not values:
        return "–"
    if all(math.isinf(value) for value in values):
        return f"none within {patience_s:.0f} s"

    def show(value: float) -> str:
        return "none" if math.isinf(value) else f"{value:.{figure.digits}f}"

    text = show(statistics.median(values))
    if min(values) != max(values):
        text += f" ({show(min(values))} to {show(max(values))})"
    if figure.quantile is not None:
        text += f", p{100 * figure.quantile:.0f} {show(quantile(values, figure.quantile))}"
    return f"{text} {figure.unit}".rstrip()
