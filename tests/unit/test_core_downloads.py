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
    Repository,
    SnapshotReport,
)
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.launch import ExitCode
from mlxsup.protocol.states import NoticeKind, State
from mlxsup.supervisor.core.actions import EndDownload, Spawn, StartDownload
from mlxsup.supervisor.core.events import DownloadSaid, Reloaded
from mlxsup.supervisor.core.settings import CoreSettings, ModelSettings

from support.core.driver import LAUNCH, RESTART, Driver, entry
from support.core.memory import GIB, MemoryDriver, limited, sized
from support.core.scripts import play

# Downloads

TINY = Repository("org/tiny")
OTHER = Repository("org/other", "v2")
FOLDER = "/cache/snapshots/1"
GATED = DownloadFailed(problem=DownloadProblem.GATED, message="org/tiny is gated", hint="accept")
CUT = DownloadFailed(problem=DownloadProblem.INTERNAL, message="it ended with SIGKILL")


def lacking(name: str = "m", repository: Repository = TINY, **changes: Any) -> ModelSettings:
    return entry(name, download=repository, **changes)


def starts(driver: Driver) -> list[tuple[int, str]]:
    return [(start.number, start.repository.repo) for start in driver.of(StartDownload)]


def ends(driver: Driver) -> list[int]:
    return [end.number for end in driver.of(EndDownload)]


def say(driver: Driver, report: SnapshotReport, number: int = 1) -> None:
    driver.do(DownloadSaid(now=driver.now, number=number, report=report))


def progress(done: int, total: int = 1000) -> DownloadProgress:
    return DownloadProgress(done_bytes=done, total_bytes=total)


def done(folder: str = FOLDER) -> DownloadDone:
    return DownloadDone(folder=folder, total_bytes=1000, fetched_bytes=1000)


def test_a_load_waits_for_the_download_and_spawns_with_its_folder() -> None:
    driver = Driver([lacking()])
    driver.load()
    assert starts(driver) == [(1, "org/tiny")]
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


def fetched(driver: Driver, number: int, folder: str = FOLDER) -> None:
    say(driver, done(folder), number)


def cut(driver: Driver, number: int) -> None:
    say(driver, CUT, number)


SHARED = {
    "two models of one repository share its download": (
        "load m; load n; starts -> returns=[]; load o; starts -> returns=[(2, org/other)];"
        " fetched 1 -> m=LOADING & n=PENDING & o=PENDING"
    ),
    "an unload ends it unless another model waits for it": (
        "load m; load n; unload m; ends -> returns=[]; unload n -> n=STOPPED;"
        " ends -> returns=[1]; load n; starts -> returns=[(2, org/tiny)]"
    ),
    "a report of one that has ended is dropped": (
        "load m; unload m; load m; fetched 1 /stale -> m=PENDING; fetched 2 -> m=LOADING"
    ),
    "who has its files lines up behind those that could load meanwhile": (
        "load n; load p; now 1; load q; now 1; fetched 1; up p -> n=PENDING & q=LOADING"
    ),
    "a shutdown ends it": "load m; signal; ends -> returns=[1]",
    "one that is interrupted is tried again while requests wait": (
        "ask; load; cut 1 -> BACKOFF & errors={c1: load_failed}; wait 0 -> PENDING;"
        " cut 2 -> queued=1 & cause='not downloaded: it ended with SIGKILL'; wait 1; fetched 3; up;"
        " -> restarts=0 & running=[r1]"
    ),
}
"""Models `m` and `n` of one repository, `o` of another; `p` and `q` lack nothing."""


@pytest.mark.parametrize("rule", SHARED)
def test_rule_of_downloads(rule: str) -> None:
    models = [lacking("m"), lacking("n"), lacking("o", OTHER), entry("p"), entry("q")]
    driver = Driver(models)
    play(driver, SHARED[rule], starts, ends, fetched, cut)


def test_a_model_that_joins_a_download_shows_how_far_it_is() -> None:
    driver = play(Driver([lacking("m"), lacking("n")]), "load m")
    say(driver, progress(500))
    driver.load("n")
    assert driver.row("n")["progress"]["fraction"] == 0.5
    say(driver, done())
    assert driver.row("n")["progress"]["phase"] == "waiting for turn"


def test_gated_repository_fails_the_model_and_its_waiters() -> None:
    driver = Driver([lacking()])
    driver.ask()
    load = driver.load()
    say(driver, GATED)
    assert driver.state() is State.FAILED
    assert driver.row()["cause"] == "not downloaded: org/tiny is gated; accept"
    for id in ("r1", load):
        failed = driver.failure_of(id)
        assert failed.error.code == ErrorCode.LOAD_FAILED
        assert not failed.error.retryable
    driver.restart()
    assert starts(driver) == [(2, "org/tiny")]
    say(driver, done(), number=2)
    assert driver.state() is State.LOADING


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
        assert starts(driver) == [(2, "org/other")]
        assert driver.row()["progress"]["fraction"] == 0.0
    else:
        assert driver.row()["progress"]["phase"] == "waiting for turn"
        driver.come_up("n")
        assert driver.state() is State.LOADING


