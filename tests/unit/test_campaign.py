"""The campaign judges answers and samples."""

from __future__ import annotations

import pytest

from campaign.oracle import Answer, wrongs
from campaign.soak import problems_of


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
