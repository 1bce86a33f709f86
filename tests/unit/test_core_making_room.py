"""Requests that find a free row and no memory for it: who makes room, and who has not begun."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsup.protocol.client_messages import Notice
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import PauseReason, Priority, RowState
from mlxsup.protocol.worker_messages import Dispatch, PauseRow, RowDelta, Step

from support.core_rows import FIXED, RowsDriver, bytes_for, need_of

INTERACTIVE, NORMAL, BATCH = Priority
BUDGET = bytes_for(3, 1000 + 256) * 10 // 9 + 1
"""Three rows of 1,000 tokens find room in nine tenths of it."""


def serving(budget_bytes: int = BUDGET, **changes: Any) -> RowsDriver:
    """A model whose rows may take so much."""
    driver = RowsDriver("a", FIXED + budget_bytes, {"a": need_of()}, **changes)
    driver.bring_up("a")
    assert driver.budget("a") == budget_bytes
    return driver


def run(driver: RowsDriver, id: str, tokens: int = 1000, **more: Any) -> RequestKey:
    """A request that has gained its first token; the next one comes a moment later."""
    key = driver.begin("a", id, tokens - 1, **more)
    driver.gain("a", key, 1)
    driver.pass_time(0.01)
    return key


def knock(driver: RowsDriver, id: str = "now", tokens: int = 1000, **more: Any) -> RequestKey:
    """A request whose worker finds no memory for its row."""
    more = {"priority": INTERACTIVE, "notices": True, **more}
    key = driver.begin("a", id, tokens, **more)
    driver.short("a", key)
    return key


def asked(driver: RowsDriver) -> list[int]:
    """Keys of the rows that the latest event asked to leave."""
    return [int(message.key) for message in driver.told(PauseRow)]


def kinds(driver: RowsDriver, id: str) -> list[tuple[str, str]]:
    """The notices of the latest event to one request."""
    notices = [one for one in driver.sent(Notice) if one.id == id]
    return [(str(one.kind), one.detail["reason"]) for one in notices]


def full(*priorities: Priority, ran_s: float = 2.0, **more: Any) -> RowsDriver:
    """Three rows of 1,000 tokens that have run for so long; there is room for no other."""
    driver = serving()
    for number, priority in enumerate(priorities, start=1):
        run(driver, f"r{number}", priority=priority, **more)
    driver.pass_time(ran_s)
    return driver


# ---------------------------------------------------------------- who makes room


def test_the_batch_row_that_was_served_last_makes_room() -> None:
    driver = full(BATCH, BATCH, NORMAL)
    now = knock(driver)
    assert asked(driver) == [2]
    driver.row_left(2, "a")
    assert driver.dispatched() == [now]
    assert driver.line("a") == ["r2"]


def test_who_made_room_returns_when_there_is_room_for_it_again() -> None:
    driver = full(BATCH, NORMAL, NORMAL)
    now = knock(driver)
    driver.row_left(1, "a", tokens=1)
    driver.accept_long("a", now, 1000)
    driver.gain("a", now, 1)
    assert driver.row("a")["yielded"] == ["r1"]
    assert driver.dispatched() == []
    driver.end("a", now)
    assert driver.dispatched() == [1]
    [dispatch] = driver.told(Dispatch)
    assert dispatch.resume is not None
    assert len(dispatch.resume.delivered) == 2 * 4


def test_nobody_else_is_asked_while_one_that_is_enough_has_yet_to_leave() -> None:
    driver = full(BATCH, BATCH, NORMAL)
    knock(driver)
    driver.pass_time(1.0)
    assert asked(driver) == []
    assert driver.pausing == {2: True}


def test_as_many_rows_leave_as_it_needs() -> None:
    driver = full(BATCH, BATCH, BATCH)
    knock(driver, tokens=1300)
    assert sorted(asked(driver)) == [2, 3]


def test_a_row_without_which_the_others_are_enough_stays() -> None:
    """The short row was served last, and frees too little: the long one is enough by itself."""
    driver = serving(bytes_for(2, 1000 + 256) * 10 // 9 + 1)
    run(driver, "r1", 1000, priority=BATCH)
    run(driver, "r2", 100, priority=BATCH)
    driver.pass_time(2.0)
    long = knock(driver, tokens=1000)
    assert asked(driver) == [2]  # every row is padded to the longest
    driver.row_left(2, "a")
    driver.accept_long("a", long, 1000)
    driver = serving(bytes_for(2, 1000 + 256) * 10 // 9 + 1)
    run(driver, "r1", 1300, priority=BATCH)
    run(driver, "r2", 100, priority=BATCH)
    driver.pass_time(2.0)
    knock(driver, tokens=1000)
    assert asked(driver) == [1]


def test_nobody_leaves_for_one_that_finds_no_room_by_it() -> None:
    driver = full(BATCH, NORMAL, NORMAL)
    knock(driver, tokens=2500)
    assert asked(driver) == []
    driver.pass_time(50.0)
    assert asked(driver) == []


def test_one_that_fits_alone_gets_all_batch_rows() -> None:
    driver = full(BATCH, BATCH, BATCH)
    knock(driver, tokens=3000)
    assert sorted(asked(driver)) == [1, 2, 3]


@pytest.mark.parametrize("priority", [NORMAL, BATCH])
def test_only_the_highest_class_is_made_room_for(priority: Priority) -> None:
    driver = full(BATCH, BATCH, BATCH)
    knock(driver, priority=priority)
    assert asked(driver) == []
    driver.pass_time(200.0)
    assert asked(driver) == []


@pytest.mark.parametrize("priority", [NORMAL, INTERACTIVE])
def test_only_rows_of_the_lowest_class_leave(priority: Priority) -> None:
    driver = full(priority, priority, priority)
    knock(driver)
    assert asked(driver) == []


def test_a_row_that_must_run_through_stays() -> None:
    driver = full(BATCH, BATCH, BATCH, resume=False)
    knock(driver)
    assert asked(driver) == []


def test_a_row_runs_for_min_run_s_before_it_leaves() -> None:
    driver = full(BATCH, NORMAL, NORMAL, ran_s=0.5)
    knock(driver)
    assert asked(driver) == []
    driver.pass_time(1.4)
    assert asked(driver) == []
    driver.pass_time(0.1)
    assert asked(driver) == [1]


def test_a_row_runs_as_long_as_it_would_take_to_read_it_again() -> None:
    """What is kept of it may have to go for the row that it makes room for."""
    driver = serving()
    key = driver.begin("a", "r1", 999, priority=BATCH)
    slow = RowDelta(key=key, text="x", tokens=b"\x09\0\0\0", prefill_s=10.0)
    driver.worker(Step(step=1, rows=[slow]), "a")
    for number in (2, 3):
        run(driver, f"r{number}", priority=NORMAL)
    driver.pass_time(9.0)
    knock(driver)
    assert asked(driver) == []
    driver.pass_time(2.0)
    assert asked(driver) == [1]


def test_it_gets_the_freed_row_before_one_that_has_come_before_it_by_waiting() -> None:
    driver = full(BATCH, BATCH, NORMAL)
    aged = knock(driver, "old", priority=BATCH)
    driver.pass_time(130.0)
    driver.ask("now", "a", body=b"now", priority=INTERACTIVE)
    assert asked(driver) == [2]
    driver.row_left(2, "a")
    [now] = driver.dispatched()
    assert now not in (aged, 2)
    assert driver.row("a")["running"] == ["r1", "r3", "now"]


def test_one_row_is_enough_for_who_waits_behind_one_that_has_waited_long() -> None:
    driver = full(BATCH, BATCH, NORMAL)
    knock(driver, "old", priority=BATCH)
    driver.pass_time(130.0)
    driver.ask("now", "a", body=b"now", priority=INTERACTIVE)
    driver.ask("too", "a", body=b"too", priority=INTERACTIVE)
    assert asked(driver) == []
    assert driver.pausing == {2: True}


def test_a_pause_by_hand_on_its_way_out_changes_nothing_about_its_return() -> None:
    driver = full(BATCH, NORMAL, NORMAL)
    now = knock(driver)
    driver.pause("r1")
    driver.row_left(1, "a")
    assert driver.dispatched() == [now]
    driver.accept_long("a", now, 1000)
    driver.gain("a", now, 1)
    driver.resume("r1")
    assert driver.dispatched() == []
    driver.end("a", now)
    assert driver.dispatched() == [1]


def test_in_the_next_process_nobody_has_made_room() -> None:
    driver = full(BATCH, NORMAL, NORMAL)
    knock(driver)
    driver.exit("a")
    driver.come_up("a")
    assert len(driver.told(Dispatch)) == 4


# ---------------------------------------------------------------- who has not begun


def test_its_queue_timeout_runs_on() -> None:
    driver = full(NORMAL, NORMAL, NORMAL)
    knock(driver, queue_timeout_s=10.0)
    driver.pass_time(9.9)
    assert driver.errors() == {}
    driver.pass_time(0.2)
    assert driver.errors() == {"now": ErrorCode.QUEUE_TIMEOUT}


def test_it_is_queued_and_not_paused() -> None:
    driver = full(NORMAL, NORMAL, NORMAL)
    knock(driver)
    assert kinds(driver, "now") == [("queued", "memory")]
    row = driver.row("a")
    assert (row["yielded"], row["queued"]) == ([], 1)
    assert [one["paused"] for one in row["line"]] == [None]
    assert driver.core.status(driver.now)["queue"]["waiting"] == 1


def test_its_answer_was_neither_paused_nor_resumed() -> None:
    driver = full(NORMAL, NORMAL, NORMAL)
    now = knock(driver)
    driver.pass_time(3.0)
    driver.end("a", RequestKey(1))
    [dispatch] = driver.told(Dispatch)
    assert dispatch.resume is not None
    assert dispatch.resume.delivered == b""
    driver.gain("a", now, 1)
    assert kinds(driver, "now") == []
    driver.end("a", now)
    done = driver.result_of("now")
    assert (done.paused, done.resumed) == (0, 0)
    assert done.timings.queued_s == pytest.approx(3.0)
    assert done.timings.paused_s == 0.0


def test_one_whose_prompt_was_being_read_has_begun() -> None:
    driver = full(NORMAL, NORMAL, NORMAL)
    key = driver.begin("a", "now", 1000, priority=INTERACTIVE, notices=True, queue_timeout_s=1.0)
    driver.read("a", key, 10)
    driver.short("a", key)
    assert ("paused", "memory") in kinds(driver, "now")
    driver.pass_time(5.0)
    assert driver.errors() == {}
    assert driver.row("a")["yielded"] == ["now"]


def test_it_may_be_paused_by_hand_without_its_time_in_the_queue() -> None:
    driver = full(NORMAL, NORMAL, NORMAL)
    knock(driver, queue_timeout_s=10.0)
    driver.pass_time(4.0)
    driver.pause("now")
    driver.pass_time(60.0)
    assert driver.errors() == {}
    driver.resume("now")
    driver.pass_time(5.9)
    assert driver.errors() == {}
    driver.pass_time(0.2)
    assert driver.errors() == {"now": ErrorCode.QUEUE_TIMEOUT}


def test_it_survives_a_crash_even_if_it_must_run_through_once_it_has_begun() -> None:
    driver = full(NORMAL, NORMAL, NORMAL)
    knock(driver, resume=False, queue_timeout_s=10.0)
    driver.exit("a")
    assert driver.errors() == {}
    driver.come_up("a")
    assert [one.resume is not None for one in driver.told(Dispatch)] == [True] * 4


def test_it_ends_with_its_model_as_others_do_that_wait() -> None:
    driver = full(NORMAL, NORMAL, NORMAL)
    knock(driver)
    driver.unload("a")
    assert driver.errors() == {"now": ErrorCode.UNLOADED}
    assert "tokens_sent" not in driver.failure_of("now").error["detail"]


def test_what_was_dispatched_before_the_end_of_its_model_comes_to_its_own() -> None:
    driver = full(NORMAL, NORMAL, NORMAL)
    key = driver.begin("a", "now", 1000, priority=INTERACTIVE, notices=True)
    driver.unload("a")
    driver.short("a", key)
    assert driver.errors() == {}
    driver.end("a", RequestKey(1))
    assert driver.dispatched() == [key]


def test_who_has_begun_and_left_stands_before_it_if_it_came_earlier() -> None:
    driver = full(NORMAL, INTERACTIVE, NORMAL)
    knock(driver)
    driver.gain("a", RequestKey(2), 1)
    driver.short("a", RequestKey(2))
    assert driver.line("a") == ["r2", "now"]


def test_a_row_that_the_worker_took_while_it_was_to_make_room_is_there_no_longer() -> None:
    driver = full(BATCH, NORMAL, NORMAL)
    now = knock(driver)
    row = RowDelta(key=RequestKey(1), paused=RowState.DROPPED, pause_reason=PauseReason.MEMORY)
    driver.worker(Step(step=1, rows=[row]), "a")
    assert driver.dispatched() == [now]


def test_one_that_had_to_leave_before_it_was_accepted_starts_in_the_next_process() -> None:
    """It waits as a new one, and what was short in the process before does not count."""
    driver = full(NORMAL, NORMAL, NORMAL)
    (key,) = driver.serve("now", model="a")
    driver.short("a", key)
    assert driver.dispatched() == []
    driver.exit("a")
    driver.come_up("a")
    assert len(driver.told(Dispatch)) == 4
