"""One line for each request that has ended: who, tokens, speed, outcome; nothing of its text."""

from __future__ import annotations

from typing import Any

from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import FinishReason
from mlxsup.protocol.worker_messages import Rejected
from mlxsup.supervisor.core.actions import RequestEnded

from support.core_driver import Driver


def up() -> Driver:
    driver = Driver()
    driver.load()
    driver.come_up()
    return driver


def reports(driver: Driver) -> list[tuple[str, str]]:
    """The request and the outcome of each line that the latest event led to."""
    return [(one.facts["id"], one.facts["outcome"]) for one in driver.of(RequestEnded)]


def report(driver: Driver) -> dict[str, Any]:
    [ended] = driver.of(RequestEnded)
    return ended.facts


def test_a_good_end_says_who_how_much_how_fast_and_what_it_cost() -> None:
    driver = up()
    driver.now += 1.0
    [key] = driver.serve("one", process="process 12@99")
    driver.compute(2.0, key)
    driver.compute(4.0, key)
    driver.token(key, finish=FinishReason.LENGTH)
    assert report(driver) == {
        "id": "one",
        "number": key,
        "model": "m",
        "client": "process 12@99",
        "outcome": "length",
        "prompt_tokens": 3,
        "cached_tokens": 0,
        "completion_tokens": 3,
        "queued_s": 0.0,
        "first_token_s": 2.0,
        "total_s": 6.0,
        "engine_s": 6.0,
        "tokens_per_s": 0.5,
    }


def test_the_speed_of_an_answer_that_took_less_than_a_second_is_said_too() -> None:
    driver = up()
    [key] = driver.serve("one")
    driver.compute(1.0, key)
    for _ in range(2):
        driver.compute(0.25, key)
    driver.token(key, finish=FinishReason.LENGTH)
    assert report(driver)["tokens_per_s"] == 6.0


def test_every_way_to_end_is_one_line_with_its_outcome() -> None:
    driver = up()
    one, _ = driver.serve("one", "two")
    driver.serve("waits", queue_timeout_s=5.0)
    driver.serve("unread")
    driver.cancel("two")
    assert reports(driver) == [("two", "cancelled")]
    rejection = RemoteError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "too long")
    driver.worker(Rejected(key=RequestKey(one), error=rejection.to_wire()))
    assert reports(driver) == [("one", "context_length_exceeded")]
    driver.leave()
    assert reports(driver) == [("waits", "gone"), ("unread", "gone")]
    driver = up()
    driver.serve("one", "two")
    driver.ask("waits", queue_timeout_s=5.0)
    driver.pass_time(5.0)
    assert reports(driver) == [("waits", "queue_timeout")]


def test_what_a_crash_interrupts_has_not_ended_and_says_later_that_it_was_resumed() -> None:
    driver = up()
    [key] = driver.serve("one")
    [other] = driver.serve("other", resume=False)
    for each in (key, other):
        driver.accept(each)
    driver.token(key, other)
    driver.exit()
    assert reports(driver) == [("other", "worker_crashed")]
    driver.come_up()
    driver.accept(key)
    driver.token(key, finish=FinishReason.STOP)
    assert (report(driver)["outcome"], report(driver)["resumed"]) == ("stop", 1)


def test_a_request_that_is_refused_when_it_comes_is_a_line_for_debugging_only() -> None:
    driver = up()
    driver.ask("one", model="nobody")
    [ended] = driver.of(RequestEnded)
    assert ended.is_refused
    assert ended.facts == {"id": "one", "model": "nobody", "outcome": "unknown_model"}
    [key] = driver.serve("two")
    driver.accept(key)
    driver.token(key, finish=FinishReason.STOP)
    assert not driver.of(RequestEnded)[0].is_refused
