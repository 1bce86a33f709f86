"""The supervisor's shell by itself: what it does, what it logs, and when it wakes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
import zmq

from mlxsup.protocol.download import Repository
from mlxsup.protocol.flight import DaemonEnded, RequestEnded
from mlxsup.protocol.gateway import Address
from mlxsup.protocol.ids import Generation, ModelName, RequestId
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.version import VERSION
from mlxsup.supervisor import app as app_module
from mlxsup.supervisor.announcements import Announcer, facts_of
from mlxsup.supervisor.config.load import ConfigError
from mlxsup.supervisor.core.actions import (
    AdoptLaunch,
    Announce,
    AppraiseLaunch,
    BudgetChanged,
    CloseListener,
    EndDownload,
    EndSpare,
    ForgetModel,
    LogFault,
    LookAtFiles,
    NeedRaised,
    ReadConfiguration,
    RequestRefused,
    SetLogLevel,
    StartDownload,
    StartGateway,
    StartSpare,
    WakeAt,
)
from mlxsup.supervisor.core.events import (
    Appraised,
    Caller,
    ConnectionId,
    LaunchAppraised,
    ReloadRefused,
    Sampled,
    ShutdownAsked,
    Started,
    Tick,
)
from mlxsup.supervisor.core.memory.need import Need
from mlxsup.supervisor.core.outline import Outline
from mlxsup.supervisor.downloads import DownloadKeeper
from mlxsup.supervisor.gateway import GatewayKeeper
from mlxsup.supervisor.memory.folder_reader import Place
from mlxsup.supervisor.sockets.transport import LoopSocket

from support.core.needs import GIB, need
from support.daemon.played_app import READING, Case, Log
from support.eventually_async import eventually_async

BUG = ("error", "internal error: the daemon ends")
MEASURED = ([7], "written")


def change(**fields: object) -> dict[str, Any]:
    return {
        "model": "a", "from": "LOADING", "to": "READY", "generation": 1, "why": "w",
        "note": "", "batching": None, "warnings": [], "load_phases_s": None, "secret": 1,
    } | fields  # fmt: skip


def test_a_change_is_logged_with_its_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, Any]] = []
    case = Case(monkeypatch, on_change=shown.append)
    phases = {"spawn": 0.5, "import": 2.0}
    continuous, single = {"mode": "continuous", "reason": ""}, {"mode": "single", "reason": "r"}
    changes = [
        change(note="n", generation=None),
        change(**{"from": "READY"}),
        change(batching=continuous, warnings=["one", "two"], load_phases_s=phases),
        change(batching=single, load_phases_s={}),
    ]
    for one in changes:
        case.do(Announce(change=one))
    facts = {"model": "a", "from": "LOADING", "to": "READY", "generation": 1, "why": "w"}
    noted = {"model": "a", "from": "LOADING", "to": "READY", "why": "w", "note": "n"}
    quick = {"model": "a", "batching": "continuous", "spawn_s": 0.5, "import_s": 2.0}
    assert case.log.lines == [
        ("info", "model state", noted),
        ("debug", "model state", facts | {"from": "READY"}),
        ("info", "model state", facts),
        ("info", "model ready", quick),
        ("warning", "model warning", {"model": "a", "warning": "one"}),
        ("warning", "model warning", {"model": "a", "warning": "two"}),
        ("info", "model state", facts),
        ("info", "model ready", {"model": "a", "batching": "single", "reason": "r"}),
    ]
    assert shown == changes


def test_a_reader_that_is_gone_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    case = Case(monkeypatch, on_change=gone)
    for _ in range(2):
        case.do(Announce(change=change()))
    warnings = [line for line in case.log.lines if line[0] == "warning"]
    assert warnings == [("warning", "status output disabled", {"error": "Broken pipe"})]


def test_loop_complaints_are_logged_and_a_failed_callback_is_a_bug(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(monkeypatch)
    error = ValueError("v")

    def body() -> None:
        case.log.lines.clear()
        for context in (
            {"message": "m"},
            {"message": "m", "exception": error},
            {"message": "m", "exception": KeyboardInterrupt(), "handle": 1},
        ):
            case.loop.complain(case.loop, context)
        assert [line[:2] for line in case.log.lines] == [("error", "event loop")] * 3
        assert case.log.lines[0][2] == {"complaint": "m", "error": None}
        assert case.log.lines[1][2] == {"complaint": "m", "error": error}
        case.loop.complain(case.loop, {"message": "m", "exception": error, "handle": 1})
        assert case.log.lines[3] == (*BUG, {"error": "ValueError"})

    assert case.run(body) == 70


def test_a_bug_is_reported_once_with_the_stories_of_all_models(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_twice(_: object) -> None:
        case.app.dispatch(Tick(now=2.0))
        case.log.lines.clear()
        for _ in range(2):
            context = {"message": "m", "exception": ValueError("v"), "handle": 1}
            case.loop.complain(case.loop, context)
        case.app.dispatch(Tick(now=3.0))

    case = Case(monkeypatch, on_change=break_twice)
    assert case.run(lambda: case.do(Announce(change=change()))) == 70
    assert case.log.lines == [
        (*BUG, {"error": "ValueError"}),
        ("ValueError: v\n",),
        ("story of a:\none\ntwo",),
        ("story of b:",),
    ]
    assert case.core.events == [], "what waited and what came are no longer handled"
    assert capsys.readouterr().err == (
        "mlxsup: internal error, the daemon ends; see mlxsup.log in the log folder\n"
    )


def test_it_wakes_at_the_earliest_time_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch)
    later = case.loop.later

    def body() -> None:
        events = case.core.events
        for when in (110.0, 110.0, 120.0, 105.0):
            case.do(WakeAt(when=when))
        assert [delay_s for delay_s, _ in later] == [10.0, 5.0]
        assert case.loop.cancelled == [10.0]
        case.now = 104.5
        later[-1][1]()  # the clock stood still meanwhile
        assert later[-1][0] == 0.5
        assert events == []
        case.now = 105.0
        later[-1][1]()
        assert events == [Tick(now=105.0)]
        case.do(WakeAt(when=200.0))
        assert later[-1][0] == 95.0

    assert case.run(body) == 0


def test_a_reload_without_a_file_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(monkeypatch)
    problem = "the daemon was started without a file: there is none to read"
    caller = Caller(connection=ConnectionId(b"c"), id=RequestId("r"))

    async def body() -> None:
        case.loop.soon.clear()
        case.log.lines.clear()
        case.reload()
        case.do(ReadConfiguration(caller=caller))
        await case.turns()

    case.run(body)
    assert case.log.lines == [("error", "reload refused", {"problems": 1}), (problem,)]
    assert case.core.events == [ReloadRefused(now=100.0, problems=(problem,), caller=caller)]


def test_clients_are_informed_each_second_and_the_clock_each_half(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(monkeypatch)
    case.sleeps.ends = {0.5: 5}

    def body() -> None:
        assert case.sleeps.waits_s.count(0.5) == 6
        assert case.looks == 5 + 1, "and once for what was measured"
        for pulse in ((case.clients.pulse,), (case.announcer.pulse, case.core.outline)):
            assert [one for one in case.loop.soon if one == pulse] == [pulse] * 3

    case.run(body)


def test_the_pulse_lasts_until_everything_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare workers, downloads and the gateway may take longer than a watchdog waits."""
    case, ticks, waited = Case(monkeypatch), asyncio.Queue[None](), list[str]()
    is_first = True

    async def sleep(wait_s: float) -> None:
        nonlocal is_first
        if wait_s != 0.5:
            await asyncio.Event().wait()
        if not is_first:
            ticks.task_done()
        is_first = False
        await ticks.get()

    def slow(name: str) -> Callable[..., Awaitable[None]]:
        async def end(*keeper: object) -> None:
            for _ in range(2):
                ticks.put_nowait(None)
            async with asyncio.timeout(10.0):
                await ticks.join()
            waited.append(name)

        return end

    monkeypatch.setattr(asyncio, "sleep", sleep)
    parts: dict[str, object] = {
        "spares": case.spares, "downloads": DownloadKeeper, "gateway": GatewayKeeper,
    }  # fmt: skip
    for name, part in parts.items():
        monkeypatch.setattr(part, "end", slow(name))
    case.run()
    assert waited == ["spares", "downloads", "gateway"]
    announced = (case.announcer.pulse, case.core.outline)
    assert [one for one in case.loop.soon if one == announced] == [announced] * 3


