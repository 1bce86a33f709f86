"""Test `keep_alive`."""

from __future__ import annotations

import pytest

from mlxsup.protocol.client_messages import Failed, Load
from mlxsup.protocol.download import DownloadDone, Repository
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.protocol.states import FinishReason, State
from mlxsup.supervisor.core.events import DownloadSaid

from support.core.driver import Driver, entry

CONFIGURED_S = 30.0


def up() -> Driver:
    driver = Driver([entry(idle_unload_s=CONFIGURED_S)])
    driver.load()
    driver.come_up()
    return driver


def answered(driver: Driver, keep_alive: float | None) -> Driver:
    """A request has come and has its whole answer."""
    [key] = driver.serve("r", keep_alive=keep_alive)
    driver.accept(key)
    driver.token(key, finish=FinishReason.STOP)
    return driver


def stays_s(driver: Driver, most_s: float = 100.0) -> float | None:
    """How long it stays READY from now on, in seconds; None: longer than that."""
    begin = driver.now
    while driver.now < begin + most_s:
        if driver.state() is not State.READY:
            return driver.now - begin
        driver.pass_time(1.0)
    return None


@pytest.mark.parametrize(
    ("keep_alive", "expected_s"), [(None, CONFIGURED_S), (0.0, 1.0), (5.0, 5.0), (-1.0, None)]
)
def test_the_latest_request_decides(keep_alive: float | None, expected_s: float | None) -> None:
    assert stays_s(answered(up(), keep_alive)) == expected_s


def test_zero_unloads_with_the_end_of_the_answer_and_not_before() -> None:
    driver = up()
    one, two = driver.serve("one", keep_alive=0.0) + driver.serve("two", keep_alive=0.0)
    for key in (one, two):
        driver.accept(key)
    driver.token(one, finish=FinishReason.STOP)
    driver.pass_time(100.0)
    assert driver.state() is State.READY, "the other one runs"
    driver.token(two, finish=FinishReason.STOP)
    driver.pass_time(0.0)
    assert driver.state() is not State.READY


@pytest.mark.parametrize(("keep_alive", "left_s"), [(None, 25.0), (9.0, 4.0), (-1.0, None)])
def test_status_says_when_an_idle_model_goes(
    keep_alive: float | None, left_s: float | None
) -> None:
    def said(driver: Driver) -> float | None:
        value: float | None = driver.core.status(driver.now)["models"][0]["unloads_in_s"]
        return value

    driver = up()
    [key] = driver.serve("r", keep_alive=keep_alive)
    driver.accept(key)
    driver.pass_time(50.0)
    assert said(driver) == (None if left_s is None else left_s + 5.0), "its time begins at the end"
    driver.token(key, finish=FinishReason.STOP)
    driver.pass_time(5.0)
    assert said(driver) == left_s
    assert said(Driver([entry(idle_unload_s=CONFIGURED_S)])) is None, "it is not loaded"


@pytest.mark.parametrize("before", [0.0, -1.0])
def test_the_next_request_that_says_nothing_brings_the_configured_time_back(before: float) -> None:
    driver = up()
    [key] = driver.serve("one", keep_alive=before)
    driver.accept(key)
    assert stays_s(answered(driver, None)) is None, "the first one runs"
    driver.token(key, finish=FinishReason.STOP)
    assert stays_s(driver) == CONFIGURED_S


def test_a_load_takes_keep_alive_and_refuses_zero() -> None:
    driver = up()
    name = ModelName("m")
    driver.pass_time(CONFIGURED_S - 1.0)
    driver.say(Load(id=RequestId("a"), model=name, keep_alive=5.0))
    assert stays_s(driver, 3.0) is None
    driver.say(Load(id=RequestId("b"), model=name, dry_run=True))
    assert stays_s(driver) == 2.0, "a dry run keeps nothing"
    driver.say(Load(id=RequestId("c"), model=name, keep_alive=7.0, context_length=-1))
    assert driver.errors() == {"c": "invalid_request"}
    assert driver.model().keep_alive_s == 5.0, "what is refused changes nothing"
    driver.say(Load(id=RequestId("b"), model=name, keep_alive=0.0))
    assert driver.errors() == {"b": "invalid_request"}


@pytest.mark.parametrize("idle_s", [CONFIGURED_S - 1.0, 3 * CONFIGURED_S])
def test_after_a_load_that_says_nothing_it_stays_as_configured_from_then_on(idle_s: float) -> None:
    driver = answered(up(), -1.0)
    driver.pass_time(idle_s)
    driver.say(Load(id=RequestId("a"), model=ModelName("m")))
    assert driver.state() is State.READY, "it was kept, and is wanted"
    assert stays_s(driver) == CONFIGURED_S


def test_keep_alive_outlives_a_crash_and_not_an_unload() -> None:
    driver = answered(up(), -1.0)
    driver.exit()
    driver.come_up()
    assert stays_s(driver) is None
    driver = answered(up(), 0.0)
    driver.pass_time(0.0)
    driver.exit(code=0)
    assert driver.state() is State.STOPPED
    driver.restart()
    driver.come_up()
    assert stays_s(driver) == CONFIGURED_S


def test_invalid_keep_alive_is_refused() -> None:
    driver = up()
    for value in (-2.0, float("inf"), float("nan")):
        driver.ask("wrong", keep_alive=value)
        [failed] = driver.sent(Failed)
        assert failed.error.code == "invalid_request"
        assert failed.error.detail == {"parameter": "keep_alive"}
    assert stays_s(driver) == CONFIGURED_S


def test_an_unload_ends_what_was_said_of_a_model_that_was_never_loaded() -> None:
    tiny = Repository("org/tiny")
    driver = Driver([entry(idle_unload_s=CONFIGURED_S, download=tiny)])
    driver.ask("r", keep_alive=0.0)
    driver.unload()
    assert driver.state() is State.STOPPED
    driver.restart()
    done = DownloadDone(folder="/m", total_bytes=1, fetched_bytes=1)
    driver.do(DownloadSaid(now=driver.now, number=2, report=done))
    driver.come_up()
    assert stays_s(driver) == CONFIGURED_S
