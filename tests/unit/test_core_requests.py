"""The way of a request through the core: one terminal message each, on every path."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsup.protocol.client_messages import Deltas, Done, Event, Failed, Notice, Subscribe
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import RequestId, RequestKey, pack_tokens
from mlxsup.protocol.states import FinishReason, State
from mlxsup.protocol.worker_messages import CancelRow, Dispatch, PrefillProgress, Rejected, Step
from mlxsup.supervisor.core.events import ClientTooSlow
from mlxsup.supervisor.core.settings import CoreSettings

from support.core_driver import Driver, entry
from support.core_looks import ALICE, BOB
from support.core_states import in_state
from support.pieces import piece


def ready_driver(max_queue_bytes: int = CoreSettings().max_queue_bytes) -> Driver:
    settings = CoreSettings(max_queue=4, max_queue_per_client=3, max_queue_bytes=max_queue_bytes)
    driver = Driver([entry()], settings)
    driver.load()
    driver.come_up()
    return driver


def test_a_request_streams_and_ends_once() -> None:
    driver = ready_driver()
    driver.ask()
    assert driver.told(Dispatch) == [Dispatch(key=RequestKey(1), body=b"body")]
    driver.now += 1.0
    driver.accept(1)
    driver.now += 1.0
    driver.token(1)
    [deltas] = driver.sent(Deltas)
    assert deltas == Deltas(deltas=[piece("r1", 0, "x", tokens=pack_tokens([9]))])
    driver.token(1, finish=FinishReason.LENGTH)
    [done] = driver.sent(Done)
    assert (done.finish_reason, done.seq, done.seed) == ("length", 2, 5)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (3, 2)
    assert (done.timings.first_token_s, done.timings.tokenize_s) == (2.0, 0.1)
    assert driver.row()["running"] == []


def test_the_deltas_of_a_step_reach_each_connection_in_one_message() -> None:
    driver = ready_driver()
    driver.ask("a")
    driver.ask("b", connection=BOB)
    driver.token(1, 2)
    assert [len(driver.sent(Deltas, c)) for c in (ALICE, BOB)] == [1, 1]


def test_dispatch_stops_at_max_concurrency_and_goes_on_in_order() -> None:
    driver = ready_driver()
    dispatched = []
    for id in "abcd":
        driver.ask(id)
        dispatched += driver.dispatched()
    assert dispatched == [1, 2]
    driver.token(2, finish=FinishReason.STOP)
    assert driver.dispatched() == [3]


def test_a_wrong_request_fails_alone_C7() -> None:
    driver = ready_driver()
    driver.ask("good")
    driver.ask("bad")
    error = RemoteError(ErrorCode.INVALID_REQUEST, "no").to_wire()
    driver.worker(Rejected(key=RequestKey(2), error=error))
    assert driver.errors() == {"bad": ErrorCode.INVALID_REQUEST}
    driver.token(1, finish=FinishReason.STOP)
    assert len(driver.sent(Done)) == 1


def test_a_rejection_that_crosses_a_cancel_gives_the_place_back_D11() -> None:
    driver = ready_driver()
    for id in ("a", "b", "c"):
        driver.ask(id)
    driver.cancel("a")
    assert driver.dispatched() == [], "its row has not left"
    error = RemoteError(ErrorCode.INVALID_REQUEST, "no").to_wire()
    driver.worker(Rejected(key=RequestKey(1), error=error))
    assert driver.dispatched() == [3]
    assert driver.sent(Failed) == [], "it was answered when it was cancelled"


def test_cancel_while_queued_is_never_dispatched_D1() -> None:
    driver = ready_driver()
    for id in "abc":
        driver.ask(id)
    driver.cancel("c")
    [done] = driver.sent(Done)
    assert done.finish_reason == "cancelled"
    assert driver.told(CancelRow) == [], "it touches no running request (D13)"
    driver.token(1, 2, finish=FinishReason.STOP)
    assert driver.dispatched() == []


def test_cancel_while_running_answers_at_once_D4() -> None:
    driver = in_state(State.READY)
    driver.token(1)
    driver.cancel()
    [done] = driver.sent(Done)
    assert (done.finish_reason, done.usage.completion_tokens) == ("cancelled", 1)
    driver.token(1)
    assert driver.actions == [], "no token after the end"


def test_cancel_meets_finish_D6() -> None:
    driver = in_state(State.READY)
    driver.token(1, finish=FinishReason.STOP)
    driver.cancel()
    driver.cancel()
    assert driver.actions == []
    assert len(driver.terminals[b"alice", "r1"]) == 1


def test_an_id_used_again_at_once_is_a_new_request_D7() -> None:
    driver = in_state(State.READY)
    driver.cancel()
    driver.ask("r1")
    assert driver.dispatched() == [2]
    driver.token(1)
    assert driver.actions == [], "a token of the old one"
    driver.token(2)
    assert len(driver.sent(Deltas)) == 1


def test_an_open_id_cannot_be_used_twice_but_by_another_connection() -> None:
    driver = in_state(State.READY)
    driver.ask("r1")
    assert driver.errors() == {"r1": ErrorCode.DUPLICATE_ID}
    driver.ask("r1", connection=BOB)
    assert driver.errors(BOB) == {}


def test_a_client_that_goes_is_a_cancel_of_all_its_requests_D12() -> None:
    driver = in_state(State.READY)
    driver.ask("r2", connection=BOB)
    driver.ask("r3")
    driver.leave()
    assert driver.told(CancelRow) == [CancelRow(key=RequestKey(1))]
    assert driver.terminals.get((b"alice", "r1")) is None
    queue = driver.core.status(driver.now)["queue"]
    assert (queue["waiting"], queue["per_client"]) == (0, {})
    driver.row_left(1)
    assert driver.row()["running"] == ["r2"]


def test_a_slow_client_ends_with_slow_consumer_H7() -> None:
    driver = in_state(State.READY)
    driver.do(ClientTooSlow(now=driver.now, connection=ALICE))
    assert driver.errors() == {"r1": ErrorCode.SLOW_CONSUMER}
    assert driver.told(CancelRow) != []


def test_a_crash_ends_what_does_not_want_to_go_on_and_keeps_the_rest_F1() -> None:
    driver = Driver([entry(), entry("other")])
    for name, pid in (("m", 1), ("other", 2)):
        driver.load(name)
        driver.come_up(name, pid)
    for id in ("accepted", "dispatched", "queued"):
        driver.ask(id, resume=False)
    driver.ask("elsewhere", "other")
    driver.accept(1)
    driver.token(1)
    driver.exit("m")
    assert driver.errors() == {"accepted": ErrorCode.WORKER_CRASHED}
    [failed] = driver.sent(Failed)
    assert failed.error["detail"]["tokens_sent"] == 1
    assert failed.error["retryable"] is True
    driver.come_up("m", 3)
    assert driver.dispatched() == [2, 3], "in their order"
    assert driver.row("other")["running"] == ["elsewhere"]


def test_three_deaths_without_a_token_end_a_request() -> None:
    driver = ready_driver()
    driver.ask()
    driver.exit()
    driver.come_up()
    driver.exit()
    driver.pass_time(10.0)
    driver.come_up()
    assert driver.errors() == {}
    driver.exit()
    assert driver.errors() == {"r1": ErrorCode.WORKER_CRASHED}


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"queue_timeout_s": 3.0}, ErrorCode.QUEUE_TIMEOUT),
        ({"first_token_timeout_s": 3.0}, ErrorCode.DEADLINE_EXCEEDED),
        ({"timeout_s": 3.0}, ErrorCode.DEADLINE_EXCEEDED),
    ],
)
def test_a_request_that_waits_for_a_load_has_its_deadline_B4(
    limits: dict[str, Any], code: ErrorCode
) -> None:
    driver = Driver()
    driver.ask("r1", "m", ALICE, **limits)
    driver.pass_time(2.9)
    assert driver.errors() == {}
    driver.pass_time(0.2)
    assert driver.errors() == {"r1": code}
    driver.come_up()
    assert driver.dispatched() == []


def test_deadlines_of_a_running_request_act_as_cancels_D15() -> None:
    driver = ready_driver()
    driver.ask(queue_timeout_s=1.0, first_token_timeout_s=3.0, timeout_s=6.0)
    driver.pass_time(2.0)
    assert driver.errors() == {}, "it no longer waits"
    driver.accept(1)
    driver.token(1)
    driver.pass_time(2.0)
    assert driver.errors() == {}, "the first token has come"
    driver.pass_time(2.1)
    assert driver.errors() == {"r1": ErrorCode.DEADLINE_EXCEEDED}
    assert driver.told(CancelRow) == [CancelRow(key=RequestKey(1))]


def test_queues_are_bounded_per_client_and_in_all_H5() -> None:
    driver = ready_driver()
    for number in range(5):
        driver.ask(f"r{number}")
    assert driver.errors() == {}
    driver.ask("too many")
    [failed] = driver.sent(Failed)
    assert failed.error["code"] == ErrorCode.OVERLOADED
    assert failed.error["detail"]["running"] == ["r0", "r1"], "names who holds the rows (H3)"
    driver.ask("b1", connection=BOB)
    assert driver.errors(BOB) == {}, "another client still has room"
    driver.ask("b2", connection=BOB)
    assert driver.errors(BOB) == {"b2": ErrorCode.OVERLOADED}


def test_bytes_are_bounded_and_given_back() -> None:
    driver = ready_driver(max_queue_bytes=10)
    driver.ask("a")
    driver.ask("b")
    driver.ask("c")
    assert driver.errors() == {"c": ErrorCode.OVERLOADED}
    driver.cancel("a")
    driver.ask("c")
    assert driver.errors() == {}


def test_a_negative_limit_is_refused() -> None:
    driver = ready_driver()
    driver.ask(timeout_s=-1.0)
    assert driver.errors() == {"r1": ErrorCode.INVALID_REQUEST}
    assert driver.state() is State.READY


def test_after_quiescence_everything_is_empty_D9() -> None:
    driver = ready_driver()
    for round_ in range(20):
        for number in range(4):
            driver.ask(f"{round_}-{number}")
        first = 4 * round_ + 1
        driver.cancel(f"{round_}-3")
        driver.token(first)
        driver.cancel(f"{round_}-0")
        driver.row_left(first)
        driver.token(first + 1, finish=FinishReason.STOP)
        driver.token(first + 2, finish=FinishReason.STOP)
    core = driver.core
    assert len(core.ledger) == 0
    assert core.ledger.held_bytes == 0
    assert core.ledger.connections == set()
    model = driver.model()
    assert (len(model.queue), model.running, model.leaving) == (0, {}, {})
    assert all(len(ends) == 1 for ends in driver.terminals.values())


def test_a_slow_client_hears_that_its_commands_were_given_up_too() -> None:
    driver = Driver()
    load = driver.load()
    driver.do(ClientTooSlow(now=driver.now, connection=ALICE))
    assert driver.errors() == {load: ErrorCode.SLOW_CONSUMER}
    driver.come_up()
    assert driver.replies() == []


def test_a_second_subscription_takes_the_place_of_the_first_which_ends() -> None:
    driver = in_state(State.READY)
    driver.say(Subscribe(id=RequestId("s")))
    driver.say(Subscribe(id=RequestId("t")))
    (ended,) = driver.sent(Failed)
    assert (ended.id, ended.error["code"]) == ("s", ErrorCode.SUPERSEDED)
    assert driver.core.outbox.subscriptions == {ALICE: "t"}
    driver.say(Subscribe(id=RequestId("t")))
    assert driver.sent(Failed) == []
    driver.leave()
    assert driver.core.outbox.subscriptions == {}


def test_a_subscription_ends_with_its_cancel() -> None:
    driver = Driver()
    driver.say(Subscribe(id=RequestId("s")))
    driver.load()
    assert driver.sent(Event) != []
    driver.cancel("s")
    driver.spawned()
    driver.hello()
    driver.ready()
    assert driver.sent(Event) == []


def notices(driver: Driver, kind: str) -> list[dict[str, object]]:
    return [notice.detail for notice in driver.sent(Notice) if notice.kind == kind]


def test_a_waiting_request_is_told_its_position_and_how_the_load_goes() -> None:
    driver = Driver()
    driver.ask("silent")
    driver.ask("r1", notices=True)
    assert notices(driver, "queued") == [{"position": 2, "reason": "load", "since_s": 0.0}]
    assert notices(driver, "loading") == [{"state": "LOADING", "phase": "spawn", "fraction": 0.0}]
    driver.spawned()
    driver.hello()
    driver.progress(0.5)
    assert notices(driver, "loading") == [{"state": "LOADING", "phase": "weights", "fraction": 0.5}]
    assert notices(driver, "queued") == [], "only what has changed"
    driver.cancel("silent")
    assert notices(driver, "queued") == [{"position": 1, "reason": "load", "since_s": 0.0}]
    driver.ready()
    assert driver.sent(Notice) == [], "it no longer waits"
    row = PrefillProgress(key=RequestKey(2), done=16, total=64)
    driver.worker(Step(step=1, prefill=[row]))
    assert notices(driver, "prefilling") == [{"done": 16, "total": 64}]
    [shown] = driver.row()["rows"]
    assert (shown["read_tokens"], shown["prompt_tokens"]) == (16, None), "not accepted yet"


def test_who_did_not_ask_for_notices_gets_none() -> None:
    driver = Driver()
    driver.ask()
    driver.progress(0.5)
    assert driver.sent(Notice) == []


def test_an_overload_says_when_to_come_back_from_what_has_run_H3() -> None:
    driver = ready_driver()
    driver.ask("long")
    driver.compute(8.0, 1)
    driver.token(1, finish=FinishReason.STOP)
    for number in range(6):
        driver.ask(f"r{number}")
    [failed] = driver.sent(Failed)
    assert failed.error["detail"]["retry_after_s"] == pytest.approx(8.0)
