"""Commands, crashes and reloads while a model makes room for another one, and after it has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxsup.protocol.client_messages import Done, Failed, Reply
from mlxsup.protocol.states import FinishReason, Priority, State
from mlxsup.supervisor.core.actions import ForgetModel
from mlxsup.supervisor.core.events import Reloaded
from mlxsup.supervisor.core.settings import ModelSettings

from support.core_looks import ALICE
from support.core_memory import GIB, limited, sized, states
from support.core_swaps import SwapDriver, finish, rivals


def swapping(**changes: Any) -> tuple[SwapDriver, int]:
    """The rows of `a` have been asked to leave for `b`; also returns the key of its stream."""
    driver = rivals(**changes)
    key = driver.stream("a", "r1")
    driver.ask("r2", "b")
    driver.passes_until("a")
    return driver, key


def swapped_out() -> SwapDriver:
    """`a` has made room for `b`, which serves."""
    driver, _ = swapping()
    driver.gone("a")
    driver.turn("b")
    return driver


def ended(driver: SwapDriver, id: str = "r1") -> tuple[str, int | None]:
    """The code of a request's error, and how many tokens it had been sent."""
    [error] = driver.terminals[ALICE, id]
    assert isinstance(error, Failed)
    return error.error["code"], error.error.get("detail", {}).get("tokens_sent")


def reload(driver: SwapDriver, *models: ModelSettings) -> None:
    settings = limited(4 * GIB, max_queue=64, max_queue_per_client=64)
    driver.do(Reloaded(now=driver.now, settings=settings, models=models))


A, B = sized("a", 4 * GIB), sized("b", 4 * GIB)
OTHER_A = replace(A, launch=replace(A.launch, path="/other"))

# ---------------------------------------------------------------- people load


def test_a_load_command_swaps_as_an_interactive_request_does() -> None:
    driver = rivals()
    driver.stream("a", "r1", priority=Priority.INTERACTIVE)
    driver.load("b")
    assert driver.passes_until("a") == 20
    driver.gone("a")
    driver.come_up("b")
    assert driver.sent(Reply)[0].value["model"]["state"] == "READY"


def test_a_preload_never_swaps() -> None:
    models = [A, replace(B, preload=True)]
    driver = SwapDriver([A], limited(4 * GIB))
    driver.bring_up("a")
    driver.stream("a", "r1")
    driver.do(Reloaded(now=driver.now, settings=limited(4 * GIB), models=tuple(models)))
    assert driver.stays("a")
    assert driver.state("b") is State.PENDING
    driver.ask("r2", "b")
    assert driver.passes_until("a") == 20, "from the moment at which somebody waits"


def test_a_load_of_a_model_that_makes_room_waits_for_its_next_turn() -> None:
    driver, key = swapping()
    driver.load("a")
    driver.gone("a")
    driver.turn("b")
    driver.swap("b")
    driver.come_up("a")
    assert driver.sent(Reply)
    driver.token(key, model="a")
    finish(driver, "a", key)


def test_a_load_of_a_model_that_makes_room_is_done_if_the_swap_is_called_off() -> None:
    driver, _ = swapping()
    driver.load("a")
    driver.cancel("r2")
    assert [one.value["model"]["state"] for one in driver.sent(Reply)] == ["READY"]


# ---------------------------------------------------------------- people unload, remove, stop


def test_an_unload_while_rows_leave_brings_begun_answers_to_their_end() -> None:
    driver, key = swapping()
    driver.ask("r3", "a")
    driver.unload("a")
    assert ended(driver, "r3") == ("unloaded", None)
    driver.row_left(key, "a")
    assert [one.key for one in driver.resumed()] == [key]
    finish(driver, "a", key)
    [done] = driver.terminals[ALICE, "r1"]
    assert isinstance(done, Done)
    driver.exit("a", code=0)
    assert states(driver, "ab") == [State.STOPPED, State.LOADING]


def test_an_unload_of_a_swapped_out_model_ends_its_queue() -> None:
    driver = swapped_out()
    driver.unload("a")
    assert ended(driver) == ("unloaded", 1)
    assert driver.state("a") is State.STOPPED


def test_an_unload_before_the_exit_ends_its_queue_too() -> None:
    driver, _ = swapping()
    driver.rows_leave("a")
    driver.unload("a")
    assert ended(driver) == ("unloaded", 1)
    driver.exit("a", code=0)
    assert states(driver, "ab") == [State.STOPPED, State.LOADING]


def test_a_removal_of_a_swapped_out_model_ends_its_queue() -> None:
    driver = swapped_out()
    reload(driver, B)
    assert ended(driver) == ("unknown_model", 1)
    assert driver.of(ForgetModel)


