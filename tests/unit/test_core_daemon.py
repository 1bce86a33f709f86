"""What concerns all models: starting, waking, loading in turn, reloading, stopping."""

from __future__ import annotations

import pytest

from mlxsup.protocol.client_messages import Event, Failed, Reload, Reply, Stop, Subscribe
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.ids import Generation, ModelName, RequestId
from mlxsup.protocol.states import FinishReason, State
from mlxsup.supervisor.core.actions import Finish, ReadConfiguration, WakeAt
from mlxsup.supervisor.core.events import (
    Caller,
    ClientTooSlow,
    Reloaded,
    ReloadRefused,
    Sampled,
    Started,
    Tick,
    WorkerBroke,
)
from mlxsup.supervisor.core.health.death_cause import Cause, classify
from mlxsup.supervisor.core.settings import CoreSettings
from mlxsup.supervisor.core.worker_events import last_words

from support.core_driver import Driver, entry
from support.core_looks import ALICE, BOB
from support.core_states import in_state

# ---------------------------------------------------------------- starting and waking


def test_what_is_preloaded_comes_up_in_the_order_of_the_file() -> None:
    driver = Driver([entry("a", preload=True), entry("b"), entry("c", preload=True)])
    assert driver.spawns() == ["a"]
    assert [driver.row(n)["wanted"] for n in "abc"] == ["up", "down", "up"]
    assert (driver.row("c")["why"], driver.state("c")) == ("preload", State.PENDING)
    driver.come_up("a")
    assert driver.spawns() == ["c"]


def test_the_time_that_it_is_up_counts_from_its_start() -> None:
    driver = Driver()
    driver.do(Started(now=1005.0))
    assert driver.core.status(1007.5)["uptime_s"] == 2.5


def test_who_waits_longest_loads_first_and_one_after_a_crash_before_it() -> None:
    driver = Driver([entry(name) for name in "abcd"])
    driver.load("d")
    driver.come_up("d", 4)
    driver.load("a")
    for seconds, name in enumerate("cb", start=1):
        driver.now = 1000.0 + seconds
        driver.load(name)
    driver.now = 1010.0
    driver.exit("d")
    assert driver.spawns() == ["d"]
    driver.come_up("a", 1)
    assert driver.spawns() == [], "after a crash or not, one loads"
    driver.come_up("d", 5)
    assert driver.spawns() == ["c"]
    driver.come_up("c", 3)
    assert driver.spawns() == ["b"]


def test_a_wake_up_is_asked_for_once_and_again_only_if_it_is_to_be_earlier() -> None:
    driver = Driver()
    driver.ask("a", timeout_s=50.0)
    load_stalls_at = 1020.0
    assert driver.of(WakeAt) == [WakeAt(when=load_stalls_at)]
    driver.ask("b", timeout_s=30.0)
    assert driver.of(WakeAt) == []
    driver.ask("c", timeout_s=10.0)
    assert driver.of(WakeAt) == [WakeAt(when=1010.0)]
    driver.cancel("c")
    assert driver.of(WakeAt) == [], "the earlier one stands"
    driver.do(Tick(now=1010.0))
    assert driver.of(WakeAt) == [WakeAt(when=load_stalls_at)]


def test_a_time_that_was_put_off_does_nothing_and_the_next_one_is_asked_for() -> None:
    driver = in_state(State.READY, idle_unload_s=30.0)
    driver.token(1, finish=FinishReason.STOP)
    driver.ask("r2")
    driver.do(Tick(now=driver.now + 1000.0))
    assert driver.state() is State.READY


def test_samples_are_those_of_the_process_that_lives() -> None:
    driver = Driver([entry("a"), entry("b")])
    driver.load("a")
    driver.come_up("a", 5)
    driver.do(Sampled(now=driver.now, footprint_bytes={5: 10, 6: 20}, machine_bytes=99))
    assert [driver.row(n)["footprint_bytes"] for n in "ab"] == [10, 0]
    driver.do(Sampled(now=driver.now, footprint_bytes={6: 20}, machine_bytes=98))
    assert driver.row("a")["footprint_bytes"] == 0
    assert driver.core.status(driver.now)["memory"]["machine_bytes"] == 98


# ---------------------------------------------------------------- clients that go


def test_only_what_the_client_that_goes_had_asked_for_is_forgotten() -> None:
    driver = in_state(State.READY)
    for connection in (ALICE, BOB):
        driver.say(Subscribe(id=RequestId("s")), connection)
        driver.ask("more", connection=connection)
    unload = driver.unload()
    driver.leave(BOB)
    assert driver.core.outbox.subscriptions == {ALICE: "s"}
    assert driver.row()["running"] == ["r1", "more"]
    driver.token(1, 2, finish=FinishReason.STOP)
    driver.exit(code=0)
    assert driver.replies() == [unload]
    assert len(driver.sent(Event)) == 1
    assert driver.sent(Event, BOB) == []


