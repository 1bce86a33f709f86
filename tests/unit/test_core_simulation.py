"""The quick version of `make simulate` (P22): some seeds, and some planted bugs that they see."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulation.mutants import MUTANTS, is_caught
from simulation.world import World

TESTS = Path(__file__).parents[1]
CORE = TESTS.parent / "supervisor" / "core"
WITHOUT_DECISIONS = {"__init__", "actions", "events", "settings", "triggers"}
"""Values only."""

REPLAYED_SEEDS = 60


@pytest.mark.parametrize("first", range(1, 121, 20))
def test_seeds_of_faults_break_no_promise_P22(first: int) -> None:
    for seed in range(first, first + 20):
        try:
            World(seed).run()
        except Exception as error:
            raise AssertionError(f"again: make simulate SEEDS=1 FIRST={seed}") from error


def test_a_seed_replays_event_by_event_under_any_hash_seed_P22() -> None:
    """The order in which a set is walked depends on the interpreter's hash seed, and nothing of
    the core or of the simulation may."""
    command = [sys.executable, "-m", "simulation.digest", "--seeds", str(REPLAYED_SEEDS)]
    path = os.pathsep.join([os.fspath(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    runs = [
        subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": hash_seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for hash_seed in ("0", "1")
    ]
    first, second = (run.communicate(timeout=300)[0].splitlines() for run in runs)
    assert [run.returncode for run in runs] == [0, 0]
    assert len(first) == len(second) == REPLAYED_SEEDS
    assert [line for line in first if line not in second] == []


def test_every_module_of_the_core_has_a_planted_bug() -> None:
    modules = {path.stem for path in CORE.glob("*.py")} - WITHOUT_DECISIONS
    assert {mutant.module for mutant in MUTANTS} == modules


@pytest.mark.parametrize("module", ["serving", "recovery", "watchdog"])
def test_a_planted_bug_is_seen(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.fspath(TESTS), prepend=os.pathsep)
    assert is_caught(module)
