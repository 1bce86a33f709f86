"""Scenarios, their figures and targets, and the table of what came of them."""

from __future__ import annotations

import math
import statistics
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from mlxsup.client import RequestError

FAKE = "fake engine"
CPU = "MLX, CPU"
MAX_SHOWN = 1500

Values = Mapping[str, float | list[float]]
"""What one round has measured, by key."""
Samples = dict[str, list[float]]
"""What all rounds have measured, by key."""


class Verdict(StrEnum):
    """How a promise stands after a run."""

    KEPT = "kept"
    MISSED = "MISSED"
    """It was broken, or its figure is past its target."""
    NOT_SHOWN = "not shown"
    """The run could not judge: a fault never struck, or the disk was full."""
    REPORTED = "reported"
    """The figure has no target."""


EXIT_CODES = {Verdict.KEPT: 0, Verdict.REPORTED: 0, Verdict.MISSED: 4, Verdict.NOT_SHOWN: 3}
"""Any other code, 1 of a traceback too, means not shown."""


class NotShown(Exception):
    """A round could not do what it was to judge by, with the reason for people."""


def require(is_so: bool, reason: str) -> None:
    """Raise NotShown unless a round can judge what it is to judge."""
    if not is_so:
        raise NotShown(reason)


@dataclass(frozen=True, slots=True)
class Bound:
    """A target.

    Attributes:
        text: for people.
        holds: judges all samples of a scenario for one key; None if they are too few.
        is_exact: one value is right, however fast the machine is.
    """

    text: str
    holds: Callable[[Samples, str], bool | None]
    is_exact: bool = False


def at_most(limit: float) -> Bound:
    """Hold each sample against a limit."""
    return Bound(f"≤{limit:,g}", lambda seen, key: max(seen[key]) <= limit)


def equals(value: float, *, is_exact: bool = True) -> Bound:
    """Ask for one value; what is counted by the clock is not exact."""
    return Bound(f"{value:,g}", lambda seen, key: set(seen[key]) == {value}, is_exact)


def median_at_most(limit: float) -> Bound:
    """Hold the median against a limit."""
    return Bound(f"median ≤{limit:,g}", lambda seen, key: statistics.median(seen[key]) <= limit)


def at_most_beside(base: str, more: float) -> Bound:
    """Hold each sample against another figure of its round, and something more."""

    def holds(seen: Samples, key: str) -> bool:
        pairs = zip(seen[key], seen[base], strict=True)
        return all(value <= usual + more for value, usual in pairs)

    return Bound(f"≤{base} + {more:g}", holds)


def p99_at_most(limit: float, least: int = 500) -> Bound:
    """Hold the p99 against a limit; of fewer samples it would be their maximum."""

    def holds(seen: Samples, key: str) -> bool | None:
        ordered = sorted(seen[key])
        is_enough = len(ordered) >= least
        return ordered[math.ceil(0.99 * len(ordered)) - 1] <= limit if is_enough else None

    return Bound(f"p99 of ≥{least} ≤{limit:g}", holds)


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table.

    Attributes:
        key: of the values measured with the fault.
        what: for people.
        unit: for people.
        bound: the target; None where the figure is only reported.
        without: the key of the same without the fault; empty where there is no such thing.
    """

    key: str
    what: str
    unit: str = "s"
    bound: Bound | None = None
    without: str = ""


def count(key: str, what: str, wanted: float | None = 0) -> Figure:
    """Return a figure that is counted, and right at one value if one is wanted."""
    return Figure(key, what, "", None if wanted is None else equals(wanted))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a round is given.

    Attributes:
        tiny: the folder of a real model.
        is_small: seconds instead of minutes, and no figure to publish.
        seed: of what is drawn.
        requests, minutes: how much chaos, the sockets and the soak do, if not what is usual.
    """

    tiny: Path
    is_small: bool = False
    seed: int = 1
    requests: int | None = None
    minutes: float | None = None

    def size(self, usual: int, small: int) -> int:
        """Return how much a round does."""
        return small if self.is_small else usual


