"""A log level that somebody changes reaches the daemon, the workers that serve, and later ones."""

from __future__ import annotations

from mlxsup.protocol.client_messages import Failed, Reply
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.log_level import ChangeLogLevel, LogLevel
from mlxsup.supervisor.core.actions import SendToWorker, SetLogLevel

from support.core_driver import Driver, entry


def change(driver: Driver, level: str) -> dict[str, str]:
    """Changes it; returns what each worker is sent."""
    driver.say(ChangeLogLevel(id=RequestId("c"), level=level))
    return told(driver)


def told(driver: Driver) -> dict[str, str]:
    sent = [one for one in driver.of(SendToWorker) if isinstance(one.message, LogLevel)]
    return {str(one.model): one.message.level for one in sent if isinstance(one.message, LogLevel)}


def test_those_that_serve_are_told_at_once_and_those_that_load_when_they_are_ready() -> None:
    driver = Driver([entry("serves"), entry("loads"), entry("rests")])
    driver.load("serves")
    driver.come_up("serves")
    assert told(driver) == {}, "as it was started"
    driver.load("loads")
    driver.spawned("loads")
    driver.hello("loads")
    assert change(driver, "debug") == {"serves": "debug"}
    assert [action.level for action in driver.of(SetLogLevel)] == ["debug"]
    assert [reply.value for reply in driver.sent(Reply)] == [{"level": "debug"}]
    driver.ready("loads")
    assert told(driver) == {"loads": "debug"}
    assert change(driver, "error") == {"serves": "error", "loads": "error"}


def test_a_worker_that_is_asked_to_end_before_it_is_ready_is_told_nothing() -> None:
    driver = Driver()
    driver.load()
    driver.spawned()
    driver.hello()
    change(driver, "debug")
    driver.unload()
    driver.ready()
    assert told(driver) == {}


def test_another_word_is_refused_and_changes_nothing() -> None:
    driver = Driver()
    assert change(driver, "loud") == {}
    [failed] = driver.sent(Failed)
    assert failed.error["code"] == "invalid_request"
    assert failed.error["message"] == ("level takes one of debug, info, warning, error, not 'loud'")
    assert failed.error["detail"] == {"parameter": "level"}
    assert driver.of(SetLogLevel) == []
