"""Requests whose rows left for want of memory: when they return, and when they end."""

from __future__ import annotations

import pytest

from mlxsup.protocol.client_messages import Notice
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.states import Priority
from mlxsup.protocol.worker_messages import Dispatch
from mlxsup.supervisor.core.events import Appraised, Reloaded
from mlxsup.supervisor.core.settings import ClientSettings

from support.core_rows import FIXED, LEAST, ONE_ROW, RowsDriver, bytes_for, need_of, served

MODEL = FIXED + ONE_ROW


def serving(rows_bytes: int, **need: int) -> RowsDriver:
    """A model whose rows may take so much, and no more."""
    driver = RowsDriver("a", FIXED + rows_bytes, {"a": need_of(**need)})
    driver.bring_up("a")
    assert driver.budget("a") == rows_bytes
    return driver


TWO_ROWS = bytes_for(2, 1000)


def test_a_dispatch_says_in_which_class_and_whether_the_row_may_leave() -> None:
    driver = serving(TWO_ROWS)
    driver.ask("r1", "a", priority=Priority.BATCH)
    driver.ask("r2", "a", resume=False)
    [second] = driver.told(Dispatch)
    assert (second.priority, second.may_leave) == (Priority.NORMAL, False)


def test_it_waits_until_a_row_has_ended() -> None:
    driver = serving(TWO_ROWS)
    first = driver.begin("a", "r1", 900)
    second = driver.begin("a", "r2", 900)
    driver.gain("a", first, 5)
    driver.short("a", second)
    assert driver.dispatched() == []
    assert driver.row("a")["queued"] == 1
    driver.gain("a", first, 5)
    assert driver.dispatched() == []
    driver.end("a", first)
    assert driver.dispatched() == [second]


@pytest.mark.parametrize("is_removed", [False, True])
def test_it_waits_on_if_it_is_no_longer_known_what_its_model_needs(is_removed: bool) -> None:
    """Its folder cannot be read at a reload, or that removes it: its rows are what they were."""
    driver = serving(TWO_ROWS)
    first = driver.begin("a", "r1", 900)
    second = driver.begin("a", "r2", 900)
    driver.gain("a", second, 1)
    driver.short("a", second)
    models = () if is_removed else (served("a"),)
    driver.do(Appraised(now=driver.now, needs={}))
    assert driver.dispatched() == []
    driver.do(Reloaded(now=driver.now, settings=driver.core.fleet.settings, models=models))
    assert driver.dispatched() == []
    driver.gain("a", first, 1)
    assert driver.dispatched() == []
    driver.end("a", first)
    assert driver.dispatched() == [second]


