"""The quick version of `make chaos` (P1): every kind of fault, and bugs that it has to see."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from chaos.mutants import MUTANTS, QUICK, Mutant, is_current, is_seen, plant, small
from chaos.run import run_chaos
from chaos.setting import crowded_setting, fake_setting, real_setting
from support.tiny_model import make_tiny_model
from support.verdict import Verdict


@pytest.mark.timeout(1200)
def test_requests_outlive_signals_and_restarts_P1() -> None:
    kinds = ("SIGKILL", "SIGSEGV", "restart --now", "unload", "pause")
    setting = replace(small(kinds), end_limit_s=300.0, run_limit_s=400.0)
    outcome = run_chaos(setting, requests=800, seed=2)
    assert outcome.verdict is Verdict.KEPT, outcome


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_ledger_reconciles_under_every_fault_P1() -> None:
    outcome = run_chaos(replace(fake_setting(), pause_s=0.2), requests=4000, seed=2)
    assert outcome.verdict is Verdict.KEPT, outcome


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_models_that_do_not_fit_together_are_evicted_and_lose_nothing_P1() -> None:
    setting = replace(crowded_setting(), kinds=("SIGKILL", "restart --now", "unload", "pause"))
    setting = replace(setting, pause_s=0.3, end_limit_s=300.0, run_limit_s=600.0)
    outcome = run_chaos(setting, requests=200, seed=2)
    assert outcome.verdict is Verdict.KEPT, outcome


@pytest.mark.mlx
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_ledger_reconciles_on_real_mlx_P1(tmp_path: Path) -> None:
    folders = {name: make_tiny_model(tmp_path / name, seed=n) for n, name in enumerate("ab")}
    kinds = ("SIGKILL", "SIGSEGV", "restart --now")
    outcome = run_chaos(replace(real_setting(folders), kinds=kinds), requests=300, seed=2)
    assert outcome.verdict is Verdict.KEPT, outcome


def test_faults_that_strike_too_seldom_show_nothing() -> None:
    setting = replace(small(("SIGKILL",)), run_limit_s=1.0, requests_per_fault=1)
    outcome = run_chaos(setting, requests=1000, seed=2)
    assert outcome.verdict is Verdict.NOT_SHOWN, outcome
    assert any("SIGKILL struck" in line and "not 1000" in line for line in outcome.lines)


def _name(mutant: Mutant) -> str:
    return mutant.name


@pytest.mark.parametrize("mutant", MUTANTS, ids=_name)
def test_planted_bugs_are_not_out_of_date(mutant: Mutant) -> None:
    assert is_current(mutant)


@pytest.mark.parametrize(
    "mutant", [pytest.param(m, marks=[] if m == QUICK[0] else pytest.mark.slow) for m in MUTANTS],
    ids=_name,
)  # fmt: skip
@pytest.mark.timeout(600)
def test_a_planted_bug_is_seen_P1(mutant: Mutant) -> None:
    outcome = plant(mutant)
    print(outcome)
    assert is_seen(mutant, outcome), f"{mutant.check!r} did not see it: {outcome}"
