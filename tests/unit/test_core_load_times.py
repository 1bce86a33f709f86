"""How long each phase of a load took: counted, shown meanwhile, kept until the next load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.states import LoadPhase, State
from mlxsup.protocol.worker_messages import LoadProgress
from mlxsup.supervisor.core.lifecycle.load_times import NO_LOAD, LoadTimes

from support.core_driver import Driver, entry

PHASES = st.sampled_from(LoadPhase)
SECONDS = st.integers(0, 1000)


@given(st.lists(st.tuples(SECONDS, PHASES), max_size=12), SECONDS, SECONDS)
def test_the_phases_add_up_to_the_load_whatever_comes_in_which_order(
    steps: list[tuple[int, LoadPhase]], rest: int, later: int
) -> None:
    now = 1000
    times, spent = LoadTimes.begun(now), dict.fromkeys(LoadPhase, 0)
    current, order = LoadPhase.SPAWN, [LoadPhase.SPAWN]
    for seconds, phase in steps:
        now += seconds
        spent[current] += seconds
        times, current = times.entered(phase, now), phase
        order += [phase] if phase not in order else []
    spent[current] += rest
    now += rest
    shown = times.seconds(now)
    ended = times.ended(now)
    assert shown == {phase: spent[phase] for phase in order}
    assert list(shown) == order
    assert ended.seconds(now + later) == ended.ended(now + later).seconds(0) == shown


def test_before_any_load_there_is_nothing_and_ending_none_changes_nothing() -> None:
    assert NO_LOAD.seconds(5.0) == {}
    assert NO_LOAD.ended(5.0) is NO_LOAD


def proceed(driver: Driver, phase: LoadPhase, fraction: float, seconds: float) -> None:
    """The load says what it does, and does it for so long."""
    driver.worker(LoadProgress(phase=phase, progress=fraction))
    driver.now += seconds


def test_a_load_shows_its_phases_until_the_next_one_begins() -> None:
    driver = Driver([entry()])
    assert driver.row()["load_phases_s"] is None
    driver.load()
    driver.now += 0.25
    assert driver.row()["load_phases_s"] == {"spawn": 0.25}
    driver.spawned()
    driver.hello()
    driver.now += 2.0
    proceed(driver, LoadPhase.WEIGHTS, 0.1, 1.0)
    proceed(driver, LoadPhase.MATERIALISE, 0.2, 3.0)
    proceed(driver, LoadPhase.MATERIALISE, 0.9, 4.0)
    proceed(driver, LoadPhase.WARMUP, 1.0, 0.5)
    whole = {"spawn": 0.25, "import": 2.0, "weights": 1.0, "materialise": 7.0, "warmup": 0.5}
    assert driver.row()["load_phases_s"] == whole
    driver.ready()
    driver.now += 60.0
    assert driver.row()["load_phases_s"] == whole, "it has ended"
    driver.exit(signal="SIGKILL")
    assert driver.state() is State.LOADING
    driver.now += 0.5
    assert driver.row()["load_phases_s"] == {"spawn": 0.5}, "of the latest load"


@pytest.mark.parametrize("ends", ["dies", "is unloaded"])
def test_a_load_that_fails_or_is_called_off_counts_until_then(ends: str) -> None:
    driver = Driver([entry()])
    driver.load()
    driver.spawned()
    driver.hello()
    proceed(driver, LoadPhase.WEIGHTS, 0.1, 1.5)
    if ends == "dies":
        driver.exit(code=66)
    else:
        driver.unload()
        driver.now += 1.0
        driver.exit(code=0)
    driver.now += 60.0
    assert driver.row()["load_phases_s"] == {"spawn": 0.0, "import": 0.0, "weights": 1.5}
