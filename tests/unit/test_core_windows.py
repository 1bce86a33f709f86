"""For how long crashes and quarantines are held against a model and a request."""

from __future__ import annotations

from mlxsup.protocol.states import State

from support.core_driver import RESTART, Driver
from support.suspects import HOUR_S, crash, engine_of


def test_a_model_that_dies_just_after_each_stable_time_ends_as_failed_P9() -> None:
    """Being stable shortens the delay; the crashes still count, or it would restart for ever."""
    driver = Driver()
    driver.load()
    starts = 0
    while driver.state() is not State.FAILED and starts < 20:
        driver.come_up()
        starts += 1
        driver.pass_time(RESTART.stable_s + 1.0)
        driver.exit()
        assert driver.row()["retry_in_s"] is None, "each is the first since a stable time"
    assert starts == RESTART.max_restarts + 1
    assert driver.row()["cause"].startswith("crashed 4 times within 100 s")


def test_a_model_that_dies_seldom_is_restarted_for_ever_F2() -> None:
    driver = Driver()
    driver.load()
    driver.come_up()
    for _ in range(3 * RESTART.max_restarts):
        driver.pass_time(RESTART.window_s / RESTART.max_restarts + 1.0)
        driver.exit()
        assert driver.state() is State.LOADING
        driver.come_up()


def test_a_status_of_an_idle_model_shows_no_quarantine_that_is_over() -> None:
    driver = engine_of(1)
    driver.serve("poison")
    for _ in range(3):
        crash(driver)
    assert driver.row()["quarantined"] == 1
    driver.now += HOUR_S - 1.0
    assert driver.row()["quarantined"] == 1
    driver.now += 1.0
    assert driver.row()["quarantined"] == 0


def test_a_status_of_an_idle_model_shows_no_suspicion_that_is_over() -> None:
    driver = engine_of(2)
    driver.serve("a")
    crash(driver)
    driver.cancel("a")
    assert driver.row()["suspects"] == 1
    driver.now += HOUR_S
    assert driver.row()["suspects"] == 0
