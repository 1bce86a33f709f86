"""Any order of commands, requests, reloads, crashes and reports: who waits, and only who waits, has
its files downloaded, and nothing is spawned without them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlxsup.protocol.download import (
    DownloadDone,
    DownloadFailed,
    DownloadProblem,
    DownloadProgress,
    DownloadReport,
    Repository,
)
from mlxsup.protocol.states import State
from mlxsup.supervisor.core.actions import EndDownload, Spawn, StartDownload
from mlxsup.supervisor.core.events import DownloadSaid, Reloaded
from mlxsup.supervisor.core.settings import CoreSettings, ModelSettings

from support.core_driver import LAUNCH, Driver, entry

TINY = Repository("org/tiny")
OTHER = Repository("org/other", "v2")
NAMES = ("a", "b", "c", "d")
FIRST: dict[str, Repository | None] = {"a": TINY, "b": TINY, "c": OTHER, "d": None}
PROBLEMS = (DownloadProblem.GATED, DownloadProblem.NETWORK)
SETTINGS = CoreSettings(parallel_loads=2, max_queue=50, max_queue_per_client=50)

names = st.sampled_from(NAMES)
sources = st.sampled_from([TINY, OTHER, None])


class Downloading(RuleBasedStateMachine):
    """A core, and what a user would expect of it.

    `_lacks` is what each model has to get before it can load, by the configuration and by the
    downloads that were complete; `_running` what the core has had started and not ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lacks = dict(FIRST)
        self._running: dict[int, Repository] = {}
        self._places: dict[str, str] = dict.fromkeys(NAMES, "/m")
        self._started: Counter[int] = Counter()
        self._asked = 0
        self._driver = Driver([self._entry(name) for name in NAMES], SETTINGS)
        self._heed()

    def _entry(self, name: str) -> ModelSettings:
        launch = replace(LAUNCH, path=self._places[name])
        return entry(name, download=self._lacks[name], launch=launch)

    def _heed(self) -> None:
        """Does what the shell would, and checks each action against what is known."""
        for action in self._driver.actions:
            if isinstance(action, StartDownload):
                assert action.repository not in self._running.values(), "two at the same time"
                assert not self._started[action.number], "a number is used twice"
                self._started[action.number] += 1
                self._running[action.number] = action.repository
            elif isinstance(action, EndDownload):
                del self._running[action.number]
            elif isinstance(action, Spawn):
                assert self._lacks[action.model] is None, "it has no files"
                assert action.launch.path == self._places[action.model]

    def _say(self, number: int, report: DownloadReport) -> None:
        self._driver.do(DownloadSaid(now=self._driver.now, number=number, report=report))
        self._heed()

    def _waiting_for(self, repository: Repository) -> list[str]:
        return [
            name
            for name in NAMES
            if self._lacks[name] == repository and self._driver.state(name) is State.PENDING
        ]

    # ------------------------------------------------------------ what people do

    @rule(name=names)
    def load(self, name: str) -> None:
        self._driver.load(name)
        self._heed()

    @rule(name=names)
    def unload(self, name: str) -> None:
        self._driver.unload(name)
        self._heed()

    @rule(name=names)
    def restart(self, name: str) -> None:
        self._driver.restart(name, now=True)
        self._heed()

    @rule(name=names)
    def ask(self, name: str) -> None:
        self._asked += 1
        self._driver.ask(f"r{self._asked}", name)
        self._heed()

    @rule(name=names, source=sources)
    def reload(self, name: str, source: Repository | None) -> None:
        if source != self._lacks[name]:
            self._places[name] = "/m"
        self._lacks[name] = source
        models = tuple(self._entry(one) for one in NAMES)
        self._driver.do(Reloaded(now=self._driver.now, settings=SETTINGS, models=models))
        self._heed()

    # ------------------------------------------------------------ what processes do

    @precondition(lambda self: self._running)
    @rule(data=st.data(), done=st.integers(0, 100), is_waiting=st.booleans())
    def progress(self, data: st.DataObject, done: int, is_waiting: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self._running)))
        report = DownloadProgress(done_bytes=done, total_bytes=100, is_waiting=is_waiting)
        self._say(number, report)

    @precondition(lambda self: self._running)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self._running)))
        repository, folder = self._running.pop(number), f"/got/{number}"
        for name in self._waiting_for(repository):
            self._lacks[name], self._places[name] = None, folder
        self._say(number, DownloadDone(folder=folder, total_bytes=1, fetched_bytes=1))

    @precondition(lambda self: self._running)
    @rule(data=st.data(), problem=st.sampled_from(PROBLEMS))
    def fail(self, data: st.DataObject, problem: DownloadProblem) -> None:
        number = data.draw(st.sampled_from(sorted(self._running)))
        waiting = self._waiting_for(self._running.pop(number))
        self._say(number, DownloadFailed(problem=problem, message="no"))
        for name in waiting:
            state = self._driver.state(name)
            is_outage = problem is DownloadProblem.NETWORK
            assert state is (State.BACKOFF if is_outage else State.FAILED), state

    @rule(number=st.integers(1, 20), folder=st.sampled_from(["/late"]))
    def late(self, number: int, folder: str) -> None:
        """A download that was ended, or never was, reports."""
        if number not in self._running:
            self._say(number, DownloadDone(folder=folder, total_bytes=1, fetched_bytes=1))

    @rule(name=names)
    def come_up(self, name: str) -> None:
        if self._driver.state(name) is State.LOADING:
            self._driver.come_up(name)
            self._heed()

    @rule(name=names)
    def crash(self, name: str) -> None:
        if self._driver.state(name) in (State.READY, State.STOPPING, State.DRAINING):
            self._driver.exit(name, code=1)
            self._heed()

    @rule(seconds=st.sampled_from([0.0, 0.5, 5.0]))
    def pass_time(self, seconds: float) -> None:
        self._driver.pass_time(seconds)
        self._heed()

    # ------------------------------------------------------------ what must be true

    @invariant()
    def exactly_what_somebody_waits_for_is_downloaded(self) -> None:
        wanted = {
            lacked
            for name, lacked in self._lacks.items()
            if lacked is not None and self._driver.state(name) is State.PENDING
        }
        assert set(self._running.values()) == wanted

    @invariant()
    def who_waits_for_files_says_so_and_nobody_else(self) -> None:
        for name, lacked in self._lacks.items():
            if self._driver.state(name) is State.PENDING:
                phase = self._driver.row(name)["progress"]["phase"]
                assert ("download" in phase) == (lacked is not None), phase


Downloading.TestCase.settings = settings(
    max_examples=50,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestDownloading = Downloading.TestCase
