"""Other names of a model: requests and commands take them, and the status shows them."""

from __future__ import annotations

from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.states import State
from mlxsup.supervisor.core.events import Reloaded
from mlxsup.supervisor.core.settings import CoreSettings, ModelSettings

from support.core_driver import Driver, entry
from support.core_states import in_state


def reload(driver: Driver, *models: ModelSettings) -> None:
    driver.do(Reloaded(now=driver.now, settings=CoreSettings(drain_timeout_s=5.0), models=models))


def test_requests_and_commands_find_a_model_by_an_alias() -> None:
    driver = Driver([entry("m", preload=False, aliases=("a", "b")), entry("n", preload=False)])
    driver.load("b")
    assert (driver.state("m"), driver.state("n")) == (State.LOADING, State.STOPPED)
    driver.ask("r1", "a")
    assert [driver.row(name)["queued"] for name in "mn"] == [1, 0]
    assert [driver.row(name)["aliases"] for name in "mn"] == [["a", "b"], []]
    driver.unload("a")
    assert driver.state("m") is not State.LOADING


def test_a_name_that_no_model_has_is_refused_with_those_of_the_configuration() -> None:
    driver = Driver([entry("m", aliases=("a",))])
    driver.ask("r1", "c")
    error = driver.failure_of("r1").error
    assert error["code"] == ErrorCode.UNKNOWN_MODEL.value
    assert error["detail"]["known"] == ["m"]


def test_a_reload_changes_aliases_at_once_and_restarts_nothing() -> None:
    driver = in_state(State.READY)
    generation = driver.row()["generation"]
    reload(driver, entry(aliases=("a",)))
    driver.ask("r9", "a")
    assert (driver.state(), driver.row()["generation"]) == (State.READY, generation)
    assert driver.row()["aliases"] == ["a"]
    reload(driver, entry())
    driver.ask("r10", "a")
    assert driver.errors() == {"r10": ErrorCode.UNKNOWN_MODEL.value}


def test_a_model_that_is_going_is_not_found_by_its_alias() -> None:
    driver = in_state(State.READY)
    reload(driver, entry(aliases=("a",)))
    driver.ask("r2", "a")
    reload(driver, entry("n", preload=False))
    driver.ask("r3", "a")
    assert driver.errors() == {"r3": ErrorCode.UNKNOWN_MODEL.value}


def test_an_alias_of_a_model_that_is_going_may_be_the_name_of_a_new_one() -> None:
    driver = in_state(State.READY)
    reload(driver, entry(aliases=("n",)))
    driver.ask("r2")
    reload(driver, entry("n", preload=False))
    driver.ask("r3", "n")
    assert driver.row("n")["queued"] == 1
