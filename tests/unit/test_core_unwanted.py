"""Models that nobody wants any longer: they do not wait for memory, and come up for nobody."""

from __future__ import annotations

from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.states import State
from mlxsup.supervisor.core.events import Reloaded

from support.core_memory import GIB, MemoryDriver, limited, sized, states
from support.core_swaps import SwapDriver, finish, rivals

# ---------------------------------------------------------------- after a refusal


def refusing() -> MemoryDriver:
    """`p` is pinned and loaded; `a`, which is preloaded, is down and does not fit next to it."""
    models = [sized("p", 6 * GIB, pinned=True), sized("a", 4 * GIB, preload=True)]
    driver = MemoryDriver(models, limited(8 * GIB))
    driver.unload("a")
    driver.bring_up("p")
    assert driver.state("a") is State.STOPPED
    return driver


def test_a_refused_request_leaves_a_model_to_preload_as_it_was() -> None:
    driver = refusing()
    driver.ask("r1", "a")
    assert driver.errors() == {"r1": ErrorCode.INSUFFICIENT_MEMORY}
    row = driver.row("a")
    assert (row["state"], row["wanted"], row["why"]) == ("STOPPED", "down", "memory")


def test_a_refused_command_leaves_it_as_it_was_and_it_does_not_come_up_by_itself() -> None:
    for command in ("load", "restart"):
        driver = refusing()
        id = driver.load("a") if command == "load" else driver.restart("a")
        assert driver.failure_of(id).error["code"] == ErrorCode.INSUFFICIENT_MEMORY
        assert driver.state("a") is State.STOPPED
        models = tuple(driver.model(name).life.settings for name in "pa")
        driver.do(Reloaded(now=driver.now, settings=limited(20 * GIB), models=models))
        assert driver.spawns() == []


def test_a_preload_that_was_refused_still_waits_when_a_request_is_refused() -> None:
    models = [sized("p", 6 * GIB, pinned=True), sized("a", 4 * GIB, preload=True)]
    driver = MemoryDriver(models, limited(8 * GIB))
    driver.ask("r1", "a")
    assert driver.errors() == {"r1": ErrorCode.INSUFFICIENT_MEMORY}
    assert (driver.state("a"), driver.row("a")["why"]) == (State.PENDING, "preload")


# ---------------------------------------------------------------- after a swap


def swapped_out() -> SwapDriver:
    """`a` has made room for `b`; its one request waits for its next turn."""
    driver = rivals()
    driver.stream("a", "r1")
    driver.ask("r2", "b")
    driver.swap("a")
    assert states(driver, "ab") == [State.PENDING, State.LOADING]
    return driver


def test_a_model_that_was_swapped_out_stops_once_nobody_waits_for_it() -> None:
    driver = swapped_out()
    driver.cancel("r1")
    assert (driver.state("a"), driver.why("a")) == (State.STOPPED, "evict")
    [key] = driver.turn("b")
    finish(driver, "b", key)
    driver.unload("b")
    driver.exit("b", code=0)
    assert driver.state("a") is State.STOPPED
    driver.ask("r3", "a")
    assert driver.state("a") is State.LOADING


def test_it_stops_as_well_if_its_last_request_goes_before_its_process() -> None:
    driver = rivals()
    driver.stream("a", "r1")
    driver.ask("r2", "b")
    driver.passes_until("a")
    driver.rows_leave("a")
    driver.cancel("r1")
    assert driver.state("a") is State.STOPPING
    driver.exit("a", code=0)
    assert states(driver, "ab") == [State.STOPPED, State.LOADING]


def test_it_waits_on_for_a_command_and_for_what_somebody_has_paused() -> None:
    driver = swapped_out()
    driver.load("a")
    driver.cancel("r1")
    assert driver.state("a") is State.PENDING
    driver = swapped_out()
    driver.pause("r1")
    assert driver.state("a") is State.PENDING
    driver.cancel("r1")
    assert driver.state("a") is State.STOPPED