def test_processes_are_measured_each_second(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch)
    case.sleeps.ends = {1.0: 1}
    case.run()
    sampled = Sampled(now=100.0, footprint_bytes={7: 70}, machine_bytes=99, reading=READING)
    assert case.loop.soon[1:] == [(case.app.dispatch, sampled)] * 2
    assert case.sleeps.waits_s.count(1.0) == 2
    assert case.sampled == [*MEASURED, *MEASURED, "closed"]
    reported = ("warning", "memory not measured", {"error": "Too many open files"})
    assert case.log.lines[1:] == [reported]


@pytest.mark.parametrize(
    ("size_bytes", "in_turn"), [(10, 128), (2**19, 2), (2**20 - 1, 2), (2**20, 1)]
)
def test_a_socket_has_its_turn_and_no_more(size_bytes: int, in_turn: int) -> None:
    taken: list[int] = []

    async def body() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
            pull.setsockopt(zmq.RCVHWM, 0)
            pull.bind("inproc://turns")
            push.connect("inproc://turns")
            loop = LoopSocket(pull, lambda frames: taken.append(len(frames[-1])))
            count = in_turn + 1
            for _ in range(count):
                push.send_multipart([b"head", b"x" * size_bytes])
            await asyncio.sleep(0)
            assert len(taken) == in_turn
            await eventually_async(lambda: len(taken) == count)  # without being asked again
            assert taken == [size_bytes] * count
            loop.close()
        context.term()

    asyncio.run(body())


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


