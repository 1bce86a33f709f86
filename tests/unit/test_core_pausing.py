"""Test pause and resume by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mlxsup.protocol.client_messages import Deltas, Done, Failed, Notice, Reply
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.ids import RequestKey, pack_tokens
from mlxsup.protocol.states import FinishReason, PauseReason, State
from mlxsup.protocol.worker_messages import CancelRow, Dispatch, DropKept, PauseRow
from mlxsup.supervisor.core.events import Reloaded
from mlxsup.supervisor.core.requests.ledger import PAUSED_BYTES
from mlxsup.supervisor.core.settings import CoreSettings

from support.core.driver import LAUNCH, Driver, entry
from support.core.looks import BOB
from support.core.states import in_state

# Pauses

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


def test_paused_request_frees_its_row_and_returns_first_C11() -> None:
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


def test_resumed_request_continues_from_delivered_tokens() -> None:
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


def test_end_that_crosses_a_pause_wins() -> None:
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


@pytest.mark.parametrize("is_paused_again", [False, True])
def test_a_resume_before_the_worker_confirms_counts_once_it_does(is_paused_again: bool) -> None:
    driver = streaming()
    driver.pause()
    driver.resume()
    assert value(driver)["stage"] == "queued"
    if is_paused_again:
        driver.pause()
        assert driver.told(PauseRow) == [], "the worker was told already"
    driver.row_left(1)
    assert driver.dispatched() == ([] if is_paused_again else [1])
    assert driver.row()["paused"] == (["r1"] if is_paused_again else [])
    assert notices(driver, "paused") == [told(2)]


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


@pytest.mark.parametrize("how", ["cancel", "leave"])
@pytest.mark.parametrize("state", ["kept", "dropped", "taken up", "gone with its process"])
def test_cancel_of_a_paused_request_drops_the_state_that_is_kept(state: str, how: str) -> None:
    driver = streaming()
    driver.pause()
    if state == "dropped":
        driver.pausing[KEY] = False  # the row had no state worth keeping
    driver.row_left(1)
    if state == "taken up":
        driver.resume()
    elif state == "gone with its process":
        driver.exit()
        driver.come_up()
    getattr(driver, how)()
    assert driver.told(DropKept) == ([DropKept(key=KEY)] if state == "kept" else [])
    assert driver.told(CancelRow) == ([CancelRow(key=KEY)] if state == "taken up" else [])
    assert len(driver.core.ledger) == 0
    assert (len(driver.sent(Done)), driver.row()["paused"]) == (int(how == "cancel"), [])


@pytest.mark.parametrize("how", ["unload", "stop", "signal"])
def test_a_living_worker_brings_paused_answers_to_their_end(how: str) -> None:
    driver = paused()
    getattr(driver, how)()
    assert driver.state() is State.DRAINING
    assert driver.dispatched() == [1], "without anybody who resumes it"
    driver.token(1, finish=FinishReason.STOP)
    assert driver.result_of().finish_reason is FinishReason.STOP
    assert driver.state() is State.STOPPING


def test_drain_limit_ends_paused_answers_with_their_tokens() -> None:
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


def test_unload_ends_paused_requests_without_an_answer() -> None:
    driver = streaming()
    driver.ask("new")
    driver.pause("new")
    driver.row_left(2)
    driver.unload()
    assert driver.errors() == {"new": "unloaded"}


def test_a_restart_keeps_a_paused_request_and_drops_its_state() -> None:
    driver = paused()
    driver.restart()
    driver.exit(code=0)
    driver.come_up()
    assert (driver.dispatched(), driver.row()["paused"]) == ([], ["r1"])
    driver.resume()
    assert driver.dispatched() == [1]


def test_a_model_with_paused_requests_is_not_idle() -> None:
    driver = Driver([entry(idle_unload_s=10.0)])
    driver.load()
    driver.come_up()
    driver.ask()
    driver.pause()
    driver.row_left(1)
    driver.pass_time(100.0)
    assert driver.state() is State.READY
    driver.cancel()
    driver.pass_time(9.0)
    assert driver.state() is State.READY, "from the end of the last one"
    driver.pass_time(2.0)
    assert driver.state() is not State.READY


# Refusals


def refusal(driver: Driver) -> str:
    """The message of the only error; it is one of a wrong request."""
    [failed] = driver.sent(Failed)
    assert failed.error["code"] == ErrorCode.INVALID_REQUEST
    assert driver.told(PauseRow) == []
    return str(failed.error["message"])


@pytest.mark.parametrize("command", ["pause", "resume"])
def test_a_request_that_is_not_open_is_named_with_those_that_are(command: str) -> None:
    driver = in_state(State.READY)
    getattr(driver, command)("nobody")
    assert refusal(driver) == "no open request has the id 'nobody'; open: r1 (#1, runs for m)"
    [failed] = driver.sent(Failed)
    assert failed.error["detail"] == {"parameter": "request", "known": ["r1"], "numbers": ["#1"]}


def test_a_request_of_another_client_may_be_paused() -> None:
    driver = in_state(State.READY)
    driver.pause("r1", BOB)
    assert [told.key for told in driver.told(PauseRow)] == [1]


def test_a_second_pause_is_refused_before_and_after_the_row_has_left() -> None:
    driver = in_state(State.READY)
    driver.pause()
    driver.pause()
    expected = "request 'r1' is paused already: resume it, or cancel it"
    assert refusal(driver) == expected
    driver.row_left(1)
    driver.pause()
    assert refusal(driver) == expected


def test_resume_of_an_unpaused_request_is_refused() -> None:
    driver = in_state(State.READY)
    expected = "request 'r1' is not paused: it runs, or waits for its turn"
    driver.resume()
    assert refusal(driver) == expected
    driver.pause()
    driver.row_left(1)
    driver.resume()
    driver.resume()
    assert refusal(driver) == expected


def is_removed(driver: Driver) -> None:
    driver.do(Reloaded(now=driver.now, settings=CoreSettings(), models=(entry("other"),)))


UNPAUSABLE: dict[str, Callable[[Driver], object]] = {
    "it was sent with `resume` false": lambda driver: driver.ask("r2", resume=False),
    "m is `deterministic`": lambda driver: driver.ask("r2"),
    "m is being unloaded (user)": lambda driver: (driver.ask("r2"), driver.unload()),
    "no model is called 'm'; configured: other": lambda driver: (
        driver.ask("r2"), is_removed(driver),
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", UNPAUSABLE)
def test_requests_that_may_not_be_paused(why: str) -> None:
    driver = in_state(State.READY, launch=replace(LAUNCH, deterministic="determ" in why))
    UNPAUSABLE[why](driver)
    driver.pause("r2")
    assert refusal(driver) == f"request 'r2' may not be paused: {why}"


def test_a_request_of_a_model_that_restarts_may_be_paused_and_waits_beyond_the_restart() -> None:
    driver = in_state(State.READY)
    driver.restart(now=True)
    assert driver.state() is State.STOPPING
    driver.pause()
    assert driver.told(PauseRow) == [], "its process is asked to end already"
    driver.exit(code=0)
    driver.come_up()
    assert (driver.dispatched(), driver.row()["paused"]) == ([], ["r1"])


# Places and bytes


def waiting(driver: Driver) -> int:
    """How many wait, as the status says."""
    count: int = driver.core.status(driver.now)["queue"]["waiting"]
    return count


def test_a_paused_request_gives_its_place_to_another_and_may_always_return() -> None:
    driver = Driver(settings=CoreSettings(max_queue=1, max_queue_per_client=1))
    driver.ask()
    driver.pause()
    assert waiting(driver) == 0
    driver.ask("r2")
    assert waiting(driver) == 1
    driver.resume()
    assert waiting(driver) == driver.row()["queued"] == 2
    driver.ask("r3")
    assert driver.failure_of("r3").error["detail"]["limit"] == "max_queue"


def test_an_answer_that_has_begun_takes_no_place_either_paused_or_resumed() -> None:
    driver = Driver()
    driver.load()
    driver.come_up()
    driver.ask()
    driver.accept(1)
    driver.pause()
    driver.row_left(1)
    assert waiting(driver) == 0
    driver.resume()
    assert waiting(driver) == 0
    driver.token(1, finish=FinishReason.STOP)
    assert driver.core.ledger.held_bytes == 0


def test_pausing_is_no_way_to_have_any_number_of_requests_open() -> None:
    settings = CoreSettings(max_queue=1, max_queue_bytes=2 * PAUSED_BYTES)
    driver = Driver(settings=settings)
    for id in ("r1", "r2"):
        driver.ask(id, body=b"")
        driver.pause(id)
    driver.ask("r3", body=b"1")
    assert driver.failure_of("r3").error["detail"]["limit"] == "max_queue_bytes"
    driver.resume()
    assert driver.core.ledger.held_bytes == PAUSED_BYTES
    driver.cancel("r2")
    assert driver.core.ledger.held_bytes == 0
