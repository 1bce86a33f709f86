"""The quick version of `make promises`: each measure once, at its smallest, and the report."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from mlxsup.client import Client

from promises import neighbours
from promises.__main__ import measure_all
from promises.measure import SMALL, Measure, Outcome, Place
from promises.measures import MEASURES
from support.daemon import row
from support.tiny_model import make_tiny_model
from support.verdict import NotShown, Verdict

QUICK = ("P2", "P9", "P18", "P20")
"""Fast, and without a real model."""


def measured(measure: Measure, tiny: Path) -> Outcome:
    """One round."""
    outcome = Outcome(measure=measure)
    measure_all([outcome], Place(sizes=SMALL, tiny=tiny), lambda _: None)
    return outcome


def test_a_neighbour_that_stands_still_misses_steps_P4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def strike_both(client: Client) -> None:
        other = row(client, "other")["pid"]
        os.kill(other, signal.SIGSTOP)
        os.kill(row(client, "first")["pid"], signal.SIGSEGV)
        time.sleep(1.5)  # the fault itself, not a wait for anything
        os.kill(other, signal.SIGCONT)

    monkeypatch.setattr(neighbours, "strike", strike_both)
    # Whether this machine is quiet enough for a figure is not what is tested here.
    monkeypatch.setattr(neighbours, "require", lambda is_so, reason: None)
    outcome = measured(neighbours.MEASURES[0], tmp_path)
    [missed, _, ratio] = outcome.measure.figures
    assert not outcome.problem
    assert outcome.samples["missed"][0] >= 50
    assert outcome.verdict(missed) is outcome.verdict(ratio) is Verdict.MISSED


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real model."""
    return make_tiny_model(tmp_path_factory.mktemp("promises") / "tiny")


SLOW = (pytest.mark.slow, pytest.mark.mlx)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "measure", [pytest.param(m, marks=() if m.promise in QUICK else SLOW) for m in MEASURES],
    ids=lambda measure: measure.key,
)  # fmt: skip
def test_a_small_round_measures_every_figure_and_what_is_counted_holds(
    measure: Measure, tiny: Path
) -> None:
    """What is timed in one small round is not judged; only for a slow one may the machine be
    too busy to judge."""
    outcome = Outcome(measure=measure)
    try:
        outcome.add(measure.round(Place(sizes=SMALL, tiny=tiny)))
    except NotShown as error:
        if measure.promise in QUICK:
            raise
        pytest.skip(str(error))
    for figure in measure.figures:
        assert outcome.samples.get(figure.key), figure.what
        if figure.bound is not None and figure.bound.is_exact:
            assert outcome.verdict(figure) is Verdict.KEPT, (figure.what, outcome)