@dataclass(frozen=True, slots=True)
class Scenario:
    """A fault that strikes, and what is measured of it.

    Attributes:
        name: by which it is chosen.
        promises: their ids.
        where: on what it runs.
        run: measures once; raises AssertionError where a promise is broken, and NotShown where
            the fault could not strike.
        figures: what comes of it.
        rounds: how often it is run for a published figure.
    """

    name: str
    promises: str
    where: str
    rounds: int
    run: Callable[[Place], Values]
    figures: tuple[Figure, ...]


@dataclass(slots=True)
class Result:
    """What came of a scenario in all rounds; a round that fails is the last one."""

    scenario: Scenario
    samples: Samples = field(default_factory=dict)
    rounds: int = 0
    problem: str = ""
    problem_verdict: Verdict = Verdict.NOT_SHOWN

    def run(self, place: Place) -> None:
        """Run another round, unless one has failed."""
        if self.problem:
            return
        try:
            values = self.scenario.run(place)
        except NotShown as error:
            self.problem = str(error) or "not shown"
        except (AssertionError, RequestError, ConnectionError) as error:
            # A request or a connection that fails where it must not is a broken promise, too.
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.problem = f"{error or where.line} ({where.name})"[:MAX_SHOWN]
            self.problem_verdict = Verdict.MISSED
        except Exception as error:  # noqa: BLE001 - the table names whatever broke
            traceback.print_exc()
            self.problem = f"{error!r}"[:MAX_SHOWN]
        else:
            self.rounds += 1
            for key, value in values.items():
                more = value if isinstance(value, list) else [value]
                self.samples.setdefault(key, []).extend(more)

    def verdict(self, figure: Figure) -> Verdict:
        """Return how the promise stands, by this figure."""
        if self.problem:
            return self.problem_verdict
        if not self.samples.get(figure.key):
            return Verdict.NOT_SHOWN
        if figure.bound is None:
            return Verdict.REPORTED
        holds = figure.bound.holds(self.samples, figure.key)
        return {True: Verdict.KEPT, False: Verdict.MISSED, None: Verdict.NOT_SHOWN}[holds]


HEAD = ("promise", "figure", "on", "with the fault", "without", "target", "verdict", "rounds")


def table(results: Sequence[Result]) -> str:
    """Return all figures as one Markdown table, and why rounds failed."""
    rows = [
        (
            result.scenario.promises,
            figure.what,
            result.scenario.where,
            spread(result.samples.get(figure.key, []), figure.unit),
            spread(result.samples.get(figure.without, []), figure.unit),
            f"{figure.bound.text} {figure.unit}".rstrip() if figure.bound else "–",
            str(result.verdict(figure)),
            str(result.rounds),
        )
        for result in results
        for figure in result.scenario.figures
    ]
    lines = ["| " + " | ".join(row) + " |" for row in (HEAD, ("---",) * len(HEAD), *rows)]
    failed = [one for one in results if one.problem]
    problems = [f"{one.scenario.name}: {one.problem_verdict}: {one.problem}" for one in failed]
    return "\n".join([*lines, *(["", *problems] if problems else [])])


def spread(values: Sequence[float], unit: str) -> str:
    """Return median and range, for people."""
    if not values:
        return "–"
    text = f"{statistics.median(values):,.4g}"
    if min(values) != max(values):
        text += f" ({min(values):,.4g} to {max(values):,.4g})"
    return f"{text} {unit}".rstrip()


def exit_code(results: Sequence[Result]) -> int:
    """Return the exit code of the worst verdict."""
    found = {result.verdict(figure) for result in results for figure in result.scenario.figures}
    worst = (v for v in (Verdict.MISSED, Verdict.NOT_SHOWN) if v in found)
    return EXIT_CODES[next(worst, Verdict.KEPT)]
