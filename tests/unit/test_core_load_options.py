"""A load with another context length: a new process, planned for it, until the file is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxsup.protocol.client_messages import Failed, Load
from mlxsup.protocol.context_length import MAX_CONTEXT_LENGTH
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.protocol.states import State
from mlxsup.supervisor.core.actions import AppraiseLaunch, Finish, Spawn
from mlxsup.supervisor.core.events import Reloaded, ShutdownAsked
from mlxsup.supervisor.core.memory.need import Figure, Need, Source
from mlxsup.supervisor.core.settings import CoreSettings

from support.core_driver import Driver, entry
from support.core_looks import ALICE

M = ModelName("m")


def need_of(tokens: int) -> Need:
    """A model that needs a byte for each token of its context."""
    nothing = Figure(size_bytes=0, source=Source.MEASURED)
    own = Figure(size_bytes=tokens, source=Source.MEASURED)
    return Need(
        weights=nothing, own=own, layers=(), layers_source=Source.MEASURED,
        context_tokens=tokens, least_tokens=tokens, max_rows=2,
    )  # fmt: skip


def load(driver: Driver, tokens: int | None, *, id: str = "load") -> AppraiseLaunch | None:
    """Asks for a load; returns what the shell is asked first."""
    driver.say(Load(id=RequestId(id), model=M, context_length=tokens))
    asked = driver.of(AppraiseLaunch)
    return asked[0] if asked else None


def answer(driver: Driver, asked: AppraiseLaunch | None) -> None:
    assert asked is not None
    need = need_of(asked.launch.context_length)
    driver.do(asked.answered(need, now=driver.now))


def test_a_stopped_model_is_planned_and_started_with_the_context_that_was_asked_for() -> None:
    driver = Driver()
    asked = load(driver, 4096)
    assert asked is not None
    assert (asked.model, asked.launch.context_length) == ("m", 4096)
    assert driver.state() is State.STOPPED, "nothing begins before its need is known"
    answer(driver, asked)
    [spawn] = driver.of(Spawn)
    assert spawn.launch.context_length == 4096
    assert driver.row()["needed_bytes"] == 4096
    driver.come_up()
    assert driver.replies() == ["load"]


def test_a_model_that_runs_finishes_what_it_runs_and_comes_back_with_it() -> None:
    driver = Driver()
    driver.load()
    driver.come_up()
    [key] = driver.serve("runs")
    driver.accept(key)
    answer(driver, load(driver, 4096))
    assert driver.state() is State.DRAINING
    assert driver.replies() == []
    driver.cancel("runs")
    driver.row_left(key)
    driver.exit(code=0)
    driver.pass_time(0.0)
    assert driver.model().life.launch.context_length == 4096
    driver.come_up()
    assert driver.replies() == ["load"]


def test_the_context_that_it_has_takes_no_new_process() -> None:
    driver = Driver()
    answer(driver, load(driver, 4096))
    driver.come_up()
    for same in (4096, None):
        assert load(driver, same, id=f"again{same}") is None
        assert driver.replies() == [f"again{same}"]
    assert driver.generation() == 1


def test_reading_the_configuration_again_brings_its_context_back() -> None:
    driver = Driver()
    answer(driver, load(driver, 4096))
    driver.come_up()
    settings = driver.core.fleet.settings
    driver.do(Reloaded(now=driver.now, settings=settings, models=(entry(),)))
    assert driver.state() in (State.DRAINING, State.STOPPING)
    driver.exit(code=0)
    driver.pass_time(0.0)
    assert driver.model().life.launch.context_length == 0


def test_a_model_that_is_removed_meanwhile_is_unknown() -> None:
    driver = Driver()
    asked = load(driver, 4096)
    settings = driver.core.fleet.settings
    other = replace(entry(), name=ModelName("other"))
    driver.do(Reloaded(now=driver.now, settings=settings, models=(other,)))
    answer(driver, asked)
    assert driver.errors(ALICE) == {"load": "unknown_model"}


def test_a_model_whose_folder_is_another_one_meanwhile_is_not_loaded_as_it_was() -> None:
    driver = Driver()
    asked = load(driver, 4096)
    other = entry(launch=replace(entry().launch, path="/elsewhere"))
    driver.do(Reloaded(now=driver.now, settings=CoreSettings(), models=(other,)))
    answer(driver, asked)
    [failed] = driver.sent(Failed)
    assert failed.error["code"] == "superseded"
    assert driver.of(Spawn) == []


def test_a_load_that_waits_for_its_folder_does_not_hold_up_the_end() -> None:
    driver = Driver()
    asked = load(driver, 4096)
    driver.do(ShutdownAsked(now=driver.now, is_immediate=False))
    assert [failed.error["code"] for failed in driver.sent(Failed)] == ["shutting_down"]
    assert driver.of(Finish) == [Finish()]
    answer(driver, asked)
    assert (driver.sent(Failed), driver.of(Spawn)) == ([], []), "it was answered already"


def test_what_is_no_context_length_is_refused() -> None:
    driver = Driver()
    assert load(driver, -1) is None
    [failed] = driver.sent(Failed)
    assert failed.error["code"] == "invalid_request"
    assert failed.error["message"] == (
        f"context_length takes an integer from 0 to {MAX_CONTEXT_LENGTH}, not -1"
    )
    assert failed.error["detail"]["parameter"] == "context_length"
    assert driver.state() is State.STOPPED


@pytest.mark.parametrize("name", ["context_length", "keep_alive"])
def test_a_dry_run_of_another_load_than_the_configured_one_is_refused(name: str) -> None:
    driver = Driver()
    changes: dict[str, Any] = {name: 5}
    driver.say(Load(id=RequestId("dry"), model=M, dry_run=True, **changes))
    [failed] = driver.sent(Failed)
    assert failed.error["code"] == "invalid_request"
    assert failed.error["message"].endswith(f"as configured would lead to: leave {name} out")
    assert failed.error["detail"] == {"parameter": name}
    assert driver.state() is State.STOPPED
