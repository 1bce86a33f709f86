"""Rows of batch requests that are freed for interactive ones: whose, when, for whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxsup.protocol.client_messages import Notice
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import FinishReason, PauseReason, Priority, RowState
from mlxsup.protocol.worker_messages import Dispatch, PauseRow, RowDelta, Step
from mlxsup.supervisor.core.events import Reloaded
from mlxsup.supervisor.core.settings import ClientSettings, CoreSettings

from support.core_driver import LAUNCH, Driver, entry

INTERACTIVE, NORMAL, BATCH = Priority
SETTINGS = CoreSettings(max_queue=99, max_queue_per_client=99, aging_s=60.0)


def driver_of(rows: int, settings: CoreSettings = SETTINGS, **launch: Any) -> Driver:
    """A READY model with that many rows."""
    driver = Driver([entry(launch=replace(LAUNCH, max_concurrency=rows, **launch))], settings)
    driver.load()
    driver.come_up()
    return driver


def streaming(*priorities: Priority, ran_s: float = 2.0, **more: Any) -> Driver:
    """As many rows as classes: `r1` (key 1) was asked for first, and all have run for so long."""
    driver = driver_of(len(priorities), **more)
    for number, priority in enumerate(priorities, 1):
        begin(driver, f"r{number}", number, priority)
    driver.pass_time(ran_s)
    return driver


def begin(driver: Driver, id: str, key: int, priority: Priority, **more: Any) -> None:
    """A request gets a row and its first token; the next one comes a moment later."""
    driver.ask(id, body=id.encode(), priority=priority, notices=True, **more)
    driver.accept(key)
    driver.token(key)
    driver.pass_time(0.01)


def ask(driver: Driver, id: str = "now", priority: Priority = INTERACTIVE, **more: Any) -> None:
    driver.ask(id, body=id.encode(), priority=priority, notices=True, **more)


def freed(driver: Driver) -> list[int]:
    """Keys of the rows that the latest event asked to leave."""
    assert all(message.keep for message in driver.told(PauseRow))
    return [int(message.key) for message in driver.told(PauseRow)]


def notices(driver: Driver, id: str, kind: str) -> list[dict[str, Any]]:
    return [n.detail for n in driver.sent(Notice) if (n.id, n.kind) == (id, kind)]


# ---------------------------------------------------------------- whose row


def test_the_batch_row_that_was_served_last_is_freed() -> None:
    driver = streaming(BATCH, NORMAL, BATCH, INTERACTIVE)
    ask(driver)
    assert freed(driver) == [3]
    driver.row_left(3)
    assert driver.dispatched() == [5]
    assert driver.line() == ["r3"]


def test_who_returned_later_was_served_last() -> None:
    driver = streaming(BATCH, BATCH)
    driver.pause("r1")
    driver.row_left(1)
    driver.pass_time(1.0)
    driver.resume("r1")
    driver.token(1)
    driver.pass_time(2.0)
    ask(driver)
    assert freed(driver) == [1]


def test_a_free_row_is_used_first() -> None:
    driver = streaming(BATCH, BATCH)
    driver.token(1, finish=FinishReason.STOP)
    ask(driver)
    assert (driver.dispatched(), freed(driver)) == ([3], [])


@pytest.mark.parametrize("priority", [NORMAL, BATCH])
def test_no_other_class_frees_a_row(priority: Priority) -> None:
    driver = streaming(BATCH)
    ask(driver, priority=priority)
    assert freed(driver) == []


@pytest.mark.parametrize("priority", [NORMAL, INTERACTIVE])
def test_no_row_of_another_class_is_freed(priority: Priority) -> None:
    driver = streaming(priority)
    ask(driver)
    assert freed(driver) == []


def test_who_wants_no_continuation_keeps_its_row() -> None:
    driver = driver_of(1)
    begin(driver, "r1", 1, BATCH, resume=False)
    driver.pass_time(9.0)
    ask(driver)
    assert freed(driver) == []


def test_a_deterministic_model_frees_no_row() -> None:
    driver = streaming(BATCH, deterministic=True)
    ask(driver)
    assert freed(driver) == []


def test_no_more_rows_are_freed_than_requests_wait_for() -> None:
    driver = streaming(BATCH, BATCH, BATCH, BATCH)
    ask(driver, "now1")
    ask(driver, "now2")
    assert freed(driver) == [3], "one more, because the first one's is on its way"
    ask(driver, "later", NORMAL)
    assert freed(driver) == []
    driver.row_left(4)
    assert (driver.dispatched(), freed(driver)) == ([5], [])
    driver.row_left(3)
    assert (driver.dispatched(), freed(driver)) == ([6], [])


def test_a_row_that_is_leaving_anyway_is_enough() -> None:
    driver = streaming(BATCH, BATCH)
    driver.cancel("r1")
    ask(driver)
    assert freed(driver) == []


def test_who_may_not_run_more_frees_no_row() -> None:
    one = {"one": ClientSettings(max_running=1)}
    driver = driver_of(2, replace(SETTINGS, clients=one))
    begin(driver, "r1", 1, BATCH)
    begin(driver, "r2", 2, NORMAL, client="one")
    driver.pass_time(9.0)
    ask(driver, "now", client="one")
    assert freed(driver) == []
    driver.token(2, finish=FinishReason.STOP)
    assert driver.dispatched() == [3]


def test_of_those_who_wait_only_as_many_count_as_may_run() -> None:
    two = {"two": ClientSettings(max_running=2)}
    driver = driver_of(3, replace(SETTINGS, clients=two))
    for number in (1, 2, 3):
        begin(driver, f"r{number}", number, BATCH)
    driver.pass_time(9.0)
    asked = []
    for number in range(3):
        ask(driver, f"now{number}", client="two")
        asked += freed(driver)
    assert asked == [3, 2]


def test_a_suspect_that_runs_alone_is_left_alone() -> None:
    driver = driver_of(1, replace(SETTINGS, min_run_s=0.1))
    begin(driver, "r1", 1, BATCH)
    for _ in range(2):
        driver.exit(signal="SIGSEGV")
        driver.pass_time(5.0)
        driver.come_up()
    driver.accept(1)
    driver.token(1)
    driver.pass_time(1.0)
    assert driver.row()["alone"] == "r1"
    ask(driver)
    assert freed(driver) == []
    for _ in range(3):
        driver.pass_time(0.1)
        driver.token(1)
    assert driver.pausing == {1: True}, "it has got past the crash"


# ---------------------------------------------------------------- when


def test_a_row_is_freed_once_it_has_gained_tokens_for_long_enough() -> None:
    driver = driver_of(1)
    driver.ask("r1", priority=BATCH)
    driver.accept(1)
    driver.pass_time(30.0)
    ask(driver)
    assert freed(driver) == [], "it has read for half a minute, and gained nothing"
    driver.token(1)
    driver.pass_time(1.9)
    assert freed(driver) == []
    driver.pass_time(0.2)
    assert freed(driver) == [1]


def test_the_time_counts_afresh_after_each_return() -> None:
    driver = streaming(BATCH)
    ask(driver, "now1")
    driver.row_left(1)
    driver.accept(2)
    driver.token(2, finish=FinishReason.STOP)
    assert driver.dispatched() == [1]
    driver.pass_time(9.0)
    ask(driver, "now2")
    assert freed(driver) == [], "it has said nothing since its return"
    driver.token(1)
    driver.pass_time(1.99)
    assert freed(driver) == []
    driver.pass_time(0.02)
    assert freed(driver) == [1]


def test_a_reload_that_shortens_the_time_counts_at_once() -> None:
    driver = streaming(BATCH, ran_s=1.0)
    ask(driver)
    assert freed(driver) == []
    settings = replace(SETTINGS, min_run_s=0.5)
    models = tuple(model.life.settings for model in driver.core.fleet)
    driver.do(Reloaded(now=driver.now, settings=settings, models=models))
    assert freed(driver) == [1]


def test_who_would_lose_its_state_runs_as_long_as_reading_it_again_takes() -> None:
    driver = driver_of(1)
    driver.ask("r1", priority=BATCH)
    driver.accept(1)
    first = RowDelta(key=RequestKey(1), text="x", tokens=b"\0\0\0\0", prefill_s=3.0)
    driver.worker(Step(step=1, rows=[first]))
    driver.pass_time(2.0)
    ask(driver, "now1")
    assert freed(driver) == [1], "its state is expected to be kept"
    row = RowDelta(key=RequestKey(1), paused=RowState.DROPPED)
    driver.worker(Step(step=1, rows=[row]))
    driver.token(2, finish=FinishReason.STOP)
    assert driver.dispatched() == [1]
    driver.token(1)
    ask(driver, "now2")
    prompt_and_answer = 3 + 2  # `Driver.accept` makes three tokens of a prompt
    driver.pass_time(3.0 * prompt_and_answer / 3 - 0.1)
    assert freed(driver) == []
    driver.pass_time(0.2)
    assert freed(driver) == [1]
    driver.row_left(1)
    driver.token(3, finish=FinishReason.STOP)
    driver.token(1)
    driver.pass_time(2.0)
    ask(driver, "now3")
    assert freed(driver) == [1], "this time it was kept"


def test_a_row_that_left_for_memory_says_nothing_of_what_the_worker_keeps() -> None:
    """It gave way to a higher class before; its state was kept then."""
    driver = driver_of(1)
    driver.ask("r1", priority=BATCH)
    driver.accept(1)
    first = RowDelta(key=RequestKey(1), text="x", tokens=b"\0\0\0\0", prefill_s=3.0)
    driver.worker(Step(step=1, rows=[first]))
    driver.pass_time(2.0)
    ask(driver, "now1")
    driver.row_left(1)
    driver.token(2, finish=FinishReason.STOP)
    assert driver.dispatched() == [1]
    driver.token(1)
    row = RowDelta(key=RequestKey(1), paused=RowState.DROPPED, pause_reason=PauseReason.MEMORY)
    driver.worker(Step(step=1, rows=[row]))
    assert driver.dispatched() == [1]
    driver.token(1)
    driver.pass_time(2.1)
    ask(driver, "now2")
    assert freed(driver) == [1]


# ---------------------------------------------------------------- for whom


def aged(rows: int = 1) -> Driver:
    """Batch requests have all rows; `old`, another one, has waited for two minutes."""
    driver = driver_of(rows)
    for number in range(1, rows + 1):
        begin(driver, f"r{number}", number, BATCH)
    driver.ask("old", body=b"old", priority=BATCH)
    for _ in range(121):
        driver.pass_time(1.0)
        driver.token(*range(1, rows + 1))
        driver.beat()
    return driver


def test_a_wait_frees_no_row() -> None:
    driver = aged()
    assert driver.row()["queued_per_class"] == {"interactive": 1, "normal": 0, "batch": 0}
    assert driver.pausing == {}


def test_a_freed_row_goes_to_the_class_that_it_was_freed_for() -> None:
    driver = aged()
    ask(driver)
    assert driver.line() == ["old", "now"]
    assert freed(driver) == [1]
    driver.row_left(1)
    assert driver.dispatched() == [3]
    assert driver.told(Dispatch)[0].body == b"now"


def test_every_other_row_goes_to_whoever_has_waited_long() -> None:
    driver = aged(rows=2)
    driver.ask("own", body=b"own", priority=INTERACTIVE)
    driver.token(2, finish=FinishReason.STOP)
    assert driver.told(Dispatch)[0].body == b"old"


def test_who_came_to_its_row_by_waiting_gives_way_like_others_of_its_class() -> None:
    driver = aged()
    driver.token(1, finish=FinishReason.STOP)
    driver.accept(2)
    driver.token(2)
    driver.pass_time(1.0)
    ask(driver)
    assert freed(driver) == [], "it has had its time first"
    driver.pass_time(1.0)
    assert freed(driver) == [2]
    driver.row_left(2)
    assert driver.line() == ["old"]
    ask(driver, "next")
    driver.token(3, finish=FinishReason.STOP)
    assert driver.dispatched() == [2], "and goes before newer ones"


def test_a_row_that_nobody_needs_any_longer_goes_to_whoever_is_first() -> None:
    driver = aged()
    ask(driver)
    driver.cancel("now")
    driver.row_left(1)
    assert driver.dispatched() == [2]
    assert driver.line() == ["r1"]


def test_another_class_by_hand_frees_a_row_or_keeps_one() -> None:
    driver = streaming(BATCH, BATCH)
    ask(driver, priority=NORMAL)
    driver.prioritize("r2", INTERACTIVE)
    driver.prioritize("now", INTERACTIVE)
    assert freed(driver) == [1]


# ---------------------------------------------------------------- what people see


def test_its_client_and_those_who_watch_are_told_why() -> None:
    driver = streaming(BATCH)
    ask(driver)
    driver.row_left(1, tokens=1)
    assert driver.announced() == ["request r1 is paused: an interactive request needs its row"]
    assert (driver.row()["yielded"], driver.row()["line"][0]["paused"]) == (["r1"], "class")
    told = {"reason": "class", "tokens_sent": 2, "since_s": 0.0}
    assert notices(driver, "r1", "paused") == [told]
    assert notices(driver, "r1", "queued") == [{"position": 1, "reason": "rows", "since_s": 0.0}]
    driver.token(2, finish=FinishReason.STOP)
    driver.pass_time(1.0)
    driver.token(1, finish=FinishReason.STOP)
    done = driver.result_of("r1")
    assert (done.paused, done.resumed) == (1, 0)
    assert driver.row()["yielded"] == []


def test_a_wait_is_told_with_what_requests_have_cost() -> None:
    driver = driver_of(1)
    begin(driver, "r1", 1, BATCH)
    driver.compute(8.0, 1)
    driver.token(1, finish=FinishReason.STOP)
    begin(driver, "r2", 2, BATCH)
    ask(driver, "a", NORMAL)
    [first] = notices(driver, "a", "queued")
    ask(driver, "b", NORMAL)
    [second] = notices(driver, "b", "queued")
    assert (first["expected_s"], second["expected_s"]) == (8.0, 16.0)
    ask(driver)
    [own] = notices(driver, "now", "queued")
    assert own["expected_s"] == pytest.approx(1.99), "then a row is freed for it"
    driver.pass_time(2.0)
    ask(driver, "too")
    [own] = notices(driver, "too", "queued")
    assert own["expected_s"] == 0.0, "a row is on its way"
    driver.row_left(2)
    [told] = notices(driver, "r2", "paused")
    assert told["expected_s"] == 4 * 8.0, "four stand before it, and one of them gets its row"
