"""`reload --dry-run`: says of each model what the reload then does, and changes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxsup.protocol.client_messages import Reload, Reply
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.states import State
from mlxsup.supervisor.core.actions import ReadConfiguration, SendToClient
from mlxsup.supervisor.core.events import Caller, Reloaded
from mlxsup.supervisor.core.settings import CoreSettings, ModelSettings

from support.core_driver import LAUNCH, Driver, entry
from support.core_looks import ALICE
from support.core_states import in_state

STATES = [state for state in State if state is not State.PENDING]
CHANGES: dict[str, tuple[ModelSettings, ...]] = {
    "another launch": (entry(launch=replace(LAUNCH, path="/other")),),
    "another key": (entry(idle_unload_s=3.0),),
    "removed": (),
}
FOLLOWS = {"DRAINING": {"DRAINING", "STOPPING"}, "PENDING": {"PENDING", "LOADING"}}
"""Where a state leads in the same turn, if nothing runs and there is room."""


def ask(driver: Driver) -> None:
    driver.say(Reload(id=RequestId("x"), dry_run=True))
    (read,) = [one for one in driver.actions if isinstance(one, ReadConfiguration)]
    assert read.is_dry
    assert read.caller == Caller(connection=ALICE, id=RequestId("x"))


def foresee(driver: Driver, *models: ModelSettings, **settings: Any) -> dict[str, Any]:
    """The answer to a dry run, of which nothing else may come."""
    ask(driver)
    before = driver.core.status(driver.now)
    driver.do(
        Reloaded(
            now=driver.now,
            settings=CoreSettings(**{"drain_timeout_s": 5.0, **settings}),
            models=models,
            later=("log_dir",),
            caller=Caller(connection=ALICE, id=RequestId("x")),
            is_dry=True,
        )
    )
    (action,) = driver.actions
    assert isinstance(action, SendToClient)
    assert isinstance(action.message, Reply)
    assert driver.core.status(driver.now) == before
    value: dict[str, Any] = action.message.value
    assert value["later"] == ["log_dir"]
    return value


def states(driver: Driver) -> dict[str, str]:
    return {row["name"]: row["state"] for row in driver.core.status(driver.now)["models"]}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("state", STATES)
def test_what_is_foreseen_is_what_the_reload_then_does(state: State, change: str) -> None:
    driver, models = in_state(state), (*CHANGES[change], entry("other"))
    value = foresee(driver, *models)
    assert driver.state() is state
    (row,) = [one for one in value["foreseen"] if one["model"] == "m"]
    assert row["state"] == state.value
    assert row["change"] == ("removed" if change == "removed" else "changed")
    driver.do(Reloaded(now=driver.now, settings=CoreSettings(drain_timeout_s=5.0), models=models))
    after, becomes = states(driver).get("m"), row["becomes"]
    assert after in FOLLOWS.get(becomes, {becomes})


def test_what_does_not_change_is_not_named_and_what_is_new_is() -> None:
    driver = in_state(State.READY)
    value = foresee(driver, entry(), entry("a", preload=True), entry("b"))
    assert value["foreseen"] == [
        {"model": "a", "change": "added", "state": None, "becomes": "PENDING", "running": 0},
        {"model": "b", "change": "added", "state": None, "becomes": "STOPPED", "running": 0},
    ]
    assert (value["added"], value["changed"], value["removed"]) == (["a", "b"], [], [])


def test_how_many_answers_a_model_must_finish_is_said() -> None:
    driver = in_state(State.READY)
    driver.ask("r2")
    value = foresee(driver, *CHANGES["another launch"], max_queue=7)
    (row,) = value["foreseen"]
    assert (row["running"], row["becomes"]) == (len(driver.row()["running"]), "DRAINING")
    assert "max_queue" in value["settings"]
    assert value["over_budget_bytes"] == 0
