"""What the fuzz and the soak hold their figures against (P17, J4)."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice

import pytest

from fuzz.figures import MAX_PEAK_BYTES, MAX_PING_S, SocketFigures
from fuzz.frames import KINDS, MAKERS, hostile
from soak.samples import Sample, curves_of
from support.verdict import NotShown


def whole_run() -> SocketFigures:
    """Figures with which nothing is wrong."""
    kinds = Counter(dict.fromkeys(KINDS, 2)) + Counter({"oversized frame": 5})
    return SocketFigures(sent=1005, arrived=1000, kinds=kinds, strangers=1, beats=1, early=1)


def problems_of(figures: SocketFigures) -> list[str]:
    figures.judge(1000, 0.1)
    return figures.problems


def test_a_whole_run_has_no_problem() -> None:
    assert problems_of(whole_run()) == []


def test_each_bound_is_held_against_its_figure() -> None:
    figures = whole_run()
    figures.arrived = 999
    assert problems_of(figures) == ["1000 were sent, and 999 arrived"]
    for name, value, words in (
        ("peak_bytes", MAX_PEAK_BYTES + 1, "RSS grew"),
        ("longest_call_s", 0.11, "a callback"),
        ("longest_ping_s", MAX_PING_S + 1, "a ping"),
    ):
        figures = whole_run()
        setattr(figures, name, value)
        (problem,) = problems_of(figures)
        assert problem.startswith(words)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_that_was_never_drawn_shows_nothing(kind: str) -> None:
    figures = whole_run()
    del figures.kinds[kind]
    with pytest.raises(NotShown, match=kind):
        figures.judge(1000, 0.1)


@pytest.mark.parametrize("missing", ["arrived", "strangers", "beats", "early"])
def test_too_few_messages_show_nothing(missing: str) -> None:
    figures = whole_run()
    setattr(figures, missing, 0)
    if missing == "arrived":
        figures.sent = 5
    with pytest.raises(NotShown):
        figures.judge(1000, 0.1)


def test_each_kind_is_drawn_before_any_comes_again() -> None:
    drawn = [one.kind for one in islice(hostile(random.Random(1)), len(MAKERS))]
    assert drawn == list(MAKERS)


def samples(name: str, *values: float) -> list[Sample]:
    return [
        Sample(at_s=float(n), requests=n, values={name: value}) for n, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        ("files of fake", (9, 9, 3, 3, 3, 3, 3, 3), ""),
        ("files of fake", (3, 3, 3, 3, 3, 3, 3, 4), "files of fake: between 3 and 4"),
        ("rows", (0, 0, 0, 1, 0, 0, 0, 0), "rows: 1, at most 0"),
        ("zombies", (0, 0, 0, 0, 0, 0, 0, 2), "zombies: 2, at most 0"),
        ("RSS in MB of fake", (0, 50, 60, 60, 61, 60, 60, 60), ""),
        (
            "RSS in MB of fake",
            (0, 50, 60, 61, 62, 63, 64, 66),
            "RSS in MB of fake: grew by 5.7, at most 5",
        ),
        (
            "log in MB of fake",
            (0, 0, 0, 0, 0, 33, 1, 0),
            "log in MB of fake: 33, at most 32.5059",
        ),
    ],
)
def test_a_series_is_held_against_its_bound(
    name: str, values: tuple[float, ...], problem: str
) -> None:
    (curve,) = curves_of(samples(name, *values))
    assert curve.problem == problem
