"""The quick version of `make simulate` (P22): some seeds, and some planted bugs that they see."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from simulation.mutants import MUTANTS, is_caught
from simulation.world import World

TESTS = Path(__file__).parents[1]
CORE = TESTS.parent / "supervisor" / "core"
WITHOUT_DECISIONS = {"__init__", "actions", "events", "settings", "triggers", "causes"}
"""Values only; and the class of a cause, which no decision hangs on."""


@pytest.mark.parametrize("first", range(1, 121, 20))
def test_seeds_of_faults_break_no_promise_P22(first: int) -> None:
    for seed in range(first, first + 20):
        try:
            World(seed).run()
        except Exception as error:
            raise AssertionError(f"again: make simulate SEEDS=1 FIRST={seed}") from error


def test_every_module_of_the_core_has_a_planted_bug() -> None:
    modules = {path.stem for path in CORE.glob("*.py")} - WITHOUT_DECISIONS
    assert {mutant.module for mutant in MUTANTS} == modules


@pytest.mark.parametrize("module", ["serving", "recovery", "watchdog"])
def test_a_planted_bug_is_seen(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.fspath(TESTS))
    assert is_caught(module)
