"""The quick version of `make promises`: each measure once, at its smallest, and the report."""

from __future__ import annotations

from pathlib import Path

import pytest
from promises.__main__ import MEASURES, measure_all, report
from promises.long_runs import counts
from promises.measure import SMALL, Measure, Place
from support.tiny_model import make_tiny_model

QUICK = ("P2", "P9", "P16", "P18", "P20", "P24")
PROMISES = {f"P{number}" for number in range(1, 27)}


def test_every_promise_has_its_measure() -> None:
    found = {measure.promise for measure in MEASURES} | {run[0] for run in counts(1.0)}
    assert found - {"P0"} == PROMISES


@pytest.mark.parametrize(
    "measure", [m for m in MEASURES if m.promise in QUICK], ids=lambda measure: measure.promise
)
def test_a_promise_is_kept(measure: Measure, tmp_path: Path) -> None:
    [outcome] = measure_all([measure], Place(sizes=SMALL, tiny=tmp_path))
    assert not outcome.problem
    assert all(outcome.is_kept(figure) for figure in measure.figures), outcome.samples
    text = report([outcome], [], SMALL, "small")
    assert all(figure.what in text for figure in measure.figures)
    assert "BROKEN" not in text


def test_a_broken_promise_is_named_and_not_tried_again(tmp_path: Path) -> None:
    def fail(place: Place) -> dict[str, float]:
        raise AssertionError("a child is left")

    measure = Measure(promise="P13", where="x", round=fail, figures=MEASURES[0].figures)
    [outcome] = measure_all([measure], Place(sizes=SMALL, tiny=tmp_path))
    text = report([outcome], [], SMALL, "small")
    assert "BROKEN" in text
    assert "a child is left" in text


@pytest.mark.slow
@pytest.mark.mlx
@pytest.mark.timeout(900)
def test_all_promises_are_kept_at_small_sizes(tmp_path: Path) -> None:
    place = Place(sizes=SMALL, tiny=make_tiny_model(tmp_path / "tiny"))
    for outcome in measure_all(MEASURES, place):
        assert not outcome.problem
        for figure in outcome.measure.figures:
            assert outcome.is_kept(figure), (figure.what, outcome.samples)
