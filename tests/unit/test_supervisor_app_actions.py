"""What the core asks for reaches the part that does it, with everything it was asked with."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mlxsup.protocol.download import Repository
from mlxsup.protocol.flight import DaemonEnded
from mlxsup.protocol.gateway import Address
from mlxsup.protocol.ids import Generation, ModelName, RequestId
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.supervisor import app as app_module
from mlxsup.supervisor.announcements import Announcer
from mlxsup.supervisor.config.load import ConfigError
from mlxsup.supervisor.core.actions import (
    AdoptLaunch,
    AppraiseLaunch,
    BudgetChanged,
    CloseListener,
    EndDownload,
    EndSpare,
    ForgetModel,
    LogFault,
    LookAtFiles,
    NeedRaised,
    RequestEnded,
    SetLogLevel,
    StartDownload,
    StartGateway,
    StartSpare,
)
from mlxsup.supervisor.core.events import Appraised, Caller, ConnectionId, LaunchAppraised
from mlxsup.supervisor.core.memory.need import Need
from mlxsup.supervisor.core.outline import Outline
from mlxsup.supervisor.downloads import DownloadKeeper
from mlxsup.supervisor.gateway import GatewayKeeper
from mlxsup.supervisor.memory.estimator import Place

from support.needs import GIB, need
from support.played_app import Case, Log

M = ModelName("m")
FIRST = Generation(1)
LAUNCH = LaunchSettings(path="/m", engine="mlx")
NEED = need(GIB)
REPOSITORY = Repository("org/model")


class Called:
    """Notes what its parts are asked to do."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def by(self, name: str) -> Callable[..., None]:
        return lambda *given: self.calls.append((name, *given))


@pytest.fixture
def called() -> Called:
    return Called()


def test_spares_are_started_and_ended_by_their_numbers(
    monkeypatch: pytest.MonkeyPatch, called: Called
) -> None:
    case = Case(monkeypatch)
    case.spares.start = lambda number, tasks: called.calls.append(("start", number, bool(tasks)))
    case.spares.kill = called.by("kill")
    case.run(lambda: case.do(StartSpare(number=4), EndSpare(number=3)))
    assert called.calls == [("start", 4, True), ("kill", 3)]


def test_downloads_are_started_and_ended(monkeypatch: pytest.MonkeyPatch, called: Called) -> None:
    def carry_out(keeper: object, action: object, tasks: object) -> None:
        called.calls.append((action, tasks is not None))

    monkeypatch.setattr(DownloadKeeper, "carry_out", carry_out)
    case = Case(monkeypatch)
    actions = StartDownload(number=1, repository=REPOSITORY), EndDownload(number=1)
    case.run(lambda: case.do(*actions))
    assert called.calls == [(action, True) for action in actions]


def test_the_gateway_is_started_and_its_socket_closed(
    monkeypatch: pytest.MonkeyPatch, called: Called
) -> None:
    def start(keeper: object, action: object, tasks: object) -> None:
        called.calls.append((action, tasks is not None))

    monkeypatch.setattr(GatewayKeeper, "start", start)
    monkeypatch.setattr(GatewayKeeper, "close_listener", lambda keeper: called.by("close")())
    case = Case(monkeypatch)
    starts = StartGateway(number=1, address=Address(host="127.0.0.1", port=0))

    def body() -> None:
        case.do(starts, CloseListener())
        assert called.calls == [(starts, True), ("close",)]

    case.run(body)


def test_the_files_of_a_worker_are_looked_at_and_a_model_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, called: Called
) -> None:
    case = Case(monkeypatch)
    case.workers.look_at_files = lambda model, generation, tasks: called.calls.append(
        (model, generation, bool(tasks))
    )
    case.workers.forget = called.by("forget")
    case.run(lambda: case.do(LookAtFiles(model=M, generation=FIRST), ForgetModel(model=M)))
    assert called.calls == [(M, FIRST, True), ("forget", M)]


def test_a_launch_that_is_asked_for_is_appraised_and_the_core_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caller = Caller(connection=ConnectionId(b"c"), id=RequestId("r"))
    case = Case(monkeypatch)

    async def appraise(model: ModelName, launch: LaunchSettings) -> Need | None:
        return NEED if launch is LAUNCH else None

    async def body() -> None:
        case.loop.soon.clear()
        case.do(AppraiseLaunch(model=M, launch=LAUNCH, caller=caller))
        await case.turns()

    case.briefing.appraise = appraise
    case.run(body)
    answer = LaunchAppraised(now=100.0, model=M, launch=LAUNCH, caller=caller, need=NEED)
    assert case.core.events == [answer]


def test_what_changes_the_memory_reaches_the_briefing(
    monkeypatch: pytest.MonkeyPatch, called: Called
) -> None:
    case = Case(monkeypatch)
    for name in ("changed", "relaunched", "raised"):
        setattr(case.briefing, name, called.by(name))
    budget: Any = SimpleNamespace()
    case.briefing.needs = {M: NEED}
    case.run(
        lambda: case.do(
            BudgetChanged(budget=budget),
            AdoptLaunch(model=M, launch=LAUNCH, need=NEED),
            NeedRaised(model=M, launch=LAUNCH, raised_bytes=5),
        )
    )
    assert called.calls == [
        ("changed", budget),
        ("relaunched", M, LAUNCH, NEED),
        ("raised", LAUNCH, 5),
    ]
    assert case.core.events == [Appraised(now=100.0, needs={M: NEED})], "only a need is news"


