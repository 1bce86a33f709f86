"""Test models that lack files: downloads, outages, retries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxsup.protocol.client_messages import Notice
from mlxsup.protocol.download import (
    DownloadDone,
    DownloadFailed,
    DownloadProblem,
    DownloadProgress,
    DownloadReport,
    Repository,
)
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.launch import ExitCode
from mlxsup.protocol.states import NoticeKind, State
from mlxsup.supervisor.core.actions import EndDownload, Spawn, StartDownload
from mlxsup.supervisor.core.events import DownloadSaid, Reloaded
from mlxsup.supervisor.core.settings import CoreSettings, ModelSettings

from support.core.driver import LAUNCH, RESTART, Driver, entry
from support.core.memory import GIB, MemoryDriver, limited, sized

# Downloads

TINY = Repository("org/tiny")
OTHER = Repository("org/other", "v2")
FOLDER = "/cache/snapshots/1"
GATED = DownloadFailed(problem=DownloadProblem.GATED, message="org/tiny is gated", hint="accept")
CUT = DownloadFailed(problem=DownloadProblem.INTERNAL, message="it ended with SIGKILL")


def lacking(name: str = "m", repository: Repository = TINY, **changes: Any) -> ModelSettings:
    return entry(name, download=repository, **changes)


def starts(driver: Driver) -> list[tuple[int, Repository]]:
    return [(start.number, start.repository) for start in driver.of(StartDownload)]


def ends(driver: Driver) -> list[int]:
    return [end.number for end in driver.of(EndDownload)]


def say(driver: Driver, report: DownloadReport, number: int = 1) -> None:
    driver.do(DownloadSaid(now=driver.now, number=number, report=report))


def progress(done: int, total: int = 1000) -> DownloadProgress:
    return DownloadProgress(done_bytes=done, total_bytes=total)


def done(folder: str = FOLDER) -> DownloadDone:
    return DownloadDone(folder=folder, total_bytes=1000, fetched_bytes=1000)


def test_a_load_waits_for_the_download_and_spawns_with_its_folder() -> None:
    driver = Driver([lacking()])
    driver.load()
    assert starts(driver) == [(1, TINY)]
    assert driver.state() is State.PENDING
    say(driver, progress(410))
    assert driver.row()["progress"] == {
        "phase": "download",
        "fraction": 0.41,
        "done_bytes": 410,
        "total_bytes": 1000,
    }
    say(driver, done())
    [spawn] = driver.of(Spawn)
    assert spawn.launch == replace(LAUNCH, path=FOLDER)
    assert driver.state() is State.LOADING
    driver.come_up()
    assert driver.state() is State.READY


def test_two_models_of_one_repository_share_its_download() -> None:
    driver = Driver([lacking("m"), lacking("n"), lacking("o", OTHER)])
    driver.load("m")
    say(driver, progress(500))
    driver.load("n")
    assert starts(driver) == []
    assert driver.row("n")["progress"]["fraction"] == 0.5
    driver.load("o")
    assert starts(driver) == [(2, OTHER)]
    say(driver, done())
    assert {driver.state("m"), driver.state("n")} == {State.LOADING, State.PENDING}
    assert driver.row("n")["progress"]["phase"] == "waiting for turn"


def test_an_unload_ends_the_download_unless_another_model_waits_for_it() -> None:
    driver = Driver([lacking("m"), lacking("n")])
    driver.load("m")
    driver.load("n")
    driver.unload("m")
    assert ends(driver) == []
    driver.unload("n")
    assert ends(driver) == [1]
    assert driver.state("n") is State.STOPPED
    driver.load("n")
    assert starts(driver) == [(2, TINY)]
    say(driver, done("/stale"), number=1)
    assert driver.state("n") is State.PENDING
    say(driver, done(), number=2)
    [spawn] = driver.of(Spawn)
    assert spawn.launch.path == FOLDER
    driver = Driver([lacking()])
    driver.load()
    driver.signal()
    assert ends(driver) == [1], "a shutdown ends it as well"


def test_gated_repository_fails_the_model_and_its_waiters() -> None:
    driver = Driver([lacking()])
    driver.ask()
    load = driver.load()
    say(driver, GATED)
    assert driver.state() is State.FAILED
    assert driver.row()["cause"] == "not downloaded: org/tiny is gated; accept"
    for id in ("r1", load):
        failed = driver.failure_of(id)
        assert failed.error["code"] == ErrorCode.LOAD_FAILED
        assert not failed.error["retryable"]
    driver.restart()
    assert starts(driver) == [(2, TINY)]
    say(driver, done(), number=2)
    assert driver.state() is State.LOADING


def test_interrupted_download_is_retried_while_requests_wait() -> None:
    driver = Driver([lacking()])
    driver.ask()
    load = driver.load()
    say(driver, CUT)
    assert driver.state() is State.BACKOFF
    assert driver.failure_of(load).error["retryable"]
    driver.pass_time(0.0)  # the first time at once
    assert driver.state() is State.PENDING
    say(driver, CUT, number=2)
    assert driver.row()["cause"] == "not downloaded: it ended with SIGKILL"
    assert 0 < driver.row()["retry_in_s"] <= 1.0
    assert driver.row()["queued"] == 1
    driver.pass_time(1.0)
    say(driver, done(), number=3)
    driver.come_up()
    assert driver.row()["restarts"] == 0
    assert driver.row()["running"] == ["r1"]


@pytest.mark.parametrize("is_repository", [True, False])
def test_a_reload_to_another_source_ends_the_download(is_repository: bool) -> None:
    driver = Driver([lacking(), entry("n")])
    driver.load()
    driver.load("n")
    say(driver, progress(100))
    new = lacking(repository=OTHER) if is_repository else entry()
    models = (new, entry("n"))
    driver.do(Reloaded(now=driver.now, settings=CoreSettings(), models=models))
    assert ends(driver) == [1]
    if is_repository:
        assert starts(driver) == [(2, OTHER)]
        assert driver.row()["progress"]["fraction"] == 0.0
    else:
        assert driver.row()["progress"]["phase"] == "waiting for turn"
        driver.come_up("n")
        assert driver.state() is State.LOADING


def test_a_dry_run_of_a_model_that_lacks_files_does_not_say_that_it_fits() -> None:
    driver = MemoryDriver([lacking()], limited(4 * GIB))
    answer = driver.foresees("m")
    assert (answer["outcome"], answer["needed_bytes"], answer["evicts"]) == ("downloads", 0, [])
    assert "lacks files" in answer["reason"]


def test_waiters_are_notified_of_each_percent_of_a_download() -> None:
    driver = Driver([lacking()])
    driver.ask(notices=True)
    told = []
    for done_bytes in range(1000):
        say(driver, progress(done_bytes))
        told += [one for one in driver.sent(Notice) if one.kind is NoticeKind.LOADING]
    assert [int(one.detail["fraction"] * 100 + 1e-9) for one in told] == list(range(100))
    assert {one.detail["phase"] for one in told} == {"download"}
    assert driver.row()["progress"]["fraction"] == 0.99


def lost(**changes: Any) -> ModelSettings:
    """What was there when the configuration was read."""
    return entry("m", repo=TINY.repo, revision=TINY.revision, **changes)


def test_files_that_were_removed_since_the_start_are_downloaded_again() -> None:
    driver = Driver([lost()])
    driver.ask()
    driver.spawned()
    driver.exit(code=ExitCode.MODEL_MISSING)
    assert driver.state() is State.PENDING
    assert starts(driver) == [(1, TINY)]
    assert driver.row()["queued"] == 1
    say(driver, done())
    driver.come_up()
    assert driver.row()["running"] == ["r1"]
    assert driver.row()["restarts"] == 0


def test_model_that_lost_its_files_reserves_no_memory() -> None:
    settings = limited(4 * GIB)
    entries = [
        sized("a", 3 * GIB, repo=TINY.repo, revision=TINY.revision),
        sized("b", 3 * GIB),
    ]
    driver = Driver(entries, settings)
    driver.load("a")
    driver.spawned("a")
    driver.exit("a", code=ExitCode.MODEL_MISSING)
    assert driver.row("a")["reserved_bytes"] == 0
    driver.load("b")
    assert driver.state("b") is State.LOADING


@pytest.mark.parametrize("is_repository", [True, False])
def test_files_that_are_missing_are_downloaded_once_and_only_of_a_repository(
    is_repository: bool,
) -> None:
    driver = Driver([lost() if is_repository else entry()])
    load = driver.load()
    driver.spawned()
    driver.exit(code=ExitCode.MODEL_MISSING)
    if is_repository:
        say(driver, done())
        driver.spawned()
        driver.exit(code=ExitCode.MODEL_MISSING)
    assert (driver.state(), starts(driver)) == (State.FAILED, [])
    assert not driver.failure_of(load).error["retryable"]


# Outages of the hub

AWAY = DownloadFailed(problem=DownloadProblem.NETWORK, message="the hub does not answer")
CAUSE = "waits for the network: the hub does not answer"


class Hub:
    """A model that a request waits for; its downloads all end as the test says."""

    def __init__(self, **asked: Any) -> None:
        self.driver = Driver([lacking()])
        self.driver.ask(notices=True, **asked)
        self.started = len(starts(self.driver))

    def say(self, report: DownloadReport) -> None:
        say(self.driver, report, self.started)

    def fail(self, report: DownloadFailed = AWAY) -> float:
        """The download that runs fails; returns after how long the next one starts."""
        self.say(report)
        before, since = self.started, self.driver.now
        assert self.driver.state() is State.BACKOFF
        while self.started == before:
            self.driver.pass_time(0.05)
            self.started += len(starts(self.driver))
        return self.driver.now - since


@pytest.fixture
def hub() -> Hub:
    return Hub()


def test_a_network_that_is_away_is_waited_for_with_growing_bounded_pauses(hub: Hub) -> None:
    hub.say(AWAY)
    told = [one for one in hub.driver.sent(Notice) if one.kind is NoticeKind.QUEUED]
    assert [one.detail["reason"] for one in told] == ["download"]
    hub = Hub()
    pauses = [hub.fail() for _ in range(12)]
    assert 0.5 <= pauses[0] <= 1.1
    assert all(2.0 <= pause <= RESTART.backoff_max_s + 0.1 for pause in pauses[3:])
    assert hub.driver.state() is State.PENDING
    assert hub.driver.row()["queued"] == 1
    hub.say(done())
    hub.driver.come_up()
    assert hub.driver.row()["running"] == ["r1"]
    assert hub.driver.row()["restarts"] == 0


def test_the_pauses_of_an_outage_do_not_count_as_crashes(hub: Hub) -> None:
    for _ in range(RESTART.max_restarts + 1):
        hub.fail()
    for _ in range(RESTART.max_restarts):
        hub.fail(CUT)
    hub.say(CUT)
    assert hub.driver.state() is State.FAILED
    cause = hub.driver.row()["cause"]
    assert cause.startswith("its download crashed 4 times within 100 s, the last time: not ")


@pytest.mark.parametrize(
    ("limit_s", "state"), [(0.4, State.BACKOFF), (1.5, State.PENDING)], ids=["waits", "tries"]
)
def test_queue_timeout_names_the_outage(limit_s: float, state: State) -> None:
    hub = Hub(queue_timeout_s=limit_s)
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
    for _ in range(6):
        assert hub.fail(busy) == pytest.approx(7.0, abs=0.1)
    assert hub.driver.row()["cause"] == "waits for the hub: too many requests"


def test_damaged_data_is_for_a_person(hub: Hub) -> None:
    hub.say(DownloadFailed(problem=DownloadProblem.DAMAGED, message="w has another digest"))
    assert hub.driver.state() is State.FAILED
    assert hub.driver.row()["cause"] == "not downloaded: w has another digest"