def test_commands_of_a_slow_client_end_in_both_directions_and_no_others() -> None:
    driver = Driver([entry("a"), entry("b")])
    driver.load("a")
    driver.come_up("a")
    driver.ask("r", "a", BOB)
    unload = driver.unload("a")
    load = driver.load("b")
    driver.do(ClientTooSlow(now=driver.now, connection=BOB))
    assert driver.errors(BOB) == {"r": ErrorCode.SLOW_CONSUMER}
    assert driver.errors() == {}
    driver.do(ClientTooSlow(now=driver.now, connection=ALICE))
    assert driver.errors() == dict.fromkeys((unload, load), ErrorCode.SLOW_CONSUMER)
    driver.do(ClientTooSlow(now=driver.now, connection=ALICE))
    assert driver.errors() == {}


def test_a_cancel_of_something_else_leaves_a_subscription_alone() -> None:
    driver = in_state(State.READY)
    driver.say(Subscribe(id=RequestId("s")))
    driver.cancel("r1")
    driver.cancel("s2")
    assert driver.core.outbox.subscriptions == {ALICE: "s"}


# ---------------------------------------------------------------- reloads


def test_a_reload_says_what_it_changes_and_not_again() -> None:
    driver = in_state(State.READY)
    caller = Caller(connection=ALICE, id=RequestId("x"))
    models = (entry("n", preload=True),)
    for removed in (["m"], []):
        driver.do(Reloaded(now=driver.now, settings=CoreSettings(), models=models, caller=caller))
        added = ["n"] if removed else []
        changes: dict[str, object] = {"added": added, "changed": [], "removed": removed}
        settings = ["max_queue", "max_queue_per_client", "drain_timeout_s"] if removed else []
        value = {**changes, "settings": settings, "later": [], "over_budget_bytes": 0, "unread": {}}
        assert driver.sent(Reply) == [Reply(id=RequestId("x"), value=value)]
    assert driver.row("n")["why"] == "reload"


def test_a_reload_without_a_caller_answers_nobody_and_its_limits_hold_at_once() -> None:
    driver = in_state(State.READY)
    settings = CoreSettings(max_queue=1, max_queue_per_client=9, drain_timeout_s=77.0)
    driver.do(Reloaded(now=driver.now, settings=settings, models=(entry(),)))
    assert driver.actions == []
    driver.ask("r2")
    driver.ask("waits")
    driver.ask("more")
    assert driver.errors() == {"more": ErrorCode.OVERLOADED}
    driver.stop()
    [reply] = driver.sent(Reply)
    assert reply.value["drain_timeout_s"] == 77.0
    driver.do(Reloaded(now=driver.now, settings=CoreSettings(), models=()))
    assert (driver.actions, driver.row()["wanted"]) == ([], "down"), "it is too late"


def test_a_refused_reload_lists_what_is_wrong() -> None:
    driver = in_state(State.READY)
    driver.say(Reload(id=RequestId("x")))
    [read] = driver.of(ReadConfiguration)
    assert read.caller == Caller(connection=ALICE, id=RequestId("x"))
    driver.do(ReloadRefused(now=driver.now, problems=("a", "b"), caller=read.caller))
    [failed] = driver.sent(Failed)
    assert failed.error["message"].endswith("nothing has changed:\n  a\n  b")


# ---------------------------------------------------------------- stopping


@pytest.mark.parametrize(("timeout_s", "drain_timeout_s"), [(None, 5.0), (0.0, 0.0), (9.5, 9.5)])
def test_a_stop_is_answered_with_whom_it_ends_and_how_long_that_may_take(
    timeout_s: float | None, drain_timeout_s: float
) -> None:
    driver = Driver([entry("a"), entry("b"), entry("c")])
    for pid, name in enumerate("ab", start=5):
        driver.load(name)
        driver.come_up(name, pid)
        driver.ask(name, name)
    driver.do(Sampled(now=driver.now, footprint_bytes={5: 10**9, 6: 4 * 10**9}, machine_bytes=1))
    driver.say(Stop(id=RequestId("s"), timeout_s=timeout_s))
    value = {
        "pids": [5, 6],
        "supervisor_pid": 1,
        "drain_timeout_s": drain_timeout_s,
        "end_limit_s": 2 * 2.0 + 10.0 + 0.5 * 4,
    }
    assert driver.sent(Reply) == [Reply(id=RequestId("s"), value=value)]
    if drain_timeout_s:
        driver.pass_time(drain_timeout_s - 0.1)
        assert driver.state("a") is State.DRAINING
    driver.pass_time(0.1)
    assert driver.errors() == dict.fromkeys("ab", ErrorCode.SHUTTING_DOWN)


def test_a_stop_with_a_limit_below_zero_says_what_is_wrong() -> None:
    driver = Driver()
    driver.stop(timeout_s=-0.1)
    [failed] = driver.sent(Failed)
    assert failed.error["message"] == "timeout_s takes seconds from 0"
    assert driver.of(Finish) == []