def test_a_removal_while_rows_leave_brings_begun_answers_to_their_end() -> None:
    driver, key = swapping()
    reload(driver, B)
    driver.row_left(key, "a")
    finish(driver, "a", key)
    driver.exit("a", code=0)
    assert isinstance(driver.terminals[ALICE, "r1"][0], Done)
    assert driver.of(ForgetModel)


def test_a_shutdown_ends_the_queue_of_a_swapped_out_model() -> None:
    driver = swapped_out()
    driver.stop()
    assert ended(driver) == ("shutting_down", 1)


def test_a_shutdown_while_rows_leave_brings_begun_answers_to_their_end() -> None:
    driver, key = swapping()
    driver.stop()
    driver.row_left(key, "a")
    assert [one.key for one in driver.resumed()] == [key]
    driver.pass_time(5.1)
    assert ended(driver)[0] == "shutting_down"


# ---------------------------------------------------------------- restarts and reloads


@pytest.mark.parametrize("is_immediate", [True, False])
def test_a_restart_while_rows_leave_brings_it_back_at_once(is_immediate: bool) -> None:
    driver, key = swapping()
    driver.restart("a", now=is_immediate)
    if not is_immediate:
        driver.row_left(key, "a")
    driver.exit("a", code=0)
    assert driver.spawns() == ["a"]
    driver.come_up("a")
    assert [one.key for one in driver.resumed()] == [key]
    driver.token(key, model="a")
    assert driver.passes_until("a") < 40, "the other one still waits"


def test_a_restart_of_a_model_that_is_about_to_exit_waits_for_its_next_turn() -> None:
    driver, _ = swapping()
    driver.rows_leave("a")
    driver.restart("a")
    driver.exit("a", code=0)
    assert driver.spawns() == ["b"]


def test_a_changed_entry_while_rows_leave_restarts_it() -> None:
    driver, key = swapping()
    reload(driver, OTHER_A, B)
    driver.row_left(key, "a")
    driver.exit("a", code=0)
    assert driver.spawns() == ["a"]


def test_a_changed_entry_of_a_swapped_out_model_is_what_it_loads_next() -> None:
    driver = swapped_out()
    reload(driver, OTHER_A, B)
    assert driver.state("a") is State.PENDING
    driver.swap("b")
    assert driver.spawns() == ["a"]


def test_a_model_that_is_pinned_meanwhile_stays() -> None:
    driver, key = swapping()
    reload(driver, replace(A, pinned=True), replace(B, pinned=False))
    assert driver.state("a") is State.READY
    driver.row_left(key, "a")
    assert [one.key for one in driver.resumed()] == [key]
    assert ended(driver, "r2")[0] == "insufficient_memory"


# ---------------------------------------------------------------- crashes


def test_a_crash_while_rows_leave_is_a_crash_and_the_swap_comes_later() -> None:
    driver, key = swapping()
    driver.exit("a", code=70)
    assert driver.row("a")["last_exit"]["reason"] == "crash"
    assert driver.spawns() == ["a"]
    driver.come_up("a")
    assert [one.key for one in driver.resumed()] == [key]
    driver.token(key, model="a")
    driver.swap("a")
    assert driver.spawns() == ["b"]


def test_a_model_that_crashes_in_its_first_load_of_a_turn_keeps_its_turn() -> None:
    driver, _ = swapping()
    driver.gone("a")
    driver.spawned("b")
    driver.exit("b", code=70)
    assert driver.spawns() == ["b"]


def test_paused_requests_survive_a_swap_and_wait_for_somebody_to_resume_them() -> None:
    driver = rivals()
    keys = [driver.stream("a", "r1"), driver.stream("a", "r2")]
    driver.pause("r1")
    driver.row_left(keys[0], "a")
    driver.ask("r3", "b")
    driver.swap("a")
    driver.turn("b")
    assert driver.row("a")["paused"] == ["r1"]
    driver.swap("b")
    driver.come_up("a")
    assert [one.key for one in driver.resumed()] == [keys[1]]
    driver.resume("r1")
    assert [one.key for one in driver.resumed()] == [keys[0]]
    driver.token(keys[0], model="a", finish=FinishReason.STOP)


def test_a_model_of_paused_requests_alone_makes_room() -> None:
    driver = rivals()
    key = driver.stream("a", "r1")
    driver.pause("r1")
    driver.row_left(key, "a")
    driver.ask("r2", "b")
    driver.passes_until("a")
    assert driver.state("a") is State.STOPPING
    driver.exit("a", code=0)
    driver.turn("b")
    assert driver.stays("b"), "nobody waits for the other one"
    driver.resume("r1")
    driver.swap("b")
    assert driver.spawns() == ["a"]
