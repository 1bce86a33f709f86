"""Requests that a person pauses: what the worker hears, where they wait, and how they return."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxsup.protocol.client_messages import Deltas, Done, Notice, Reply
from mlxsup.protocol.ids import RequestKey, pack_tokens
from mlxsup.protocol.states import FinishReason, PauseReason, RowState, State
from mlxsup.protocol.worker_messages import (
    CancelRow,
    Dispatch,
    DropKept,
    PauseRow,
    RowDelta,
    Step,
)

from support.core_driver import LAUNCH, Driver, entry

KEY = RequestKey(1)


def streaming(rows: int = 2, **asked: Any) -> Driver:
    """A READY model; request `r1` (key 1) was accepted and has two tokens."""
    driver = Driver([entry(launch=replace(LAUNCH, max_concurrency=rows))])
    driver.load()
    driver.come_up()
    driver.ask(notices=True, **asked)
    driver.accept(1)
    driver.token(1)
    driver.token(1)
    return driver


def paused(**asked: Any) -> Driver:
    """The same, paused; its state is kept."""
    driver = streaming(**asked)
    driver.pause()
    driver.row_left(1, tokens=1)
    return driver


def notices(driver: Driver, kind: str) -> list[dict[str, Any]]:
    return [notice.detail for notice in driver.sent(Notice) if notice.kind == kind]


def told(tokens_sent: int) -> dict[str, Any]:
    """What a notice says of a pause that has just begun."""
    return {"reason": PauseReason.USER, "tokens_sent": tokens_sent, "since_s": 0.0}


def value(driver: Driver) -> dict[str, Any]:
    [reply] = driver.sent(Reply)
    return reply.value


# ---------------------------------------------------------------- there and back


def test_a_pause_asks_the_row_to_leave_and_its_state_to_be_kept() -> None:
    driver = streaming()
    driver.pause()
    assert driver.told(PauseRow) == [PauseRow(key=KEY, keep=True)]
    assert value(driver) == {
        "request": "r1",
        "number": "#1",
        "model": "m",
        "stage": "pausing",
        "tokens_sent": 2,
    }
    assert driver.row()["running"] == ["r1"], "until the worker confirms, it runs"


def test_what_was_computed_ahead_is_delivered_before_the_notice() -> None:
    driver = paused()
    assert [type(message) for message in driver.sent_in_order()][:2] == [Deltas, Notice]
    assert notices(driver, "paused") == [told(3)]
    assert (driver.row()["running"], driver.row()["paused"]) == ([], ["r1"])
    assert driver.row()["queued"] == 0


def test_it_gives_its_row_to_others_and_comes_back_before_new_ones_C11() -> None:
    driver = streaming(rows=1)
    driver.ask("r2")
    driver.ask("r3")
    driver.pause()
    assert driver.dispatched() == [], "until the worker confirms, it holds its place"
    driver.row_left(1)
    assert driver.dispatched() == [2]
    driver.resume()
    assert value(driver)["stage"] == "queued"
    assert driver.row()["queued"] == 2
    driver.token(2, finish=FinishReason.STOP)
    assert driver.dispatched() == [1]


def test_it_continues_with_all_that_was_delivered_and_is_counted_once() -> None:
    driver = paused()
    driver.resume()
    [dispatch] = driver.told(Dispatch)
    assert dispatch.resume is not None
    assert dispatch.resume.delivered == pack_tokens([9, 9, 9])
    assert notices(driver, "resumed") == []
    driver.token(1)
    assert notices(driver, "resumed") == [{"times": 1, "after": "pause"}]
    driver.token(1, finish=FinishReason.STOP)
    done = driver.result_of()
    assert (done.paused, done.resumed, done.usage.completion_tokens) == (1, 0, 5)


def test_the_time_of_its_pauses_is_told() -> None:
    driver = paused()
    driver.pass_time(3.0)
    driver.resume()
    driver.pass_time(5.0)
    driver.token(1)
    driver.pause()
    driver.row_left(1)
    driver.pass_time(4.0)
    driver.cancel()
    done = driver.result_of()
    assert (done.timings.paused_s, done.paused) == (7.0, 1)


def test_a_pause_and_a_return_are_told_to_those_who_watch() -> None:
    driver = streaming()
    driver.pause()
    driver.row_left(1)
    assert driver.announced() == ["request r1 is paused: somebody asked for that"]
    driver.resume()
    assert driver.announced() == ["request r1 is no longer paused"]


def test_a_second_pause_is_told_again() -> None:
    driver = paused()
    driver.resume()
    driver.pause()
    driver.row_left(1)
    assert notices(driver, "paused") == [told(3)]


# ---------------------------------------------------------------- races with the worker


def test_an_end_that_is_on_its_way_wins() -> None:
    driver = streaming()
    driver.pause()
    driver.token(1, finish=FinishReason.STOP)
    assert driver.result_of().finish_reason is FinishReason.STOP
    assert (driver.row()["running"], driver.row()["paused"]) == ([], [])


def test_tokens_that_cross_the_pause_count_and_are_no_return() -> None:
    driver = streaming()
    driver.pause()
    driver.token(1)
    assert len(driver.sent(Deltas)) == 1
    assert notices(driver, "resumed") == []
    driver.row_left(1)
    assert notices(driver, "paused") == [told(3)]


def test_a_cancel_that_crosses_the_pause_ends_it_and_drops_its_state() -> None:
    driver = streaming(rows=1)
    driver.ask("r2")
    driver.pause()
    driver.cancel()
    assert driver.result_of().finish_reason is FinishReason.CANCELLED
    assert driver.told(CancelRow) == [CancelRow(key=KEY)]
    assert driver.dispatched() == [], "the row has yet to leave"
    driver.row_left(1)
    assert driver.told(DropKept) == [DropKept(key=KEY)]
    assert driver.dispatched() == [2]


def test_a_resume_before_the_worker_confirms_lets_it_come_back_at_once() -> None:
    driver = streaming()
    driver.pause()
    driver.resume()
    assert value(driver)["stage"] == "queued"
    driver.row_left(1)
    assert driver.dispatched() == [1]
    assert notices(driver, "paused") == [told(2)]


def test_a_pause_after_that_resume_still_waits_for_the_same_row() -> None:
    driver = streaming()
    driver.pause()
    driver.resume()
    driver.pause()
    assert driver.told(PauseRow) == [], "the worker was told already"
    driver.row_left(1)
    assert (driver.dispatched(), driver.row()["paused"]) == ([], ["r1"])


def test_a_crash_before_the_worker_confirms_interrupts_and_leaves_it_paused() -> None:
    driver = streaming()
    driver.pause()
    driver.exit()
    assert notices(driver, "interrupted") == [{"cause": "SIGKILL: last words", "tokens_sent": 2}]
    assert driver.row()["paused"] == ["r1"]
    driver.come_up()
    assert driver.dispatched() == []
    driver.resume()
    assert driver.dispatched() == [1]
    driver.token(1)
    assert notices(driver, "resumed") == [{"times": 1, "after": "crash"}]
    driver.token(1, finish=FinishReason.STOP)
    assert (driver.result_of().resumed, driver.result_of().paused) == (1, 1)


def test_a_row_that_leaves_again_before_it_said_anything_has_not_continued() -> None:
    driver = paused()
    driver.resume()
    driver.pause()
    driver.row_left(1)
    assert notices(driver, "resumed") == []
    driver.resume()
    driver.token(1, finish=FinishReason.STOP)
    assert driver.result_of().paused == 1


def test_a_row_that_leaves_unasked_waits_for_another_one() -> None:
    driver = streaming()
    row = RowDelta(key=KEY, paused=RowState.DROPPED)
    driver.worker(Step(step=1, rows=[row]))
    assert driver.dispatched() == [1], "no worker does so; if one did, nobody would be lost"


# ---------------------------------------------------------------- what was not accepted


def test_a_request_that_was_not_accepted_is_new_again() -> None:
    driver = Driver()
    driver.load()
    driver.come_up()
    driver.ask(notices=True)
    driver.pause()
    driver.row_left(1)
    assert notices(driver, "paused") == [told(0)]
    driver.resume()
    [dispatch] = driver.told(Dispatch)
    assert (dispatch.resume, dispatch.body) == (None, b"body")
    driver.accept(1)
    driver.token(1, finish=FinishReason.STOP)
    assert driver.result_of().paused == 0, "its answer had not begun"


def test_a_waiting_request_leaves_the_line_and_its_limit_stands_still() -> None:
    driver = Driver()
    driver.ask(queue_timeout_s=5.0)
    driver.pass_time(4.0)
    driver.pause()
    assert value(driver)["stage"] == "paused"
    assert driver.row()["queued"] == 0
    driver.pass_time(10.0)
    driver.resume()
    driver.pass_time(0.9)
    assert driver.row()["queued"] == 1
    driver.pass_time(0.2)
    assert driver.failure_of().error["code"] == "queue_timeout"


@pytest.mark.parametrize("limit", ["timeout_s", "first_token_timeout_s"])
def test_other_limits_run_on(limit: str) -> None:
    driver = Driver()
    limits: dict[str, Any] = {limit: 5.0}
    driver.ask(**limits)
    driver.pause()
    driver.pass_time(5.0)
    assert driver.failure_of().error["code"] == "deadline_exceeded"
    assert driver.row()["paused"] == []


# ---------------------------------------------------------------- how a paused request ends


@pytest.mark.parametrize("how", ["cancel", "leave"])
def test_its_client_ends_it_at_once_and_its_state_is_dropped(how: str) -> None:
    driver = paused()
    getattr(driver, how)()
    assert driver.told(DropKept) == [DropKept(key=KEY)]
    assert len(driver.core.ledger) == 0
    assert (len(driver.sent(Done)), driver.row()["paused"]) == (int(how == "cancel"), [])


def test_a_state_that_was_not_kept_is_not_dropped() -> None:
    driver = streaming()
    driver.pause()
    driver.pausing[KEY] = False  # the row had no state worth keeping
    driver.row_left(1)
    driver.cancel()
    assert driver.told(DropKept) == []


def test_a_state_that_was_taken_up_again_is_not_dropped() -> None:
    driver = paused()
    driver.resume()
    driver.cancel()
    assert (driver.told(DropKept), driver.told(CancelRow)) == ([], [CancelRow(key=KEY)])


def test_a_state_goes_with_its_process() -> None:
    driver = paused()
    driver.exit()
    driver.come_up()
    driver.cancel()
    assert driver.told(DropKept) == []


@pytest.mark.parametrize("how", ["unload", "stop", "signal"])
def test_a_living_worker_brings_paused_answers_to_their_end(how: str) -> None:
    driver = paused()
    getattr(driver, how)()
    assert driver.state() is State.DRAINING
    assert driver.dispatched() == [1], "without anybody who resumes it"
    driver.token(1, finish=FinishReason.STOP)
    assert driver.result_of().finish_reason is FinishReason.STOP
    assert driver.state() is State.STOPPING


def test_what_is_left_of_them_at_the_end_of_the_drain_ends_with_its_tokens() -> None:
    driver = paused(rows=1)
    driver.ask("r2")
    driver.accept(2)
    driver.unload()
    assert driver.dispatched() == [], "no row is free"
    driver.pass_time(5.0)
    assert driver.state() is State.STOPPING
    failed = driver.failure_of()
    assert failed.error["code"] == "unloaded"
    assert failed.error["detail"]["tokens_sent"] == 3


def test_a_paused_request_whose_answer_has_not_begun_ends_with_the_unload() -> None:
    driver = streaming()
    driver.ask("new")
    driver.pause("new")
    driver.row_left(2)
    driver.unload()
    assert driver.errors() == {"new": "unloaded"}


def test_a_restart_lets_it_wait_and_takes_its_state() -> None:
    driver = paused()
    driver.restart()
    driver.exit(code=0)
    driver.come_up()
    assert (driver.dispatched(), driver.row()["paused"]) == ([], ["r1"])
    driver.resume()
    assert driver.dispatched() == [1]


def test_a_model_that_fails_answers_it() -> None:
    driver = paused()
    driver.exit()
    driver.spawned()
    driver.exit(code=66)
    assert driver.state() is State.FAILED
    assert driver.failure_of().error["code"] == "worker_crashed"


def test_a_model_with_paused_requests_is_not_idle() -> None:
    driver = Driver([entry(idle_unload_s=10.0)])
    driver.load()
    driver.come_up()
    driver.ask()
    driver.accept(1)
    driver.token(1)
    driver.pause()
    driver.row_left(1)
    driver.pass_time(100.0)
    assert driver.state() is State.READY
    driver.cancel()
    driver.pass_time(9.0)
    assert driver.state() is State.READY, "from the end of the last one"
    driver.pass_time(2.0)
    assert driver.state() is not State.READY
