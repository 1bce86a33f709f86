"""Test the life of a model: commands, states, loads, stops, processes that do not end."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.client_messages import Reply
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.ids import Generation, ModelName, RequestId
from mlxsup.protocol.states import FinishReason, LoadPhase, State
from mlxsup.protocol.worker_messages import Exit, Hello
from mlxsup.supervisor.core.actions import (
    Abandon,
    Announce,
    Finish,
    ForgetModel,
    LogFault,
    Spawn,
    WorkerSignal,
)
from mlxsup.supervisor.core.events import Reloaded
from mlxsup.supervisor.core.life import KILL_LIMIT_S, LoadTimes
from mlxsup.supervisor.core.settings import CoreSettings, ModelSettings
from mlxsup.supervisor.core.transitions import (
    LEAVES_TO,
    ImpossibleTransitionError,
    Turn,
    words_of,
)

from support.core.driver import LAUNCH, Driver, entry
from support.core.looks import BOB
from support.core.scripts import play
from support.core.states import in_state

OTHER = replace(LAUNCH, path="/other")
LIVING = (State.LOADING, State.READY, State.DRAINING, State.STOPPING)


def reload(driver: Driver, *models: ModelSettings, drain_s: float = 5.0) -> None:
    settings = CoreSettings(drain_timeout_s=drain_s)
    driver.do(Reloaded(now=driver.now, settings=settings, models=models))


def why(driver: Driver) -> tuple[str, str, str]:
    row = driver.row()
    return row["state"], row["wanted"], row["why"]


# The state table

ORDER = ("STOPPED", "PENDING", "LOADING", "READY", "DRAINING", "STOPPING", "BACKOFF", "FAILED")
COMMANDS: dict[str, tuple[Callable[[Driver], RequestId], str, str]] = {
    "load": (
        Driver.load, "up", "LOADING PENDING LOADING READY READY STOPPING LOADING LOADING",
    ),
    "unload": (
        Driver.unload, "down",
        "STOPPED STOPPED STOPPING DRAINING DRAINING STOPPING STOPPED STOPPED",
    ),
    "restart": (
        Driver.restart, "up",
        "LOADING PENDING LOADING DRAINING DRAINING STOPPING LOADING LOADING",
    ),
    "restart now": (
        lambda driver: driver.restart(now=True), "up",
        "LOADING PENDING STOPPING STOPPING STOPPING STOPPING LOADING LOADING",
    ),
}  # fmt: skip
"""How each is said, what is wanted then, and where each state of `ORDER` leads."""


@pytest.mark.parametrize("state", ORDER)
@pytest.mark.parametrize("name", COMMANDS)
def test_command_in_each_state(name: str, state: str) -> None:
    say, wanted, states = COMMANDS[name]
    driver = in_state(State(state))
    command = say(driver)
    assert driver.state() == dict(zip(ORDER, states.split(), strict=True))[state]
    assert driver.row()["wanted"] == wanted
    done = {"load": State.READY, "unload": State.STOPPED}.get(name)
    assert driver.replies() == ([command] if driver.state() is done else [])
    assert not name.startswith("restart") or driver.row()["why"] == "restart"


@pytest.mark.parametrize("state", ORDER)
def test_request_in_each_state(state: str) -> None:
    driver = in_state(State(state))
    driver.ask("new")
    refused = {"DRAINING": "unloaded", "STOPPING": "unloaded", "FAILED": "model_failed"}
    assert driver.errors().get("new") == refused.get(state)
    assert driver.state() == ("LOADING" if state == "STOPPED" else state)


@pytest.mark.parametrize("said", ["hello", "ready", "progress 0.5"])
@pytest.mark.parametrize("state", [State.READY, State.DRAINING])
def test_hello_ready_or_progress_after_ready_is_a_crash(said: str, state: State) -> None:
    play(in_state(state), f"{said} -> STOPPING & signals=[KILL]")


@pytest.mark.parametrize("said", ["hello", "ready", "progress 0.5", "broke"])
def test_worker_messages_while_stopping_are_ignored(said: str) -> None:
    driver = play(in_state(State.LOADING), f"unload; {said} -> STOPPING")
    assert driver.actions == []


def test_an_absent_pair_raises_in_tests() -> None:
    driver = in_state(State.STOPPED)
    with pytest.raises(ImpossibleTransitionError):
        driver.core.fleet.trigger(driver.model(), Turn(), driver.now)


@pytest.mark.parametrize("is_ending", [False, True])
def test_in_production_an_absent_pair_ends_that_life_alone(is_ending: bool) -> None:
    driver = Driver([entry("m"), entry("other")], is_strict=False)
    for name, pid in (("m", 77), ("other", 78)):
        driver.load(name)
        driver.come_up(name, pid)
    if is_ending:
        driver.restart("m", now=True)
    driver.core.outbox.take()
    driver.core.fleet.trigger(driver.model(), Turn(), driver.now)
    driver.actions = driver.core.outbox.take()
    assert len(driver.of(LogFault)) == 1
    assert driver.signals() == ([] if is_ending else [WorkerSignal.KILL])
    driver.exit("m")
    last = driver.row("m")["last_exit"]
    assert (driver.state("m"), last["reason"]) == (State.FAILED, "internal")
    assert last["detail"].startswith("internal error: m: no rule for Turn in ")
    assert driver.state("other") is State.READY


def test_no_story_has_the_token_of_a_process() -> None:
    hello = Hello(
        model=ModelName("m"), generation=Generation(1), token="secret", pid=7, version="1"
    )
    assert words_of(hello) == "hello"


def test_documents_show_where_each_state_leads() -> None:
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([A-Z]+) \| .* \| (.*) \|$", page, re.MULTILINE)
    leads_to = {State(name): set(re.findall(r"[A-Z]+", shown)) & set(State) for name, shown in rows}
    assert leads_to == LEAVES_TO


# Rules of one model

RULES: dict[str, tuple[str, str]] = {
    "a frame of an earlier process is dropped F9": (
        "READY", "exit; up; ask r2; exit generation=1 -> READY & told=[] & spawns=[]",
    ),
    "loads and requests join one load B8": (
        "STOPPED",
        "load; load; ask r1; ask r2 -> generation=1 & spawns=[]; up -> replies=[c1, c2];"
        " -> dispatched=[1, 2] & generation=1",
    ),
    "a caller that has gone is not answered": ("STOPPED", "load; leave; up -> replies=[]"),
    "a load takes an unload back": (
        "READY",
        "now 7; unload -> DRAINING; now 2; load -> READY & wanted=up & why=user & replies=[c3];"
        " -> errors={c2: superseded} & loaded_for_s=9.0; token 1 -> READY",
    ),
    "a load while stopping comes up again": (
        "STOPPING", "load; exit code=0 -> LOADING & restarts=0",
    ),
    "progress renews the limit of a load": (
        "LOADING",
        "wait 19; progress 0.5; wait 19 -> LOADING; progress 0.5; wait 1.5 -> STOPPING;"
        " -> signals=[DUMP, KILL]; exit -> LOADING",
    ),
    "the drain limit ends what runs, and no unload lengthens it": (
        "DRAINING",
        "wait 3; unload; wait 1.9 -> DRAINING;"
        " wait 0.1 -> STOPPING & errors={r1: unloaded} & told=[Exit]; exit code=0 -> errors={}",
    ),
    "a process is asked, terminated, killed E5": (
        "STOPPING", "wait 2.1 -> signals=[TERM]; wait 2.1 -> signals=[KILL];"
        " wait 9.5 -> signals=[] & STOPPING",
    ),
    "an unload ends a load": (
        "LOADING",
        "ask; unload -> signals=[TERM] & errors={c1: superseded, r1: unloaded};"
        " exit signal=SIGTERM -> STOPPED",
    ),
    "a process is terminated once its pid is known": (
        "STOPPED", "load; unload -> signals=[] & STOPPING; spawned -> signals=[TERM]",
    ),
    "a process without a pid is waited for beyond all limits": (
        "STOPPED", "load; unload; wait 100 -> STOPPING; spawned pid=9 -> signals=[KILL];"
        " wait 9.9 -> STOPPING; wait 0.2 -> FAILED",
    ),
    "an unload ends who waits for a restart": (
        "READY",
        "restart; ask waits -> errors={}; unload -> errors={waits: unloaded, c2: superseded}",
    ),
    "an unload ends who waits for a restart at once": (
        "READY",
        "restart now=True; ask waits; unload -> errors={waits: unloaded, c2: superseded};"
        " exit code=0 -> errors={r1: unloaded} & STOPPED",
    ),
    "an unload ends a back-off": (
        "BACKOFF", "ask; unload -> errors={r1: unloaded} & STOPPED; wait 60 -> STOPPED",
    ),
    "a cancelled row holds its place until it has left D11": (
        "READY", "ask r2; ask r3; cancel r1 -> told=[CancelRow] & dispatched=[];"
        " row_left 1 -> dispatched=[3]",
    ),
    "restarts and loads join F14": (
        "READY",
        "restart; restart; restart; load; ask waits -> DRAINING & errors={} & replies=[];"
        " token 1 finish=stop -> told=[Exit]; exit code=0 -> spawns=[m] & restarts=0;"
        " up -> replies=[c2, c3, c4, c5] & dispatched=[2] & generation=2 & why=user",
    ),
    "the drain limit of a restart ends no request": (
        "READY",
        "restart; wait 5 -> STOPPING & told=[Exit] & errors={}; exit code=0 -> LOADING;"
        " -> restarts=0; up -> dispatched=[1]",
    ),
    "a restart joins the load of another, even with now": (
        "FAILED", "restart; spawned -> generation=5; restart now=True -> LOADING & generation=5",
    ),
    "a restart with now ends another load and keeps its waiters": (
        "LOADING",
        "ask; restart now=True -> signals=[TERM] & errors={}; exit signal=SIGTERM;"
        " up -> replies=[c1, c2] & dispatched=[1]",
    ),
    "a restart with now of a load clears the window": (
        "READY",
        "exit -> LOADING; restart now=True -> STOPPING; exit signal=SIGTERM; up;"
        " exit -> LOADING; up; exit -> BACKOFF",
    ),
    "a restart with now is a crash for what runs": (
        "READY",
        "restart now=True; token 1 -> deltas=1; exit code=0 -> LOADING & errors={};"
        " up -> dispatched=[1]",
    ),
    "a restart with now supersedes an unload": (
        "READY", "unload; restart now=True -> errors={c2: superseded}; exit code=0 -> LOADING;"
        " unload -> errors={c3: superseded, r1: unloaded}",
    ),
    "an unload supersedes a restart": (
        "READY", "restart; unload -> errors={c2: superseded}; token 1 finish=stop;"
        " exit code=0 -> STOPPED",
    ),
    "a restart with now clears the window of a restart that drains": (
        "READY",
        "exit; up; restart -> DRAINING; restart now=True -> STOPPING; exit code=0; up;"
        " exit -> LOADING; up; exit -> BACKOFF",
    ),
    "a restart with now clears the window of an unload that drains": (
        "READY",
        "exit; up; unload -> DRAINING; restart now=True -> STOPPING; exit code=0; up;"
        " exit -> LOADING; up; exit -> BACKOFF",
    ),
    "a crash while a restart drains is that restart": (
        "READY", "exit; up; restart -> DRAINING; exit; up; exit -> LOADING; up; exit -> BACKOFF",
    ),
    "a load that joins a restart does not replace its reason": (
        "STOPPED", "restart -> LOADING; load -> LOADING & why=restart; up -> why=user",
    ),
    "a restart while stopping clears the window": (
        "READY",
        "exit; up; unload; wait 5 -> STOPPING; restart; exit code=0; up;"
        " exit -> LOADING; up; exit -> BACKOFF",
    ),
    "nothing starts again after a shutdown": (
        "BACKOFF", "signal -> finished=True; load -> errors={c2: shutting_down};"
        " wait 1000 -> STOPPED & finished=False",
    ),
    "a stop with now asks gracefully first E5": (
        "READY", "stop now=True -> errors={r1: shutting_down} & told=[Exit] & signals=[]",
    ),
    "a stop with now terminates a load E5": ("LOADING", "stop now=True -> signals=[TERM]"),
    "an immediate signal asks gracefully first E5": (
        "READY",
        "signal is_immediate=True -> errors={r1: shutting_down} & told=[Exit] & signals=[]",
    ),
    "a stop takes no negative limit": (
        "STOPPED", "stop timeout_s=-0.1 -> errors={c1: invalid_request} & finished=False",
    ),
}  # fmt: skip
"""In which state each begins, and its script; request `r1` runs in READY and DRAINING."""


@pytest.mark.parametrize("rule", RULES)
def test_rule_of_one_model(rule: str) -> None:
    state, script = RULES[rule]
    play(in_state(State(state)), script)


@pytest.mark.parametrize(
    "use", ["", "wait 20; ask used; accept 1; wait 20; token 1 finish=stop;"], ids=["idle", "used"]
)
def test_an_idle_model_is_unloaded_and_a_request_takes_that_back(use: str) -> None:
    driver = play(Driver([entry(idle_unload_s=30.0)]), f"load; up; {use} wait 29 -> READY")
    play(driver, "wait 1.1 -> STOPPING & why=idle; ask r2 -> errors={}; exit code=0; up -> READY")
    assert len(driver.dispatched()) == 1


# Several models


def test_only_one_model_loads_at_a_time_from_spawn_to_ready_or_exit() -> None:
    driver = play(
        Driver([entry("a"), entry("b"), entry("c")]),
        "load a; load b; load c -> a=LOADING & b=PENDING & c=PENDING; spawned a;"
        " unload a -> b=PENDING; exit a -> spawns=[b]; up b 78 -> spawns=[c]",
    )
    play(driver, "unload c; load b -> b=READY")


def test_preload_follows_the_order_of_the_file() -> None:
    play(
        Driver([entry("a", preload=True), entry("b"), entry("c", preload=True)]),
        "-> spawns=[a] & a.wanted=up & b.wanted=down & c.wanted=up & c.why=preload & c=PENDING;"
        " up a -> spawns=[c]",
    )


def test_longest_wait_loads_first_and_crashed_models_wait_only_for_their_like() -> None:
    play(
        Driver([entry(name) for name in "abcde"]),
        "load d; up d 4; load e; up e 5; load a; now 1; load c; now 1; load b; now 8;"
        " exit d -> spawns=[d];"  # it does not wait for a, which is loading afresh
        " exit e -> spawns=[];"  # it waits for d, which comes back after a crash
        " up a 1 -> spawns=[];"  # after a crash or not, one loads
        " up d 6 -> spawns=[e]; up e 7 -> spawns=[c]; up c 3 -> spawns=[b]",
    )


# Phases of a load

LOAD_PHASES = st.sampled_from(LoadPhase)
SECONDS = st.integers(0, 1000)


@hypothesis.settings(max_examples=25)
@given(st.lists(st.tuples(SECONDS, LOAD_PHASES), max_size=12), SECONDS, SECONDS)
def test_load_phases_add_up(steps: list[tuple[int, LoadPhase]], rest: int, later: int) -> None:
    now = 1000
    times, spent = LoadTimes.begun(now), dict.fromkeys(LoadPhase, 0)
    current, order = LoadPhase.SPAWN, [LoadPhase.SPAWN]
    for seconds, phase in steps:
        now += seconds
        spent[current] += seconds
        times, current = times.entered(phase, now), phase
        order += [phase] if phase not in order else []
    spent[current] += rest
    now += rest
    shown = times.seconds(now)
    ended = times.ended(now)
    assert shown == {phase: spent[phase] for phase in order}
    assert list(shown) == order
    assert ended.seconds(now + later) == ended.ended(now + later).seconds(0) == shown


@pytest.mark.parametrize(
    ("places", "shares"),
    [
        ([], {0.0: 0.0, 0.5: 0.5, 1.0: 1.0}),
        ([(0.5, 90), (1.0, 10)], {0.0: 0.0, 0.25: 0.45, 0.5: 0.9, 0.75: 0.95, 1.0: 1.0}),
        ([(0.5, 90), (0.9, 10)], {0.5: 0.5}),
        ([(0.0, 10), (0.1, 10), (0.105, 5), (1.0, 75)], {0.0: 0.1, 0.1: 0.2, 0.55: 0.6, 1.0: 1.0}),
    ],
    ids=["first load", "slow begin", "failed load", "small steps"],
)
def test_progress_of_a_load_means_time_once_one_has_been_measured(
    places: list[tuple[float, int]], shares: dict[float, float]
) -> None:
    now, times = 0.0, LoadTimes.begun(0.0)
    for place, seconds in places:
        now += seconds
        times = times.entered(LoadPhase.WEIGHTS, now).reached(place, now)
    again = LoadTimes.begun(now, times.ended(now))
    after_a_failure = LoadTimes.begun(now, again.ended(now))
    for load in (again, after_a_failure):
        assert {place: load.share_of_time(place) for place in shares} == pytest.approx(shares)


# Entries that a reload changes or removes


def test_a_reload_of_a_load_starts_it_again_with_the_new_launch() -> None:
    driver = in_state(State.LOADING)
    driver.ask(connection=BOB)
    reload(driver, entry(launch=OTHER))
    assert why(driver) == ("STOPPING", "up", "reload")
    assert (driver.signals(), driver.errors(BOB)) == ([WorkerSignal.TERM], {})
    driver.exit(signal="SIGTERM")
    [spawn] = driver.of(Spawn)
    assert (spawn.generation, spawn.launch, driver.row()["restarts"]) == (2, OTHER, 0)
    driver.come_up()
    assert driver.replies() == ["c1"]


@pytest.mark.parametrize("state", LIVING)
def test_a_model_that_a_reload_removes_and_another_brings_back_comes_up(state: State) -> None:
    driver = in_state(state)
    reload(driver)
    assert why(driver)[1:] == ("gone", "reload")
    reload(driver, entry())
    assert why(driver)[1:] == ("up", "reload")
    if driver.state() is State.DRAINING:
        driver.token(1, finish=FinishReason.STOP)
    driver.exit(code=0)
    assert (driver.state(), driver.of(ForgetModel)) == (State.LOADING, [])
    driver.ask("new")
    assert driver.errors() == {}


@pytest.mark.parametrize("state", list(State))
def test_a_model_that_is_removed_is_forgotten_once_nothing_of_it_lives(state: State) -> None:
    driver = in_state(state)
    reload(driver, *([entry("z")] if state is State.PENDING else []))
    if state in (State.READY, State.DRAINING):
        driver.ask("new")
        assert driver.errors() == {"new": ErrorCode.UNKNOWN_MODEL}
        assert driver.of(ForgetModel) == []
        driver.token(1, finish=FinishReason.STOP)
        assert driver.told(Exit) == [Exit()]
    if state in LIVING:
        driver.exit(code=0)
    assert driver.of(ForgetModel) == [ForgetModel(model=ModelName("m"))]
    notes = [a.change["note"] for a in driver.of(Announce) if a.change["model"] == "m"]
    assert notes == ["removed"]
    assert "m" not in driver.core.fleet.by_name


# Shutdown


def test_shutdown_drains_what_is_ready_stops_what_loads_and_answers_queues_E4() -> None:
    play(
        Driver([entry("a"), entry("b"), entry("c")]),
        "load a; up a; ask runs a; accept 1 a; load b; spawned b 2; load c; ask waits b;"
        " signal -> a=DRAINING & b=STOPPING & c=STOPPED;"
        " -> errors={waits: shutting_down, c2: shutting_down, c3: shutting_down};"
        " ask new a -> errors={new: shutting_down}; exit b signal=SIGTERM;"
        " token 1 model=a finish=stop -> finished=False; exit a code=0 -> finished=True;"
        " signal is_immediate=True -> finished=False; wait 1000 -> finished=False",
    )


@pytest.mark.parametrize(("timeout_s", "drain_timeout_s"), [(None, 5.0), (0.0, 0.0), (9.5, 9.5)])
def test_stop_reply_has_pids_and_limits_and_keeps_them_E1(
    timeout_s: float | None, drain_timeout_s: float
) -> None:
    driver = Driver([entry("a"), entry("b"), entry("c")])
    for pid, name in enumerate("ab", start=5):
        driver.load(name)
        driver.come_up(name, pid)
        driver.ask(name, name)
    driver.sample(10**9, pid=6)
    driver.stop(timeout_s=timeout_s)
    [reply] = driver.sent(Reply)
    assert reply.value == {
        "pids": [5, 6],
        "supervisor_pid": 1,
        "drain_timeout_s": drain_timeout_s,
        "end_limit_s": 2 * 2.0 + KILL_LIMIT_S + 0.5,
    }
    if drain_timeout_s:
        driver.pass_time(drain_timeout_s - 0.1)
        assert driver.state("a") is State.DRAINING
    driver.pass_time(0.1)
    assert driver.errors() == dict.fromkeys("ab", ErrorCode.SHUTTING_DOWN)


# Processes that SIGKILL does not end (P26)

GB = 1_000_000_000
LONG_S = 3600.0


def stuck(**changes: object) -> Driver:
    """A driver whose model `m` is FAILED because its process, 77, could not be ended."""
    driver = in_state(State.READY, **changes)
    driver.broke()
    assert driver.signals() == [WorkerSignal.KILL]
    driver.pass_time(KILL_LIMIT_S + 0.1)
    return driver


@pytest.mark.parametrize("footprint_gb", [0, 100])
def test_stuck_process_fails_its_model_and_requests(footprint_gb: int) -> None:
    """The larger it is, the longer the kernel needs to free it."""
    driver = in_state(State.READY)
    driver.sample(footprint_gb * GB)
    driver.broke()
    driver.ask("waits")
    driver.pass_time(KILL_LIMIT_S + footprint_gb / 2 - 0.1)
    assert driver.state() is State.STOPPING
    driver.pass_time(0.2)
    row = driver.row()
    assert (row["state"], row["cause"]) == ("FAILED", "process 77 cannot be ended")
    assert driver.errors() == {"r1": ErrorCode.WORKER_CRASHED, "waits": ErrorCode.LOAD_FAILED}
    assert [(a.model, a.generation) for a in driver.of(Abandon)] == [("m", 1)]
    driver.pass_time(LONG_S)
    assert driver.actions == []
    driver.sample(5 * GB)
    assert (driver.row()["pid"], driver.row()["footprint_bytes"]) == (77, 5 * GB)
    assert driver.core.status(driver.now)["memory"]["reserved_bytes"] == max(5, footprint_gb) * GB


STUCK = {
    "a load is refused while the process lives, and it comes back at its exit": (
        "load -> FAILED & spawns=[] & errors={c2: load_failed};"
        " ask late -> errors={late: model_failed}; exit -> spawns=[m] & generation=2 & pid=None"
    ),
    "a restart is refused while the process lives": (
        "restart -> FAILED & spawns=[] & errors={c2: load_failed}; exit -> spawns=[m]"
    ),
    "an unload fails, and the model stops at the exit": (
        "unload -> FAILED & wanted=down & errors={c2: model_failed}; exit -> STOPPED & pid=None"
    ),
    "a shutdown does not wait": "stop -> replies=[c2] & finished=True",
    "messages of its worker are ignored, and its late exit accuses no more": (
        "hello -> FAILED & told=[] & signals=[]; ready -> FAILED & signals=[];"
        " broke -> FAILED & signals=[]; beat -> FAILED & signals=[];"
        " exit signal=SIGSEGV -> suspects=0"
    ),
}
"""After which events a model fares how whose process, 77, cannot be ended."""


@pytest.mark.parametrize("rule", STUCK)
def test_model_with_a_stuck_process(rule: str) -> None:
    driver = play(in_state(State.READY), "token 1 finish=stop; broke -> signals=[KILL]; wait 10.1")
    play(driver, STUCK[rule])


@pytest.mark.parametrize("hello", ["", "hello m;"], ids=["silent", "said hello"])
def test_a_load_that_cannot_be_ended_gives_its_turn_back(hello: str) -> None:
    play(
        Driver([entry("m"), entry("other")]),
        f"load m; spawned m; {hello} load other; wait 35 -> m=FAILED & other=LOADING;"
        " -> errors={c1: load_failed} & spawns=[other] & m.generation=1",
    )


def test_an_unload_that_finds_its_process_stuck_fails() -> None:
    play(
        in_state(State.READY),
        "unload; wait 20 -> FAILED & wanted=down & errors={c2: model_failed, r1: unloaded};"
        " exit -> STOPPED & pid=None",
    )


def test_stop_at_once_announces_no_drain() -> None:
    driver = in_state(State.READY)
    driver.stop(now=True)
    [reply] = driver.sent(Reply)
    assert reply.value["drain_timeout_s"] == 0.0


@pytest.mark.parametrize("state", [State.LOADING, State.READY, State.STOPPING])
def test_stop_with_a_stuck_process_keeps_its_limit(state: State) -> None:
    driver = in_state(state)
    driver.stop()
    [reply] = driver.sent(Reply)
    limit_s = reply.value["drain_timeout_s"] + reply.value["end_limit_s"]
    assert driver.of(Finish) == []
    for _ in range(3):  # impatience does not put it off
        driver.pass_time(1.0)
        driver.signal(is_immediate=True)
    driver.pass_time(limit_s - 3.0)
    assert len(driver.of(Finish)) == 1


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_removed_stuck_model_is_forgotten_at_its_exit(comes_back: bool) -> None:
    driver = stuck()
    reload(driver)
    play(driver, "-> wanted=gone; ask late -> errors={late: unknown_model}")
    if comes_back:
        reload(driver, entry())
        play(driver, "-> FAILED & wanted=up & spawns=[]")
    driver.exit()
    assert driver.spawns() == (["m"] if comes_back else [])
    assert len(driver.core.status(driver.now)["models"]) == comes_back


def test_answers_of_a_removed_stuck_model_end_as_unknown() -> None:
    driver = in_state(State.READY)
    reload(driver, entry("other"))
    driver.broke()
    driver.pass_time(KILL_LIMIT_S + 0.1)
    assert driver.failure_of().error.code == ErrorCode.UNKNOWN_MODEL