def test_what_a_worker_measured_and_what_a_download_brought_is_planned_with(
    monkeypatch: pytest.MonkeyPatch, called: Called
) -> None:
    given: dict[str, tuple[Any, ...]] = {}

    def keeper(*arguments: Any) -> DownloadKeeper:
        given["downloads"] = arguments
        return DownloadKeeper(*arguments)

    monkeypatch.setattr(app_module, "DownloadKeeper", keeper)
    case = Case(monkeypatch)
    place = Place("/folder")

    async def found(repository: Repository, folder: str) -> None:
        called.by("found")(repository, folder)

    async def read_again(places: list[Place]) -> None:
        called.by("read again")(places)

    case.briefing.measured, case.briefing.found = called.by("measured"), found
    case.briefing.outdated = lambda launch, loaded: [place] if loaded == "other" else []
    case.briefing.read_again = read_again

    async def body() -> None:
        case.loop.soon.clear()
        case.briefing.needs = {M: NEED}
        case.learnt(LAUNCH, "same")
        await given["downloads"][1](REPOSITORY, "/cache/model")
        await case.turns()
        assert case.core.events == [Appraised(now=100.0, needs={M: NEED})] * 2
        case.learnt(LAUNCH, "other")
        await case.turns()

    case.run(body)
    assert called.calls == [
        ("measured", LAUNCH), ("found", REPOSITORY, "/cache/model"), ("measured", LAUNCH),
        ("read again", [place]),
    ]  # fmt: skip
    assert case.core.events == [Appraised(now=100.0, needs={M: NEED})] * 4


@pytest.mark.parametrize("is_broken", [False, True])
def test_only_a_bug_has_all_workers_killed(
    monkeypatch: pytest.MonkeyPatch, called: Called, is_broken: bool
) -> None:
    async def end() -> None:
        called.by("end")()

    case = Case(monkeypatch)
    case.workers.end = end

    def body() -> None:
        if is_broken:
            case.loop.complain(case.loop, {"exception": ValueError("v"), "handle": 1})

    assert case.run(body) == (70 if is_broken else 0)
    assert called.calls == ([("end",)] if is_broken else [])


def test_a_process_that_is_left_behind_makes_its_own_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(monkeypatch)
    case.workers.leave = lambda: 1
    assert case.run() == 71


def test_what_is_to_be_known_is_logged_at_its_level(monkeypatch: pytest.MonkeyPatch) -> None:
    case, levels = Case(monkeypatch), list[str]()
    monkeypatch.setattr(case.log, "change_level", levels.append)
    entry = DaemonEnded(code=0)
    case.do(
        SetLogLevel(level="debug"),
        entry,
        LogFault(model=M, story=("one", "two")),
        RequestEnded(is_refused=False, facts={"id": "r"}),
        RequestEnded(is_refused=True, facts={"id": "s"}),
    )
    assert levels == ["debug"]
    assert case.log.lines == [
        ("info", "log level changed", {"to": "debug"}),
        ("flight", entry),
        ("error", "no rule for an event", {"model": M}),
        ("one\ntwo",),
        ("info", "request ended", {"id": "r"}),
        ("debug", "request ended", {"id": "s"}),
    ]


def test_the_gateway_that_listens_is_told_to_whoever_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[dict[str, Any]] = []
    case = Case(monkeypatch, on_change=told.append)
    case.announcer.gateway_listens("http://127.0.0.1:1", 7)
    assert told == [{"gateway": "http://127.0.0.1:1", "pid": 7}]


def test_whoever_watches_the_daemon_hears_of_reloads_the_end_and_each_pulse(
    called: Called,
) -> None:
    names = ("reloading", "reloaded", "stopping", "pulse")
    manager: Any = SimpleNamespace(**{name: called.by(name) for name in names})
    sleep: Any = SimpleNamespace(pulse=called.by("sleep"))
    log = Log()
    announcer = Announcer(log, lambda change: None, manager, sleep)
    outline = Outline(states=(), is_busy=True, is_ending=False)
    announcer.reloads()
    announcer.reloaded(())
    announcer.reloaded(("log_dir", "gateway"))
    announcer.reload_refused(ConfigError(["one", "two"]))
    announcer.pulse(lambda: outline)
    announcer.finishes()
    assert called.calls == [
        ("reloading",), ("reloaded", 0), ("reloaded", 0), ("reloaded", 2),
        ("pulse", outline), ("sleep", outline), ("stopping",),
    ]  # fmt: skip
    assert log.lines == [
        ("info", "configuration reloaded", {"later": "-"}),
        ("info", "configuration reloaded", {"later": "log_dir,gateway"}),
        ("error", "reload refused", {"problems": 2}),
        ("one\ntwo",),
    ]


def test_an_action_that_nobody_knows_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch)
    unknown: Any = SimpleNamespace()

    def body() -> None:
        with pytest.raises(AssertionError):
            case.do(unknown)

    assert case.run(body) == 70
