"""What the supervisor's shell says of itself, and when its one timer wakes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxsup.protocol.flight import DaemonEnded, RequestEnded
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.protocol.version import VERSION
from mlxsup.supervisor.announcements import Announcer, facts_of
from mlxsup.supervisor.app import Timer, daemon_facts
from mlxsup.supervisor.core.actions import Announce, LogFault, RequestRefused, SetLogLevel
from mlxsup.supervisor.core.status import Outline
from mlxsup.supervisor.service_manager import ServiceManager
from mlxsup.supervisor.sleep import SleepGuard

from support.daemon.noted_log import Log

M = ModelName("m")


@pytest.fixture
def log() -> Log:
    return Log()


def announcer(log: Log, on_change: Callable[[dict[str, Any]], None]) -> Announcer:
    return Announcer(log, on_change, ServiceManager(), SleepGuard("off", log))


def change(**fields: object) -> dict[str, Any]:
    return {
        "model": "a", "from": "LOADING", "to": "READY", "generation": 1, "why": "w",
        "note": "", "batching": None, "warnings": [], "load_phases_s": None, "secret": 1,
    } | fields  # fmt: skip


def test_a_change_is_logged_with_its_facts_and_passed_on(log: Log) -> None:
    shown: list[dict[str, Any]] = []
    phases = {"spawn": 0.5, "import": 2.0}
    continuous, single = {"mode": "continuous", "reason": ""}, {"mode": "single", "reason": "r"}
    changes = [
        change(note="n", generation=None),
        change(**{"from": "READY"}),
        change(batching=continuous, warnings=["one", "two"], load_phases_s=phases),
        change(batching=single, load_phases_s={}),
    ]
    told = announcer(log, shown.append)
    for one in changes:
        told.take(Announce(change=one))
    facts = {"model": "a", "from": "LOADING", "to": "READY", "generation": 1, "why": "w"}
    noted = {"model": "a", "from": "LOADING", "to": "READY", "why": "w", "note": "n"}
    quick = {"model": "a", "batching": "continuous", "spawn_s": 0.5, "import_s": 2.0}
    assert log.lines == [
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


def test_a_reader_that_is_gone_is_named_once(log: Log) -> None:
    def gone(_: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    told = announcer(log, gone)
    for _ in range(2):
        told.take(Announce(change=change()))
    warnings = [line for line in log.lines if line[0] == "warning"]
    assert warnings == [("warning", "status output disabled", {"error": "Broken pipe"})]


def test_log_actions_are_logged_at_their_level(log: Log) -> None:
    entry = DaemonEnded(code=0)
    ended = RequestEnded(id="r", number=1, model="m", outcome="stop")
    warned = RequestEnded(id="r", number=1, model="m", outcome="stop", warnings=["a", "b"])
    told = announcer(log, print)
    for action in (
        SetLogLevel(level="debug"),
        entry,
        LogFault(model=M, story=("one", "two")),
        ended,
        warned,
        RequestRefused(id=RequestId("s"), model=M, outcome="overloaded"),
    ):
        told.take(action)
    assert log.lines == [
        ("level", "debug"),
        ("info", "log level changed", {"to": "debug"}),
        ("flight", entry),
        ("error", "no rule for an event", {"model": M}),
        ("one\ntwo",),
        ("flight", ended),
        ("info", "request ended", facts_of(ended)),
        ("flight", warned),
        ("warning", "request ended", {**facts_of(ended), "warnings": "a; b"}),
        ("debug", "request ended", {"id": "s", "model": M, "outcome": "overloaded"}),
    ]


def test_facts_of_an_answer_name_its_breaks_and_its_speed_only_if_it_had_any() -> None:
    plain = facts_of(RequestEnded(id="r", number=1, model="m", outcome="stop"))
    assert not {"resumed", "paused", "tokens_per_s", "warnings"} & plain.keys()
    broken = RequestEnded(id="r", number=1, model="m", outcome="stop", resumed=2, paused=3)
    assert facts_of(broken) == plain | {"resumed": 2, "paused": 3}


def test_reloads_the_end_and_each_pulse_reach_the_service_manager(log: Log) -> None:
    calls: list[tuple[Any, ...]] = []

    def noted(name: str) -> Callable[..., None]:
        return lambda *given: calls.append((name, *given))

    names = ("reloading", "reloaded", "stopping", "pulse")
    manager: Any = SimpleNamespace(**{name: noted(name) for name in names})
    sleep: Any = SimpleNamespace(pulse=noted("sleep"))
    shown: list[dict[str, Any]] = []
    told = Announcer(log, shown.append, manager, sleep)
    outline = Outline(states=(), is_busy=True, is_ending=False)
    told.reloads()
    told.reloaded(())
    told.reloaded(("log_dir", "gateway"))
    told.reload_refused(["one", "two"])
    told.pulse(lambda: outline)
    told.gateway_listens("http://127.0.0.1:1", 7)
    told.ends("SIGTERM", 2, 30.0)
    told.finishes()
    assert calls == [
        ("reloading",), ("reloaded", 0), ("reloaded", 0), ("reloaded", 2),
        ("pulse", outline), ("sleep", outline), ("stopping",), ("stopping",),
    ]  # fmt: skip
    assert log.lines == [
        ("info", "configuration reloaded", {"later": "-"}),
        ("info", "configuration reloaded", {"later": "log_dir,gateway"}),
        ("error", "reload refused", {"problems": 2}),
        ("one\ntwo",),
        ("info", "signal received", {"signal": "SIGTERM"}),
    ]
    assert shown == [{"gateway": "http://127.0.0.1:1", "pid": 7}, {"stopping": 2, "limit_s": 30.0}]


def test_facts_replace_odd_bytes_in_paths() -> None:
    odd = Path(os.fsdecode(b"/a\xff/b"))
    for path, shown in ((Path("/c.toml"), "/c.toml"), (odd, "/a\ufffd/b"), (None, None)):
        config: Any = SimpleNamespace(config_path=path, log_dir=Path("/l"))
        assert daemon_facts(config, Path("/run/client.sock")) == {
            "version": VERSION,
            "pid": os.getpid(),
            "endpoint": "ipc:///run/client.sock",
            "config_path": shown,
            "log_dir": "/l",
        }


def test_the_timer_wakes_at_the_earliest_time_that_was_asked_for() -> None:
    now, due = 100.0, list[float]()
    later: list[tuple[float, Callable[[], None]]] = []
    cancelled: list[float] = []

    def call_later(delay_s: float, function: Callable[[], None]) -> Any:
        later.append((delay_s, function))
        return SimpleNamespace(cancel=lambda: cancelled.append(delay_s))

    clock: Any = SimpleNamespace(now=lambda: now, delay_until=lambda when: when - now)
    loop: Any = SimpleNamespace(call_later=call_later)
    timer = Timer(clock, due.append)
    for when in (110.0, 110.0, 120.0, 105.0):
        timer.wake_at(when, loop)
    assert ([delay_s for delay_s, _ in later], cancelled) == ([10.0, 5.0], [10.0])
    now = 104.5
    later[-1][1]()  # the clock stood still meanwhile
    assert (later[-1][0], due) == (0.5, [])
    now = 105.0
    later[-1][1]()
    assert due == [105.0]
    timer.wake_at(200.0, loop)
    assert later[-1][0] == 95.0
