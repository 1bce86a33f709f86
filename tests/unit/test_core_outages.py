"""A hub that cannot be reached, or asks for patience: the model waits, however long it takes."""

from __future__ import annotations

import pytest

from mlxsup.protocol.download import DownloadDone, DownloadFailed, DownloadProblem, Repository
from mlxsup.protocol.states import State
from mlxsup.supervisor.core.actions import StartDownload
from mlxsup.supervisor.core.events import DownloadSaid

from support.core_driver import RESTART, Driver, entry

TINY = Repository("org/tiny")
AWAY = DownloadFailed(problem=DownloadProblem.NETWORK, message="the hub does not answer")
BROKEN = DownloadFailed(problem=DownloadProblem.INTERNAL, message="it ended with SIGKILL")
CAUSE = "waits for the network: the hub does not answer"


class Hub:
    """A model whose downloads all end as the test says.

    Attributes:
        driver: the core.
        started: how many downloads it has had started.
    """

    def __init__(self) -> None:
        self.driver = Driver([entry(download=TINY)])
        self.started = 0

    def heed(self) -> None:
        self.started += sum(isinstance(one, StartDownload) for one in self.driver.actions)

    def say(self, report: DownloadFailed | DownloadDone) -> None:
        driver = self.driver
        driver.do(DownloadSaid(now=driver.now, number=self.started, report=report))

    def fail(self, report: DownloadFailed = AWAY) -> float:
        """The download that runs fails; returns after how long the next one starts."""
        self.say(report)
        before, since = self.started, self.driver.now
        assert self.driver.state() is State.BACKOFF
        while self.started == before:
            self.driver.pass_time(0.05)
            self.heed()
        return self.driver.now - since


@pytest.fixture
def hub() -> Hub:
    hub = Hub()
    hub.driver.ask()
    hub.heed()
    assert hub.started == 1
    return hub


def test_a_network_that_is_away_is_waited_for_with_growing_bounded_pauses(hub: Hub) -> None:
    pauses = [hub.fail() for _ in range(30)]
    assert 0.5 <= pauses[0] <= 1.1
    assert all(2.0 <= pause <= RESTART.backoff_max_s + 0.1 for pause in pauses[3:])
    assert hub.driver.state() is State.PENDING
    assert hub.driver.row()["queued"] == 1
    hub.say(DownloadDone(folder="/f", total_bytes=1, fetched_bytes=1))
    hub.driver.come_up()
    assert hub.driver.row()["running"] == ["r1"]
    assert hub.driver.row()["restarts"] == 0


def test_the_pauses_of_an_outage_do_not_count_as_crashes(hub: Hub) -> None:
    for _ in range(RESTART.max_restarts + 1):
        hub.fail()
    for _ in range(RESTART.max_restarts):
        hub.fail(BROKEN)
    hub.say(BROKEN)
    assert hub.driver.state() is State.FAILED
    cause = hub.driver.row()["cause"]
    assert cause.startswith("its download crashed 4 times within 100 s, the last time: not ")


def test_the_cause_is_shown_until_the_hub_answers(hub: Hub) -> None:
    hub.say(AWAY)
    assert hub.driver.row()["cause"] == CAUSE
    assert hub.driver.row()["retry_in_s"] > 0
    hub.driver.pass_time(1.0)
    assert hub.driver.state() is State.PENDING
    assert hub.driver.row()["cause"] == CAUSE
    assert hub.driver.row()["progress"]["phase"] == "download"


def test_a_load_tries_at_once_and_pauses_begin_anew(hub: Hub) -> None:
    for _ in range(6):
        hub.fail()
    hub.say(AWAY)
    waiting = hub.driver.load()
    hub.heed()
    assert hub.driver.state() is State.PENDING
    assert hub.started == 8
    assert hub.fail() <= 1.1
    failed = hub.driver.failure_of(waiting)
    assert failed.error["code"] == "load_failed"
    assert failed.error["retryable"]
    assert failed.error["message"] == f"m could not be loaded: it {CAUSE}"


@pytest.mark.parametrize(
    ("limit_s", "state"), [(0.4, State.BACKOFF), (1.5, State.PENDING)], ids=["waits", "tries"]
)
def test_a_request_ends_at_its_time_limit_and_says_what_was_missing(
    limit_s: float, state: State
) -> None:
    hub = Hub()
    hub.driver.ask(queue_timeout_s=limit_s)
    hub.heed()
    hub.say(AWAY)
    hub.driver.pass_time(limit_s)
    assert hub.driver.state() is state
    failed = hub.driver.failure_of("r1")
    assert failed.error["code"] == "queue_timeout"
    assert failed.error["message"].endswith(f"without being started: m {CAUSE}")


def test_a_hub_that_asks_for_patience_is_asked_for_ever(hub: Hub) -> None:
    busy = DownloadFailed(
        problem=DownloadProblem.RATE_LIMITED, message="too many requests", retry_after_s=7.0
    )
    for _ in range(20):
        assert hub.fail(busy) == pytest.approx(7.0, abs=0.1)
    assert hub.driver.row()["cause"] == "waits for the hub: too many requests"


def test_damaged_data_is_for_a_person(hub: Hub) -> None:
    hub.say(DownloadFailed(problem=DownloadProblem.DAMAGED, message="w has another digest"))
    assert hub.driver.state() is State.FAILED
    assert hub.driver.row()["cause"] == "not downloaded: w has another digest"
