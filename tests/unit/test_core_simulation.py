"""The quick version of `make simulate` (P22): some seeds, and the planted bugs that they see."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.mutants import SEEN_IN, Sight, confirmed, in_order
from simulation.planted import MUTANTS
from simulation.suspicion import Says, Suspicion
from simulation.violation import Violation
from simulation.world import World

TESTS = Path(__file__).parents[1]
CORE = TESTS.parent / "supervisor" / "core"
WITHOUT_DECISIONS = {
    "__init__", "actions", "effects", "events", "invariants", "load_times", "settings", "triggers",
}  # fmt: skip
"""Values, and what is checked of them."""

BEFORE_EVENTS = {"plan", "change", "pins", "sentences"}
"""Of memory: figures that are found before the core gets them, and words."""

REPORTS = {"flight", "outline", "reload_memory"}
"""What only reports: decisions to the flight recorder, states to a service manager, and what a
reload would do to whoever asks."""

OTHERS = WITHOUT_DECISIONS | BEFORE_EVENTS | REPORTS

REPLAYED_SEEDS = 24
SEEDS = 200
"""Found in the first seeds: what every test run has time for."""


def _started(*arguments: str, hash_seed: str = "0") -> subprocess.Popen[str]:
    path = os.pathsep.join([os.fspath(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": hash_seed},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("first", range(1, SEEDS + 1, 20))
def test_seeds_of_faults_break_no_promise_P22(first: int) -> None:
    for seed in range(first, first + 20):
        try:
            World(seed).run()
        except Violation as error:
            raise AssertionError(f"again: make simulate SEEDS=1 FIRST={seed}") from error


@pytest.mark.slow
def test_a_seed_replays_event_by_event_under_any_hash_seed_P22() -> None:
    """The order in which a set is walked depends on the interpreter's hash seed, and nothing of
    the core or of the simulation may."""
    runs = [
        _started("-m", "simulation.digest", "--seeds", str(REPLAYED_SEEDS), hash_seed=hash_seed)
        for hash_seed in ("0", "1", "2")
    ]
    first, *others = (run.communicate(timeout=600)[0].splitlines() for run in runs)
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert len(first) == REPLAYED_SEEDS
    assert others == [first, first]


def test_every_module_of_the_core_has_a_planted_bug() -> None:
    modules = {
        ".".join(path.relative_to(CORE).with_suffix("").parts)
        for path in CORE.rglob("*.py")
        if path.stem not in OTHERS
    }
    assert {mutant.module for mutant in MUTANTS} == modules
    assert sum(" × " in mutant.name for mutant in MUTANTS) >= 8, "crossings"
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_planted_bugs_are_up_to_date() -> None:
    for mutant in MUTANTS:
        source = (CORE / f"{mutant.module.replace('.', '/')}.py").read_text()
        compile(mutant.plant(source), mutant.module, "exec")
        assert mutant.plant(source) != source


def test_a_bug_counts_only_in_a_seed_that_the_core_passes_without_it() -> None:
    first = Sight(name="bug", check="heals", seed=5)
    second = Sight(name="bug", check="line", seed=9)
    asked: list[int] = []

    def look_after(seed: int) -> Sight:
        asked.append(seed)
        return second if seed == first.seed else Sight(name="bug")

    assert confirmed(first, lambda seed: seed != first.seed, look_after) == second
    assert asked == [first.seed]
    assert confirmed(second, lambda seed: False, look_after) == Sight(name="bug")
    assert confirmed(first, lambda seed: True, look_after) == first


def test_the_seed_that_showed_a_bug_comes_first_and_no_other_is_left_out() -> None:
    assert in_order(4, None) == (1, 2, 3, 4)
    assert in_order(4, 3) == (3, 1, 2, 4)
    assert in_order(4, 7) == (7, 1, 2, 3, 4)


def test_seeds_are_remembered_of_planted_bugs_alone() -> None:
    seen_in = json.loads(SEEN_IN.read_text())
    assert set(seen_in) <= {mutant.name for mutant in MUTANTS}


def test_a_planted_bug_is_seen_where_tokens_are_not_counted() -> None:
    _are_seen("--only", "usage lost", "--jobs", "1", count=1)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_planted_bug_is_seen_whichever_it_is() -> None:
    _are_seen(count=len(MUTANTS))


def _are_seen(*options: str, count: int) -> None:
    """From outside, without the core's own assertions."""
    run = _started("-O", "-m", "simulation.mutants", *options)
    said = run.communicate()[0].splitlines()
    not_seen = "\n".join(line for line in said[:-1] if not re.search(r", seed \d+$", line))
    assert said[-1] == f"{count} of {count} planted bugs were seen from outside", not_seen
    assert run.returncode == 0


def test_the_oracle_of_suspicion_follows_the_rules_of_the_document_P10() -> None:
    """By hand, as the oracle is nobody's child: two crashes, then turns, then the third."""
    oracle = Suspicion()
    assert oracle.died(Says.ACCUSES, [(1, 5), (2, 5)], 0.0).culprit is None
    assert not oracle.takes_turn(1)
    assert oracle.died(Says.ACCUSES, [(1, 5), (2, 5)], 1.0).culprit is None
    assert (oracle.takes_turn(1), oracle.takes_turn(2)) == (True, True)
    oracle.gained(1, 6, 2.0)
    oracle.gained(1, 8, 2.1)
    assert (oracle.takes_turn(1), oracle.takes_turn(2)) == (False, True)
    assert oracle.died(Says.NOTHING, [(2, 5)], 3.0).culprit is None
    assert oracle.died(Says.ACCUSES, [(2, 5)], 4.0).culprit == 2
    oracle.forget(4.0 + 3600.0)
    assert oracle.quarantined == {}
