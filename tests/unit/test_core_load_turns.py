"""`parallel_loads`: how many models load at the same time, and what a crash changes about that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxsup.protocol.states import State
from mlxsup.supervisor.core.events import Reloaded
from mlxsup.supervisor.core.settings import CoreSettings

from support.core_driver import Driver, entry
from support.core_memory import limited, sized

NAMES = ("a", "b", "c", "d")


def started(parallel_loads: int, *names: str) -> Driver:
    settings = CoreSettings(parallel_loads=parallel_loads)
    return Driver([entry(name) for name in names or NAMES], settings)


def loading(driver: Driver) -> str:
    return "".join(name for name in NAMES if driver.state(name) is State.LOADING)


def load_all(driver: Driver) -> None:
    for name in NAMES:
        driver.load(name)


@pytest.mark.parametrize(("most", "first"), [(1, "a"), (2, "ab"), (3, "abc"), (9, "abcd")])
def test_as_many_load_at_once_as_the_configuration_allows(most: int, first: str) -> None:
    driver = started(most)
    load_all(driver)
    assert loading(driver) == first
    for name in NAMES[len(first) :]:
        assert driver.row(name)["progress"]["phase"] == "waiting for turn"


def test_each_load_that_ends_lets_the_next_one_begin() -> None:
    driver = started(2)
    load_all(driver)
    driver.come_up("b")
    assert loading(driver) == "ac"
    driver.spawned("a")
    driver.exit("a", code=65)  # a folder that no attempt can load
    assert driver.state("a") is State.FAILED
    assert loading(driver) == "cd"


@pytest.mark.parametrize("most", [1, 2])
def test_after_a_crash_a_model_waits_for_no_other_load(most: int) -> None:
    driver = started(most)
    driver.load("a")
    driver.come_up("a")
    for name in "bcd":
        driver.load(name)
    assert loading(driver) == "bcd"[:most]
    driver.exit("a")
    assert loading(driver) == "a" + "bcd"[:most]


def test_after_a_crash_models_wait_for_each_other() -> None:
    driver = started(2)
    for name in "abc":
        driver.load(name)
        driver.come_up(name)
    for name in "abc":
        driver.exit(name)
    assert loading(driver) == "ab"
    driver.come_up("a")
    assert loading(driver) == "bc"


def test_a_load_waits_for_those_after_a_crash() -> None:
    driver = started(2)
    for name in "ab":
        driver.load(name)
        driver.come_up(name)
    for name in "ab":
        driver.exit(name)
    driver.load("c")
    assert loading(driver) == "ab"
    driver.come_up("b")
    assert loading(driver) == "ac"


def test_a_reload_changes_how_many_may_load() -> None:
    driver = started(1)
    load_all(driver)
    settings = CoreSettings(parallel_loads=3)
    entries = tuple(entry(name) for name in NAMES)
    driver.do(Reloaded(now=driver.now, settings=settings, models=entries))
    assert loading(driver) == "abc"
    fewer = replace(settings, parallel_loads=1)
    driver.do(Reloaded(now=driver.now, settings=fewer, models=entries))
    assert loading(driver) == "abc", "what loads is not disturbed"
    for name in "ab":
        driver.come_up(name)
        assert "d" not in loading(driver)
    driver.come_up("c")
    assert loading(driver) == "d"


def test_each_load_has_its_memory_before_it_begins() -> None:
    models = [sized(name, 4) for name in "abc"]
    driver = Driver(models, limited(9, parallel_loads=3))
    for name in "abc":
        driver.load(name)
    states = {name: driver.state(name) for name in "abc"}
    assert states == {"a": State.LOADING, "b": State.LOADING, "c": State.PENDING}
    assert driver.core.status(driver.now)["memory"]["reserved_bytes"] == 8
    assert driver.row("c")["memory_wait"]["reason"].endswith("a and b are busy")
