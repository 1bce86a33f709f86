"""Test answers that outlive their worker."""

from __future__ import annotations

import pytest

from mlxsup.protocol.client_messages import Deltas, Done, Notice
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import RequestKey, pack_tokens
from mlxsup.protocol.states import FinishReason, State
from mlxsup.protocol.worker_messages import Dispatch, Rejected, RowDelta, Step
from mlxsup.supervisor.core.actions import SignalWorker
from mlxsup.supervisor.core.settings import CoreSettings

from support.core.driver import Driver, entry
from support.core.states import in_state


def ready_driver() -> Driver:
    driver = Driver([entry()], CoreSettings(max_queue=8, max_queue_per_client=8))
    driver.load()
    driver.come_up()
    return driver


def streaming(*, resume: bool = True, notices: bool = False) -> Driver:
    """Request r1 (key 1) was accepted and has two tokens."""
    driver = ready_driver()
    driver.ask(resume=resume, notices=notices)
    driver.accept(1)
    driver.token(1)
    driver.token(1)
    return driver


def come_back(driver: Driver) -> Dispatch:
    """From a crash to the dispatch of what was interrupted."""
    if driver.state() is State.BACKOFF:
        driver.pass_time(10.0)
    driver.come_up()
    [dispatch] = driver.told(Dispatch)
    return dispatch


def notices(driver: Driver, kind: str) -> list[dict[str, object]]:
    return [notice.detail for notice in driver.sent(Notice) if notice.kind == kind]


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSEGV", "SIGTERM"])
def test_a_crash_pauses_a_stream_and_it_goes_on_where_it_was_F10(signal: str) -> None:
    driver = streaming()
    driver.exit(signal=signal)
    assert driver.errors() == {}
    dispatch = come_back(driver)
    assert (dispatch.key, dispatch.body) == (1, b"")
    assert dispatch.resume is not None
    assert dispatch.resume.acceptance.prompt_tokens == pack_tokens([1, 2, 3])
    assert dispatch.resume.delivered == pack_tokens([9, 9])
    driver.token(1)
    [deltas] = driver.sent(Deltas)
    assert [d.seq for d in deltas.deltas] == [2], "the numbers continue without a gap"
    driver.token(1, finish=FinishReason.STOP)
    [done] = driver.sent(Done)
    assert (done.resumed, done.seq, done.seed) == (1, 4, 5)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (3, 4)


def test_timings_count_from_the_first_start() -> None:
    driver = ready_driver()
    driver.now += 1.0
    driver.ask()
    driver.accept(1)
    driver.now += 2.0
    driver.token(1)
    driver.exit()
    driver.now += 5.0
    come_back(driver)
    driver.token(1, finish=FinishReason.STOP)
    [done] = driver.sent(Done)
    assert (done.timings.queued_s, done.timings.first_token_s) == (0.0, 2.0)
    assert done.timings.total_s == 7.0


def test_rejected_resume_ends_the_stream() -> None:
    driver = streaming()
    driver.exit()
    come_back(driver)
    error = RemoteError(ErrorCode.WORKER_CRASHED, "the model changed").to_wire()
    driver.worker(Rejected(key=RequestKey(1), error=error))
    failed = driver.failure_of()
    assert failed.error["message"] == "the model changed"
    assert failed.error["detail"]["tokens_sent"] == 2


def test_three_deaths_in_a_row_without_a_new_token_end_a_stream() -> None:
    driver = streaming()
    for _ in range(2):
        driver.exit()
        come_back(driver)
    driver.exit()
    assert driver.errors() == {"r1": ErrorCode.WORKER_CRASHED}


def test_with_progress_there_is_no_limit_and_deaths_asked_for_do_not_count() -> None:
    driver = streaming()
    for _ in range(12):
        driver.exit()
        come_back(driver)
        driver.token(1)
        driver.now += 200.0  # the restart window is another matter
    for _ in range(5):
        driver.restart(now=True)
        driver.exit(code=0)
        come_back(driver)
    driver.token(1, finish=FinishReason.STOP)
    assert driver.sent(Done)[0].resumed == 13, "only where it resumed"


def test_an_interrupted_answer_was_started_and_only_its_end_has_a_limit() -> None:
    driver = ready_driver()
    driver.ask(timeout_s=50.0, queue_timeout_s=5.0, first_token_timeout_s=6.0)
    driver.accept(1)
    driver.token(1)
    driver.pass_time(20.0)
    driver.exit()
    driver.pass_time(29.0)
    assert driver.errors() == {}
    driver.pass_time(1.1)
    assert driver.errors() == {"r1": ErrorCode.DEADLINE_EXCEEDED}


def test_delivered_tokens_count_among_the_bytes_that_are_bounded() -> None:
    driver = streaming()
    ledger = driver.core.ledger
    parameters = len(repr({}))
    assert ledger.held_bytes == 12 + parameters + 8, "prompt, parameters and answer"
    driver.exit()
    assert ledger.held_bytes == 12 + parameters + 8
    come_back(driver)
    driver.token(1, finish=FinishReason.STOP)
    assert ledger.held_bytes == 0


def test_failed_model_ends_streams_with_their_tokens() -> None:
    driver = streaming()
    driver.exit()
    driver.spawned()
    driver.exit(code=66)
    assert driver.state() is State.FAILED
    failed = driver.failure_of()
    assert failed.error["code"] == ErrorCode.WORKER_CRASHED
    assert failed.error["detail"]["tokens_sent"] == 2


def test_unload_ends_interrupted_streams() -> None:
    driver = streaming()
    driver.exit()
    driver.unload()
    failed = driver.failure_of()
    assert failed.error["code"] == ErrorCode.UNLOADED
    assert failed.error["detail"]["tokens_sent"] == 2


def test_tokens_of_the_dead_worker_are_not_taken_for_the_new_ones_F9() -> None:
    driver = streaming()
    driver.exit()
    come_back(driver)
    late = RowDelta(key=RequestKey(1), text="late", tokens=pack_tokens([9]))
    driver.worker(Step(step=3, rows=[late]), generation=1)
    assert driver.of(SignalWorker) == []
    assert driver.actions == []


def test_a_crash_in_a_draining_unload_ends_the_stream_with_unloaded() -> None:
    driver = in_state(State.DRAINING)
    driver.exit()
    assert driver.errors()["r1"] == ErrorCode.UNLOADED
    assert driver.state() is State.STOPPED