def test_the_end_is_said_once() -> None:
    driver = Driver()
    driver.signal()
    assert driver.of(Finish) == [Finish()]
    driver.signal(is_immediate=True)
    driver.do(Tick(now=driver.now))
    assert driver.of(Finish) == []


def test_a_first_signal_that_hurries_ends_what_runs_and_asks_what_stops_no_harder_than_once() -> (
    None
):
    driver = in_state(State.READY)
    driver.signal(is_immediate=True)
    assert driver.errors() == {"r1": ErrorCode.SHUTTING_DOWN}
    assert (driver.state(), driver.signals()) == (State.STOPPING, [])


# ---------------------------------------------------------------- what a death says


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("there is no stream(gpu, 0)", Cause.STREAM_ERROR),
        ("GPU Timeout", Cause.GPU_TIMEOUT),
        ("gpu time-out", Cause.GPU_TIMEOUT),
        ("GPU Hang", Cause.GPU_TIMEOUT),
        ("kIOGPUCommandBufferCallbackErrorTimeout", Cause.GPU_TIMEOUT),
        ("cudaErrorLaunchTimeout", Cause.GPU_TIMEOUT),
        ("Innocent Victim of a fault", Cause.GPU_FAULT_ELSEWHERE),
        ("ErrorInnocentVictim", Cause.GPU_FAULT_ELSEWHERE),
        ("Out Of Memory", Cause.OUT_OF_MEMORY),
        ("ErrorOutOfMemory", Cause.OUT_OF_MEMORY),
        ("insufficient memory", Cause.OUT_OF_MEMORY),
        ("MemoryError: x", Cause.OUT_OF_MEMORY),
        ("std::bad_alloc", Cause.OUT_OF_MEMORY),
        ("Cannot allocate memory", Cause.OUT_OF_MEMORY),
        ("Unable to allocate 4 bytes", Cause.OUT_OF_MEMORY),
        ("Attempting to allocate 4 bytes", Cause.OUT_OF_MEMORY),
        ("cudaErrorMemoryAllocation", Cause.OUT_OF_MEMORY),
        ("FileNotFoundError", Cause.MODEL_MISSING),
        ("No such file or directory", Cause.MODEL_MISSING),
    ],
)
def test_each_library_has_its_own_words_for_a_cause(line: str, cause: Cause) -> None:
    assert classify(70, ["before", f"… {line} …", "after"]) is cause


def test_the_exit_code_counts_most_then_the_latest_line_then_the_memory() -> None:
    assert classify(75, ["gpu hang"]) is Cause.OUT_OF_MEMORY
    assert classify(70, ["gpu hang", "bad_alloc"]) is Cause.OUT_OF_MEMORY
    assert classify(None, ["bad_alloc", "gpu hang"], is_over_memory=True) is Cause.GPU_TIMEOUT
    assert classify(None, ["?"], is_over_memory=True) is Cause.OUT_OF_MEMORY
    assert classify(None, ["?"]) is Cause.UNKNOWN


@pytest.mark.parametrize(
    "routine",
    [
        "2026-01-01T00:00:00.1Z DEBUG x", "2026-01-01T00:00:00.1Z INFO x",
        "2026-01-01T00:00:00.1Z WARNING x", "Extension modules: zmq", "Current thread 0x1 (most",
        "Thread 0x1 (most", "Stack (most recent call first):", '  File "x.py", line 1 in f',
        '  Binary file "x.so", at f', "  <no Python frame>", "", "   ",
    ],
)  # fmt: skip
def test_thelast_words_are_no_routine_lines(routine: str) -> None:
    assert last_words(["first", "  cause  ", routine]) == "cause"
    assert last_words([routine]) == ""


def test_an_error_in_the_log_may_be_thelast_words_and_a_fatal_one_always_is() -> None:
    assert last_words(["x", "2026-01-01T00:00:00.1Z ERROR y"]) == "2026-01-01T00:00:00.1Z ERROR y"
    assert last_words(["Fatal Python error: Aborted ", "later"]) == "Fatal Python error: Aborted"
    assert last_words(["Fatal Python error: " + "x" * 300])[:21] == "Fatal Python error: x"
    assert len(last_words(["Fatal Python error: " + "x" * 300])) == 200
    assert last_words([]) == ""


def test_garbage_of_another_version_is_another_version() -> None:
    driver = in_state(State.READY)
    broke = WorkerBroke(
        now=driver.now,
        model=ModelName("m"),
        generation=Generation(1),
        detail="d",
        is_other_version=True,
    )
    driver.do(broke)
    driver.exit(code=143)
    assert driver.row()["last_exit"]["reason"] == "version"
    assert "upgraded to another one: restart" in driver.row()["last_exit"]["detail"]
