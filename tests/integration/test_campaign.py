"""Short campaigns (P1, P17, J4).

Real: daemons with fake engines, hostile clients and workers that are killed.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from campaign.__main__ import SCENARIOS
from campaign.chaos import run_chaos
from campaign.hostile import through_sockets
from campaign.scenario import Place, Result, Scenario, Verdict
from campaign.soak import run_soak
from support.models.tiny_model import make_tiny_model

TESTS = Path(__file__).parents[1]
OWN_TESTS = ("chaos", "sockets", "soak")

# A short run on a busy machine may take ten times the CPU time of a callback.
chaos = partial(run_chaos, 30, seed=2, models="a", limit_s=300.0)
sockets = partial(through_sockets, 400, seed=4, max_call_s=1.0)
soak = partial(run_soak, 0.0, every_s=0.0)


def test_requests_outlive_kills_and_pauses_P1() -> None:
    values = chaos(kinds=("SIGKILL", "SIGSEGV", "unload", "pause"))
    assert values["violations"] == 0


def test_hostile_frames_break_no_stream_P17() -> None:
    values = sockets()
    assert values["answered"] >= 400


def test_nothing_grows_in_ordinary_use_J4() -> None:
    values = soak()
    assert (values["crashes"], values["unloads"]) == (1, 1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_requests_reconcile_under_every_fault_P1() -> None:
    run_chaos(4000, seed=2)


@pytest.mark.slow
@pytest.mark.mlx
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "scenario", [s for s in SCENARIOS if not s.name.startswith(OWN_TESTS)], ids=lambda s: s.name
)
def test_a_small_round_measures_every_figure(scenario: Scenario, tmp_path: Path) -> None:
    """What is timed in one small round is not judged; what is counted is."""
    result = Result(scenario)
    result.run(Place(tiny=make_tiny_model(tmp_path / "tiny"), is_small=True))
    if result.problem and result.problem_verdict is Verdict.NOT_SHOWN:
        pytest.skip(result.problem)
    assert not result.problem, result.problem
    for figure in scenario.figures:
        assert result.samples.get(figure.key), figure.what
        if figure.bound is not None and figure.bound.is_exact:
            assert result.verdict(figure) is Verdict.KEPT, (figure.what, result.samples)


@pytest.mark.slow
def test_the_command_prints_one_table() -> None:
    command = [sys.executable, "-m", "campaign", "--small", "--only", "sockets"]
    done = subprocess.run(
        [*command, "--requests", "100"], cwd=TESTS, capture_output=True, text=True, check=False
    )
    assert "| promise | figure | on | with the fault |" in done.stdout, done.stderr
    assert done.stdout.count("| P17 |") == 3, done.stdout + done.stderr
