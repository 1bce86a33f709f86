"""What the machine around the daemon learns in one look: whether it may sleep, above all."""

from __future__ import annotations

from mlxsup.protocol.download import Repository
from mlxsup.protocol.states import State
from mlxsup.supervisor.core.events import ShutdownAsked

from support.core_driver import Driver, entry


def is_busy(driver: Driver) -> bool:
    return driver.core.outline().is_busy


def test_a_load_is_work_and_a_model_that_waits_for_requests_is_none() -> None:
    driver = Driver()
    assert not is_busy(driver)
    driver.load()
    assert driver.core.outline().states == (("m", State.LOADING),)
    assert is_busy(driver)
    driver.come_up()
    assert driver.core.outline().states == (("m", State.READY),)
    assert not is_busy(driver)


def test_a_request_is_work_from_its_arrival_to_its_end_unless_somebody_has_paused_it() -> None:
    driver = Driver()
    driver.load()
    driver.come_up()
    driver.ask()
    assert is_busy(driver)
    driver.accept(1)
    driver.token(1)
    driver.pause()
    assert is_busy(driver)
    driver.row_left(1, tokens=1)
    assert not is_busy(driver)
    driver.resume()
    assert is_busy(driver)
    driver.cancel()
    assert not is_busy(driver)


def test_a_download_is_work() -> None:
    driver = Driver([entry(download=Repository("org/tiny"))])
    driver.load()
    assert driver.core.outline().states == (("m", State.PENDING),)
    assert is_busy(driver)


def test_it_says_that_the_daemon_ends() -> None:
    driver = Driver()
    assert not driver.core.outline().is_ending
    driver.do(ShutdownAsked(now=driver.now, is_immediate=False))
    assert driver.core.outline().is_ending
