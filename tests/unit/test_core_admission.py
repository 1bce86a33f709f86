"""Who is let in: one model's queue never shuts another model, nor one client all the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mlxsup.protocol.client_messages import Failed
from mlxsup.protocol.codec import encode
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.states import FinishReason, State
from mlxsup.supervisor.core.events import ConnectionId
from mlxsup.supervisor.core.health.blame import PROBATION_S, PROBATION_TOKENS
from mlxsup.supervisor.core.settings import CoreSettings

from support.core_driver import LAUNCH, RESTART, Driver, entry
from support.core_looks import ALICE, BOB
from support.core_states import in_state

LIMITS = CoreSettings(max_queue=8, max_queue_per_client=4)


def connection(number: int) -> ConnectionId:
    return ConnectionId(b"c%d" % number)


def refusal(driver: Driver, connection: ConnectionId = ALICE) -> dict[str, Any]:
    [failed] = driver.sent(Failed, connection)
    return failed.error


def fill(driver: Driver, model: str, count: int) -> None:
    """That many requests wait for a model, each from another connection."""
    for number in range(count):
        driver.ask("waits", model, connection(number))
        assert driver.errors(connection(number)) == {}


@pytest.fixture
def driver() -> Driver:
    """`slow` loads, with a full queue; `m` is READY with two rows."""
    driver = Driver([entry(), entry("slow")], LIMITS)
    driver.load()
    driver.come_up()
    driver.load("slow")
    driver.spawned("slow", 5)
    return driver


def test_a_request_that_can_start_at_once_is_not_refused_for_the_queue_of_another_H5(
    driver: Driver,
) -> None:
    fill(driver, "slow", LIMITS.max_queue)
    driver.ask("a")
    driver.ask("b")
    assert driver.row()["running"] == ["a", "b"]
    assert driver.errors() == {}


def test_nor_for_what_its_own_client_lets_wait_elsewhere(driver: Driver) -> None:
    for number in range(LIMITS.max_queue_per_client):
        driver.ask(f"r{number}", "slow")
    driver.ask("a")
    assert driver.row()["running"] == ["a"]
    driver.ask("too many", "slow")
    assert driver.errors() == {"too many": ErrorCode.OVERLOADED}


def test_a_full_queue_leaves_every_other_model_its_share_H5(driver: Driver) -> None:
    fill(driver, "slow", LIMITS.max_queue)
    driver.serve("a", "b")
    share = LIMITS.max_queue // 2
    for number in range(share):
        driver.ask(f"w{number}", connection=connection(number))
        assert driver.errors(connection(number)) == {}, "READY, all rows taken"
    driver.ask("more", connection=BOB)
    assert driver.errors(BOB) == {"more": ErrorCode.OVERLOADED}
    driver.ask("more", "slow", BOB)
    assert driver.errors(BOB) == {"more": ErrorCode.OVERLOADED}, "it has more than its share"


def test_a_model_that_is_stopped_has_its_share_too(driver: Driver) -> None:
    driver.unload()
    driver.exit(code=0)
    assert driver.state() is State.STOPPED
    fill(driver, "slow", LIMITS.max_queue)
    driver.ask()
    assert driver.errors() == {}
    assert driver.row()["queued"] == 1


def test_every_model_has_room_for_one_even_where_there_are_more_models_than_places() -> None:
    names = [f"m{number}" for number in range(5)]
    driver = Driver([entry(name) for name in names], replace(LIMITS, max_queue=2))
    fill(driver, "m0", 2)
    for name in names[1:]:
        driver.ask(name, name, connection(9))
    assert [driver.row(name)["queued"] for name in names] == [2, 1, 1, 1, 1]
    driver.ask("more", "m1", BOB)
    assert driver.errors(BOB) == {"more": ErrorCode.OVERLOADED}


def test_a_request_behind_others_of_its_model_may_not_start_before_them(driver: Driver) -> None:
    driver.serve("a", "b")
    fill(driver, "m", LIMITS.max_queue)
    driver.ask("more", connection=BOB)
    assert driver.errors(BOB) == {"more": ErrorCode.OVERLOADED}
    driver.cancel("a")
    driver.ask("more", connection=BOB)
    assert driver.errors(BOB) == {"more": ErrorCode.OVERLOADED}, "the row has not left yet"


def test_a_connection_is_bounded_whatever_names_its_clients_have_H5(driver: Driver) -> None:
    for number in range(LIMITS.max_queue_per_client):
        driver.ask(f"r{number}", "slow", client=f"name {number}")
    driver.ask("more", "slow", client="another name")
    error = refusal(driver)
    assert error["code"] == ErrorCode.OVERLOADED
    assert "4 requests of this client are waiting" in error["message"]
    driver.ask("b", "slow", BOB, client="name 0")
    assert driver.errors(BOB) == {}


def test_a_process_is_bounded_whatever_connections_it_has_H5(driver: Driver) -> None:
    for number in range(LIMITS.max_queue_per_client):
        driver.ask("r", "slow", connection(number), "process 7@1", client=f"name {number}")
    driver.ask("more", "slow", process="process 7@1")
    assert "4 requests of this client are waiting" in refusal(driver)["message"]
    driver.ask("mine", "slow", process="process 7@2")
    assert driver.errors() == {}, "another process with the same pid"


def test_the_place_of_a_connection_is_given_back(driver: Driver) -> None:
    for round_ in range(3):
        for number in range(LIMITS.max_queue_per_client):
            driver.ask(f"{round_}-{number}", "slow", client=f"name {number}")
            assert driver.errors() == {}
        if round_ == 1:
            driver.leave()
        else:
            for number in range(LIMITS.max_queue_per_client):
                driver.cancel(f"{round_}-{number}")


def test_bytes_bound_even_what_could_start_at_once() -> None:
    driver = Driver([entry()], replace(LIMITS, max_queue_bytes=10))
    driver.load()
    driver.come_up()
    driver.ask("a", body=b"123456")
    driver.ask("b", body=b"123456")
    assert refusal(driver)["detail"]["limit"] == "max_queue_bytes"
    driver.token(1, finish=FinishReason.STOP)
    driver.ask("b", body=b"123456")
    assert driver.errors() == {}


@pytest.mark.parametrize(
    ("limits", "limit"),
    [
        ({"max_queue": 1}, "max_queue"),
        ({"max_queue_per_client": 1}, "max_queue_per_client"),
        ({"max_queue_bytes": 4}, "max_queue_bytes"),
    ],
)
def test_an_overload_names_its_limit_and_has_its_numbers_H3(
    limits: dict[str, Any], limit: str
) -> None:
    launch = replace(LAUNCH, max_concurrency=1)
    driver = Driver([entry(launch=launch)], replace(LIMITS, **limits))
    driver.ask("waits")
    driver.ask("more")
    error = refusal(driver)
    assert f"({limit})" in error["message"]
    assert error["detail"] == {
        "model": "m",
        "limit": limit,
        "queue_depth": 1,
        "running": [],
        "retry_after_s": 1.0,
    }
    assert error["retryable"] is True


# ---------------------------------------------------------------- every refusal has its facts


def poisoned() -> Driver:
    """A driver whose request `b"body"` is quarantined."""
    restart = replace(RESTART, max_restarts=99)
    driver = Driver([entry(restart=restart)], LIMITS)
    driver.load()
    driver.come_up()
    driver.ask("first")
    for _ in range(3):
        driver.exit(signal="SIGSEGV")
        driver.pass_time(10.0)
        driver.come_up()
    assert driver.row()["quarantined"] == 1
    return driver


def shut() -> Driver:
    driver = in_state(State.READY)
    driver.signal()
    return driver


def wrong_limit(driver: Driver) -> None:
    driver.ask("r", queue_timeout_s=-1.0)


REFUSALS: dict[str, tuple[Callable[[], Driver], Callable[[Driver], object], dict[str, type]]] = {
    "invalid_request": (Driver, wrong_limit, {"parameter": str}),
    "unknown_model": (Driver, lambda d: d.ask("r", "x"), {"known": list, "close": list}),
    "model_failed": (
        lambda: in_state(State.FAILED), lambda d: d.ask("r"), {"model": str, "cause": str},
    ),
    "unloaded": (
        lambda: in_state(State.DRAINING), lambda d: d.ask("r"), {"model": str, "why": str},
    ),
    "quarantined": (
        poisoned, lambda d: d.ask("r"), {"model": str, "tokens_sent": int, "lifted_in_s": float},
    ),
    "shutting_down": (shut, lambda d: d.ask("r"), {}),
}  # fmt: skip


@pytest.mark.parametrize("code", REFUSALS)
def test_a_refusal_travels_with_its_facts_and_their_types(code: str) -> None:
    make, ask, types = REFUSALS[code]
    driver = make()
    ask(driver)
    [failed] = driver.sent(Failed)
    error = RemoteError.from_wire(failed.error)
    assert (failed.id, error.code) == ("r", code)
    assert {name: type(value) for name, value in error.detail.items()} == types
    assert encode(failed), "nothing that does not travel"
    assert driver.row()["queued"] == 0


def test_a_stop_with_a_wrong_limit_is_refused_with_its_name_and_stops_nothing() -> None:
    driver = in_state(State.READY)
    stop = driver.stop(timeout_s=-1.0)
    [failed] = driver.sent(Failed)
    assert (failed.id, failed.error["code"]) == (stop, "invalid_request")
    assert failed.error["detail"] == {"parameter": "timeout_s"}
    assert driver.state() is State.READY


def crashed_twice(*ids: str) -> Driver:
    """A READY model `m` with a suspect on its turn, the first of these, and an idle model `n`."""
    settings = CoreSettings(max_queue=9, max_queue_per_client=1)
    driver = Driver([entry("m"), entry("n")], settings)
    driver.load()
    driver.come_up()
    for key in driver.serve(*ids):
        driver.accept(key)
    for _ in range(2):
        driver.exit(signal="SIGSEGV")
        driver.pass_time(2.0)
        driver.come_up()
    assert driver.row()["alone"] == ids[0]
    return driver


def test_an_interrupted_answer_takes_no_place_in_the_queue() -> None:
    driver = crashed_twice("a", "b")
    assert driver.row()["queued"] == 1
    assert driver.core.status(driver.now)["queue"]["waiting"] == 0
    driver.ask("new")
    assert driver.errors() == {}
    driver.ask("newer")
    assert driver.errors() == {"newer": "overloaded"}


def test_what_waits_for_a_turn_to_end_is_held_to_the_queue_limits() -> None:
    driver = crashed_twice("a")
    driver.ask("elsewhere", "n")
    driver.ask("new")
    assert driver.errors() == {"new": "overloaded"}, "a row is free, and `a` runs alone"


def test_what_waits_for_a_turn_to_come_is_held_to_the_queue_limits() -> None:
    driver = crashed_twice("a", "b")
    driver.ask("new")
    for _ in range(PROBATION_TOKENS):
        driver.pass_time(PROBATION_S)
        driver.token(1)
    assert driver.row()["running"] == ["a", "new"]
    driver.row_left(1)
    driver.ask("elsewhere", "n")
    driver.ask("newer")
    assert driver.errors() == {"newer": "overloaded"}, "a row is free, and a turn is next"


def test_a_thousand_requests_of_one_client_delay_another_by_one_row_H6() -> None:
    driver = Driver([entry()], CoreSettings(max_queue=1024, max_queue_per_client=64))
    driver.load()
    driver.come_up()
    refused = 0
    for number in range(1000):
        driver.ask(f"r{number}")
        refused += len(driver.errors())
    rows = LAUNCH.max_concurrency
    assert refused == 1000 - rows - 64
    driver.compute(1.0, *range(1, rows + 1))
    driver.ask("mine", connection=BOB)
    assert driver.errors(BOB) == {}
    driver.compute(1.0, *range(1, rows + 1))
    driver.token(1, finish=FinishReason.STOP)
    assert "mine" in driver.row()["running"]
