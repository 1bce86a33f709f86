"""What the campaign makes of answers, samples and figures."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest

from mlxsup.client import ConnectionLost

from campaign.hostile import MAKERS, hostile
from campaign.oracle import Answer, wrongs
from campaign.scenario import (
    EXIT_CODES,
    FAKE,
    Bound,
    Figure,
    NotShown,
    Place,
    Result,
    Scenario,
    Verdict,
    at_most,
    at_most_beside,
    count,
    equals,
    exit_code,
    median_at_most,
    p99_at_most,
    table,
)
from campaign.soak import problems_of

PLACE = Place(tiny=Path("none"))


def answer(tokens: list[int], *ends: str, numbers: tuple[int, ...] = (0, 1)) -> Answer:
    return Answer(tokens=tokens, numbers=list(numbers), ends=list(ends), text="ab")


@pytest.mark.parametrize(
    ("got", "may_be_cut", "wrong"),
    [
        (answer([1, 2, 3], "length"), False, ""),
        (answer([1, 2], "cancelled"), True, ""),
        (answer([1, 2], "worker_crashed"), True, ""),
        (answer([1, 2, 3]), False, "ends: [] instead of one"),
        (answer([1, 2, 3], "length", "length"), False, "instead of one"),
        (answer([1, 2, 3], "cancelled"), False, "failed with"),
        (answer([1, 2], "length"), False, "tokens: 2 of 3"),
        (answer([1, 2], "length"), True, "tokens: 2 of 3"),
        (answer([1, 2, 3, 3], "length"), False, "tokens: 4 of 3"),
        (answer([1, 9], "cancelled"), True, "another from 1 on"),
        (answer([1, 2, 3], "length", numbers=(0, 2)), False, "numbers: "),
        (answer([1, 2, 3], "length", numbers=(0, 1, 1)), False, "numbers: "),
        (answer([1, 2, 3], "length", numbers=(1, 0)), False, "numbers: "),
    ],
)
def test_wrongs(got: Answer, may_be_cut: bool, wrong: str) -> None:
    found = wrongs(got, [1, 2, 3], may_be_cut=may_be_cut)
    assert bool(found) == bool(wrong)
    assert not found or wrong in found[0]


def test_wrongs_of_text() -> None:
    assert wrongs(answer([], "length"), text="ab") == []
    assert wrongs(answer([], "cancelled"), text="abc", may_be_cut=True) == []
    for right in ("abc", "b", ""):
        assert "text: " in wrongs(answer([], "length"), text=right)[0]


@pytest.mark.parametrize(
    ("bound", "values", "verdict"),
    [
        (at_most(2.0), [1.0, 2.0], Verdict.KEPT),
        (at_most(2.0), [1.0, 2.1], Verdict.MISSED),
        (equals(0), [0.0, 0.0], Verdict.KEPT),
        (equals(0), [0.0, 1.0], Verdict.MISSED),
        (median_at_most(2.0), [1.0, 2.0, 9.0], Verdict.KEPT),
        (median_at_most(2.0), [1.0, 2.1, 9.0], Verdict.MISSED),
        (at_most_beside("base", 0.5), [1.5, 2.5], Verdict.KEPT),
        (at_most_beside("base", 0.5), [1.6, 2.5], Verdict.MISSED),
        (p99_at_most(1.0, least=100), [1.0] * 99 + [9.0], Verdict.KEPT),
        (p99_at_most(1.0, least=100), [1.0] * 98 + [9.0] * 2, Verdict.MISSED),
        (p99_at_most(1.0, least=100), [1.0] * 99, Verdict.NOT_SHOWN),
        (None, [1.0], Verdict.REPORTED),
        (None, [], Verdict.NOT_SHOWN),
    ],
)
def test_verdict(bound: Bound | None, values: list[float], verdict: Verdict) -> None:
    figure = Figure("key", "what", bound=bound)
    result = Result(scenario([figure]), {"key": values, "base": [1.0, 2.0]}, rounds=1)
    assert result.verdict(figure) is verdict


def scenario(figures: list[Figure], *values: float | Exception) -> Scenario:
    """Return a scenario whose rounds give these values of `key`, or raise."""
    rounds = iter(values)

    def run(place: Place) -> dict[str, float | list[float]]:
        value = next(rounds)
        if isinstance(value, Exception):
            raise value
        return {"key": value}

    return Scenario("s", "P1", FAKE, 1, run, tuple(figures))


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (AssertionError("broken"), Verdict.MISSED),
        (ConnectionLost("lost", "ipc://x"), Verdict.MISSED),
        (NotShown("busy"), Verdict.NOT_SHOWN),
        (KeyError("ours"), Verdict.NOT_SHOWN),
    ],
)
def test_a_round_that_raises_is_the_last(error: Exception, verdict: Verdict) -> None:
    result = Result(scenario([count("key", "what")], 0.0, error, 0.0))
    for _ in range(3):
        result.run(PLACE)
    assert (result.rounds, result.samples) == (1, {"key": [0.0]})
    assert result.verdict(result.scenario.figures[0]) is verdict
    assert exit_code([result]) == EXIT_CODES[verdict]
    assert f"s: {verdict}: " in table([result])


def test_table() -> None:
    figures = [Figure("key", "until it ends", bound=at_most(3.0)), count("none", "never", None)]
    result = Result(scenario(figures, 1.0, 2.0))
    for _ in range(2):
        result.run(PLACE)
    head, _, first, second = (line.split(" | ") for line in table([result]).splitlines())
    assert first == ["| P1", "until it ends", FAKE, "1.5 (1 to 2) s", "–", "≤3 s", "kept", "2 |"]
    assert len(first) == len(head) == 8
    assert second[6] == "not shown"


def test_hostile_draws_each_kind_before_any_comes_again() -> None:
    drawn = [one.kind for one in islice(hostile(random.Random(1)), len(MAKERS))]
    assert drawn == list(MAKERS)


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        ("files of fake", (9, 9, 3, 3, 3, 3, 3, 3), ""),
        ("files of fake", (3, 3, 3, 3, 3, 3, 3, 4), "files of fake: between 3 and 4"),
        ("rows", (0, 0, 0, 1, 0, 0, 0, 0), "rows: 1, at most 0"),
        ("zombies", (0, 0, 0, 0, 0, 0, 0, 2), "zombies: 2, at most 0"),
        ("RSS of fake", (0, 50, 60, 60, 61, 60, 60, 60), ""),
        ("RSS of fake", (0, 50, 60, 61, 62, 63, 64, 66), "grew by 5.7 MB, at most 5"),
        ("log of fake", (0, 0, 0, 0, 0, 33, 1, 0), "log of fake: 33, at most 32.5059"),
    ],
)
def test_problems_of_samples(name: str, values: tuple[float, ...], problem: str) -> None:
    found = problems_of([{"at": n, name: value} for n, value in enumerate(values)], {})
    assert bool(found) == bool(problem)
    assert not found or problem in found[0]