def test_each_action_reaches_the_part_that_carries_it_out(
    monkeypatch: pytest.MonkeyPatch, called: Called
) -> None:
    monkeypatch.setattr(DownloadKeeper, "carry_out", called.by("download"))
    monkeypatch.setattr(GatewayKeeper, "start", called.by("start gateway"))
    monkeypatch.setattr(GatewayKeeper, "close_listener", called.by("close listener"))
    case = Case(monkeypatch)
    for part, names in (
        (case.spares, ("start", "kill")),
        (case.workers, ("look_at_files", "forget")),
        (case.briefing, ("changed", "relaunched", "raised")),
    ):
        for name in names:
            setattr(part, name, called.by(name))
    case.briefing.needs = {M: NEED}
    budget: Any = SimpleNamespace()
    starts = StartDownload(number=1, repository=REPOSITORY)
    ends = EndDownload(number=1)
    gateway = StartGateway(number=1, address=Address(host="127.0.0.1", port=0))

    def body() -> None:
        case.do(StartSpare(number=4), EndSpare(number=3), starts, ends, gateway, CloseListener())
        case.do(LookAtFiles(model=M, generation=FIRST), ForgetModel(model=M))
        case.do(
            BudgetChanged(budget=budget),
            AdoptLaunch(model=M, launch=LAUNCH, need=NEED),
            NeedRaised(model=M, launch=LAUNCH, raised_bytes=5),
        )
        assert called.calls == [
            ("start", 4, ANY),
            ("kill", 3),
            ("download", ANY, starts, ANY),
            ("download", ANY, ends, ANY),
            ("start gateway", ANY, gateway, ANY),
            ("close listener", ANY),
            ("look_at_files", M, FIRST, ANY),
            ("forget", M),
            ("changed", budget),
            ("relaunched", M, LAUNCH, NEED),
            ("raised", LAUNCH, 5),
        ]

    case.run(body)
    assert case.core.events == [Appraised(now=100.0, needs={M: NEED})], "only a need is news"