def test_a_dry_run_of_a_model_that_lacks_files_does_not_say_that_it_fits() -> None:
    driver = MemoryDriver([lacking()], limited(4 * GIB))
    answer = driver.foresees("m")
    assert (answer["outcome"], answer["needed_bytes"], answer["evicts"]) == ("downloads", 0, [])
    assert "has missing files" in answer["reason"]


def test_waiters_are_notified_of_each_percent_of_a_download() -> None:
    driver = Driver([lacking()])
    driver.ask(notices=True)
    told = []
    for done_bytes in range(0, 1000, 4):
        say(driver, progress(done_bytes))
        told += [one for one in driver.sent(Notice) if one.kind is NoticeKind.LOADING]
    assert [int(one.detail["fraction"] * 100 + 1e-9) for one in told] == list(range(100))
    assert {one.detail["phase"] for one in told} == {"download"}
    assert driver.row()["progress"]["fraction"] == 0.992


def lost(**changes: Any) -> ModelSettings:
    """What was there when the configuration was read."""
    return entry("m", repo=TINY.repo, revision=TINY.revision, **changes)


def test_files_that_were_removed_since_the_start_are_downloaded_again() -> None:
    play(
        Driver([lost()]),
        "ask; spawned; exit code=66 -> PENDING & queued=1; starts -> returns=[(1, org/tiny)];"
        " fetched 1; up -> running=[r1] & restarts=0",
        starts,
        fetched,
    )


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
    assert not driver.failure_of(load).error.retryable


# Outages of the hub

AWAY = DownloadFailed(problem=DownloadProblem.NETWORK, message="the hub does not answer")
CAUSE = "waits for the network: the hub does not answer"


class Hub:
    """A model that a request waits for; its downloads all end as the test says."""

    def __init__(self, **asked: Any) -> None:
        self.driver = Driver([lacking(repo=TINY.repo, revision=TINY.revision)])
        self.driver.ask(notices=True, **asked)
        self.started = len(starts(self.driver))

    def say(self, report: SnapshotReport) -> None:
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


def test_a_download_that_succeeds_lets_the_pauses_of_the_next_outage_start_afresh(hub: Hub) -> None:
    """That comes with files that are lost: no person and no entry has forgiven anything."""
    driver = hub.driver
    for _ in range(4):
        hub.fail()
    hub.say(done())
    driver.spawned()
    driver.exit(code=ExitCode.MODEL_MISSING)
    hub.started += len(starts(driver))
    assert 0.5 <= hub.fail() <= 1.1


def test_a_model_whose_files_arrive_does_not_wait_for_memory() -> None:
    """Its entry has got a repository while it did."""
    models = (sized("a", 2 * GIB), sized("b", 2 * GIB))
    driver = MemoryDriver(models, limited(2 * GIB))
    driver.bring_up("a")
    driver.ask("r1", "a")
    driver.ask("r2", "b")
    assert driver.row("b")["memory_wait"] is not None
    entries = (models[0], replace(models[1], download=TINY))
    driver.do(Reloaded(now=driver.now, settings=driver.core.fleet.settings, models=entries))
    assert (starts(driver), driver.row("b")["memory_wait"]) == ([(1, "org/tiny")], None)


@pytest.mark.parametrize(
    ("limit_s", "state"), [(0.4, State.BACKOFF), (1.5, State.PENDING)], ids=["waits", "tries"]
)
def test_queue_timeout_names_the_outage(limit_s: float, state: State) -> None:
    hub = Hub(queue_timeout_s=limit_s)
    hub.say(AWAY)
    hub.driver.pass_time(limit_s)
    assert hub.driver.state() is state
    failed = hub.driver.failure_of("r1")
    assert failed.error.code == "queue_timeout"
    assert failed.error.message.endswith(f"and was not started: m {CAUSE}")


def test_a_model_that_is_downloaded_no_longer_names_the_outage() -> None:
    driver = Driver([lacking(), entry("other")], CoreSettings(parallel_loads=1))
    driver.load("other")
    driver.ask()
    say(driver, AWAY, 1)
    driver.pass_time(1.2)
    assert driver.row()["cause"] == CAUSE
    say(driver, done(), 2)
    assert (driver.state(), driver.row()["cause"]) == (State.PENDING, None)


def test_a_hub_that_asks_for_patience_is_asked_for_ever(hub: Hub) -> None:
    busy = DownloadFailed(
        problem=DownloadProblem.RATE_LIMITED, message="too many requests", retry_after_s=7.0
    )
    for _ in range(6):
        assert hub.fail(busy) == pytest.approx(7.0, abs=0.1)
    assert hub.driver.row()["cause"] == "waits for the hub: too many requests"


def test_damaged_data_is_for_a_person(hub: Hub) -> None:
    hub.say(DownloadFailed(problem=DownloadProblem.DAMAGED, message="w has the wrong checksum"))
    assert hub.driver.state() is State.FAILED
    assert hub.driver.row()["cause"] == "not downloaded: w has the wrong checksum"