def test_it_returns_at_once_if_its_row_fits_with_some_to_spare() -> None:
    """Ten per cent of the budget, on top of a step of growth."""
    for prompt, returns in ((500, True), (660, True), (670, False)):
        driver = serving(bytes_for(2, 1050))
        driver.begin("a", "r1", 100)
        second = driver.begin("a", "r2", prompt)
        driver.short("a", second)
        needed, budget = bytes_for(2, prompt + 256), bytes_for(2, 1050)
        assert (needed <= budget - budget // 10) is returns
        assert (driver.dispatched() == [second]) is returns, prompt


def test_nothing_of_its_class_starts_before_it() -> None:
    """Others would take the memory that it waits for."""
    driver = serving(TWO_ROWS)
    first = driver.begin("a", "r1", 900)
    second = driver.begin("a", "r2", 900)
    driver.short("a", second)
    assert driver.serve("r3", model="a") == []
    assert driver.serve("r4", model="a", priority=Priority.BATCH) == []
    assert len(driver.serve("r5", model="a", priority=Priority.INTERACTIVE)) == 1
    driver.end("a", first)
    assert driver.dispatched()[0] == second


def test_its_client_is_notified_that_it_waits_for_memory() -> None:
    driver = serving(TWO_ROWS)
    driver.begin("a", "r1", 900)
    second = driver.begin("a", "r2", 900, notices=True)
    driver.gain("a", second, 3)
    driver.short("a", second)
    details = {(one.kind, one.detail["reason"]) for one in driver.sent(Notice)}
    assert details == {("paused", "memory"), ("queued", "memory")}


def test_one_that_does_not_fit_alone_ends_with_what_it_needs() -> None:
    driver = serving(ONE_ROW)
    key = driver.begin("a", "r1", LEAST)
    driver.gain("a", key, 7)
    driver.short("a", key)
    error = driver.failure_of("r1").error
    assert error["code"] == ErrorCode.INSUFFICIENT_MEMORY
    assert error["detail"] == {
        "model": "a",
        "needed_bytes": bytes_for(1, LEAST + 7),
        "available_bytes": ONE_ROW,
        "tokens_sent": 7,
    }
    assert "raise" in error["message"]
    assert driver.row("a")["queued"] == 0


@pytest.mark.parametrize("tokens", [1, 2])
def test_one_that_must_run_through_ends_if_it_has_to_leave(tokens: int) -> None:
    driver = serving(TWO_ROWS)
    driver.begin("a", "r1", 900)
    key = driver.begin("a", "r2", 900, resume=False)
    driver.gain("a", key, tokens)
    driver.short("a", key)
    assert driver.errors()["r2"] == ErrorCode.INSUFFICIENT_MEMORY


def test_one_that_must_run_through_waits_as_long_as_nothing_of_it_was_sent() -> None:
    driver = serving(TWO_ROWS)
    first = driver.begin("a", "r1", 900)
    key = driver.begin("a", "r2", 900, resume=False)
    driver.short("a", key)
    assert driver.errors() == {}
    driver.end("a", first)
    assert driver.dispatched() == [key]


def test_a_long_request_gets_the_head_room_of_another_model() -> None:
    """It fits alone, if the other one keeps to one row."""
    budget = 2 * FIXED + 2 * bytes_for(1, 2500)
    driver = RowsDriver("ab", budget)
    driver.bring_up("a")
    driver.load("b")
    driver.confirm("a")
    driver.measure()
    driver.come_up("b")
    for name in "abab":
        driver.confirm(name)
        driver.measure()
    key = driver.begin("b", "r1", 3000)
    before = driver.budget("b")
    assert before < bytes_for(1, 3000) < budget - 2 * FIXED - ONE_ROW
    driver.short("b", key)
    for _ in range(4):
        assert driver.errors() == {}
        driver.now += 1.0
        driver.measure()
        for name in "ab":
            driver.confirm(name)
            if driver.dispatched():
                assert driver.budget("b") >= bytes_for(1, 3000)
                assert driver.reserved() <= budget
                return
    raise AssertionError("it waits for ever")


def test_a_crash_lets_it_start_like_any_other() -> None:
    driver = serving(bytes_for(2, 2000))
    driver.begin("a", "r1", 1900)
    second = driver.begin("a", "r2", 1900)
    driver.short("a", second)
    driver.exit("a")
    driver.come_up("a")
    assert len(driver.told(Dispatch)) == 2


def test_it_returns_at_once_if_nothing_runs_and_it_fits_alone() -> None:
    """Its worker had another budget when it left."""
    driver = serving(ONE_ROW)
    key = driver.begin("a", "r1", LEAST)
    driver.short("a", key)
    assert driver.dispatched() == [key]


def test_one_that_a_person_has_paused_may_return_to_the_next_process() -> None:
    """How many rows had ended when its own left says nothing of another process."""
    driver = serving(TWO_ROWS)
    for id in ("a1", "a2"):
        driver.end("a", driver.begin("a", id, 100))
    driver.begin("a", "r1", 900)
    second = driver.begin("a", "r2", 900)
    driver.short("a", second)
    driver.pause("r2")
    driver.exit("a")
    driver.come_up("a")
    driver.resume("r2")
    assert driver.dispatched() == [second]


def test_nobody_waits_behind_one_whose_client_has_come_to_run_elsewhere() -> None:
    clients = {"ann": ClientSettings(max_running=1), "bob": ClientSettings()}
    driver = RowsDriver("ab", 2 * (FIXED + TWO_ROWS), clients=clients)
    for model in "ab":
        driver.load(model)
    for model in "ab":
        driver.come_up(model)
    driver.begin("a", "r1", 900, client="bob")
    second = driver.begin("a", "r2", 900, client="ann")
    driver.short("a", second)
    assert driver.serve("r3", model="a", client="bob") == []
    driver.serve("r4", model="b", client="ann")
    assert driver.row("b")["running"] == ["r4"]
    assert driver.row("a")["running"] == ["r1", "r3"]