def test_a_launch_is_appraised_and_reported_to_the_core(
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


def test_measurements_and_downloads_are_planned_with(
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


@pytest.mark.parametrize(
    ("is_broken", "left_behind", "code"), [(False, 0, 0), (False, 1, 71), (True, 0, 70)]
)
def test_only_a_bug_has_all_workers_killed(
    monkeypatch: pytest.MonkeyPatch, called: Called, is_broken: bool, left_behind: int, code: int
) -> None:
    async def end() -> None:
        called.by("end")()

    case = Case(monkeypatch)
    case.workers.end = end
    case.workers.leave = lambda: left_behind

    def body() -> None:
        if is_broken:
            case.loop.complain(case.loop, {"exception": ValueError("v"), "handle": 1})

    assert case.run(body) == code
    assert called.calls == ([("end",)] if is_broken else [])


def test_a_bug_ends_the_daemon_although_its_exception_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(monkeypatch)
    unknown: Any = SimpleNamespace()

    def body() -> None:
        case.log.lines.clear()
        with pytest.raises(AssertionError):
            case.do(unknown)  # as an action that has no rule

    assert case.run(body) == 70
    assert case.log.lines[0] == (*BUG, {"error": "AssertionError"})


def test_log_actions_are_logged_at_their_level(monkeypatch: pytest.MonkeyPatch) -> None:
    case, levels = Case(monkeypatch), list[str]()
    monkeypatch.setattr(case.log, "change_level", levels.append)
    entry = DaemonEnded(code=0)
    ended = RequestEnded(id="r", number=1, model="m", outcome="stop")
    case.do(
        SetLogLevel(level="debug"),
        entry,
        LogFault(model=M, story=("one", "two")),
        ended,
        RequestRefused(id=RequestId("s"), model=M, outcome="overloaded"),
    )
    assert levels == ["debug"]
    assert case.log.lines == [
        ("info", "log level changed", {"to": "debug"}),
        ("flight", entry),
        ("error", "no rule for an event", {"model": M}),
        ("one\ntwo",),
        ("flight", ended),
        ("info", "request ended", facts_of(ended)),
        ("debug", "request ended", {"id": "s", "model": M, "outcome": "overloaded"}),
    ]


def test_announcer_forwards_reloads_the_end_and_each_pulse(
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


def test_a_signal_and_the_start_become_events(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    case = Case(monkeypatch, on_change=told.append)

    def body() -> None:
        case.log.lines.clear()
        [start] = case.loop.soon[0]
        start()
        case.end(signal.SIGTERM, False)
        case.end(signal.SIGINT, True)

    case.run(body)
    assert case.core.events == [
        Appraised(now=100.0, needs={}),
        Started(now=100.0),
        ShutdownAsked(now=100.0, is_immediate=False),
        ShutdownAsked(now=100.0, is_immediate=True),
    ]
    assert case.log.lines == [
        ("info", "signal received", {"signal": "SIGTERM"}),
        ("info", "signal received", {"signal": "SIGINT"}),
    ]
    case.announcer.gateway_listens("http://127.0.0.1:1", 7)
    assert told == [
        {"stopping": 2, "limit_s": 30.0},
        {"stopping": 2, "limit_s": 0.0},
        {"gateway": "http://127.0.0.1:1", "pid": 7},
    ]


def test_facts_replace_odd_bytes_in_paths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = {"endpoint": "ipc:///run/client.sock", "pid": os.getpid(), "log_dir": "/l"}
    odd = Path(os.fsdecode(b"/a\xff/b"))
    for path, shown in ((Path("/c.toml"), "/c.toml"), (odd, "/a\ufffd/b"), (None, None)):
        case = Case(monkeypatch, config_path=path)
        assert case.core.facts == {**facts, "config_path": shown, "version": VERSION}
