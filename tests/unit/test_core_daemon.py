"""Test the daemon as a whole: start, stop, slow clients, log level, gateway."""

from __future__ import annotations

import random
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.client_messages import Event, Failed, Reload, Reply, Stop, Subscribe
from mlxsup.protocol.download import Repository
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.gateway import Address
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.log_level import ChangeLogLevel, LogLevel
from mlxsup.protocol.states import FinishReason, State
from mlxsup.supervisor.core.actions import (
    Action,
    CloseListener,
    Finish,
    KillGateway,
    ReadConfiguration,
    SendToWorker,
    SetLogLevel,
    StartGateway,
    WakeAt,
)
from mlxsup.supervisor.core.core import Core
from mlxsup.supervisor.core.events import (
    Caller,
    ClientTooSlow,
    GatewayBeat,
    GatewayEnded,
    GatewayListening,
    Reloaded,
    ReloadRefused,
    Sampled,
    ShutdownAsked,
    Started,
    Tick,
)
from mlxsup.supervisor.core.events import Event as CoreEvent
from mlxsup.supervisor.core.gateway import (
    FROZEN_S,
    LOOP_ENDS,
    MOST_DELAY_S,
    STABLE_S,
    START_LIMIT_S,
)
from mlxsup.supervisor.core.health.death_cause import Cause, classify
from mlxsup.supervisor.core.settings import CoreSettings
from mlxsup.supervisor.core.worker_events import last_words

from support.core.driver import Driver, entry
from support.core.looks import ALICE, BOB
from support.core.states import in_state

# Start, stop and clients


def test_preload_follows_the_order_of_the_file() -> None:
    driver = Driver([entry("a", preload=True), entry("b"), entry("c", preload=True)])
    assert driver.spawns() == ["a"]
    assert [driver.row(n)["wanted"] for n in "abc"] == ["up", "down", "up"]
    assert (driver.row("c")["why"], driver.state("c")) == ("preload", State.PENDING)
    driver.come_up("a")
    assert driver.spawns() == ["c"]


def test_longest_wait_loads_first_and_crashed_models_before_it() -> None:
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


def test_samples_are_those_of_the_process_that_lives() -> None:
    driver = Driver([entry("a"), entry("b")])
    driver.load("a")
    driver.come_up("a", 5)
    driver.do(Sampled(now=driver.now, footprint_bytes={5: 10, 6: 20}, machine_bytes=99))
    assert [driver.row(n)["footprint_bytes"] for n in "ab"] == [10, 0]
    driver.do(Sampled(now=driver.now, footprint_bytes={6: 20}, machine_bytes=98))
    assert driver.row("a")["footprint_bytes"] == 0
    assert driver.core.status(driver.now)["memory"]["machine_bytes"] == 98


def test_disconnect_forgets_only_its_own_commands() -> None:
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


def test_reload_reply_lists_its_changes() -> None:
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


def test_reload_without_a_caller_applies_limits_at_once() -> None:
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


def test_refused_reload_lists_its_problems() -> None:
    driver = in_state(State.READY)
    driver.say(Reload(id=RequestId("x")))
    [read] = driver.of(ReadConfiguration)
    assert read.caller == Caller(connection=ALICE, id=RequestId("x"))
    driver.do(ReloadRefused(now=driver.now, problems=("a", "b"), caller=read.caller))
    [failed] = driver.sent(Failed)
    assert failed.error["message"].endswith("nothing has changed:\n  a\n  b")


@pytest.mark.parametrize(("timeout_s", "drain_timeout_s"), [(None, 5.0), (0.0, 0.0), (9.5, 9.5)])
def test_stop_reply_has_pids_and_limits(timeout_s: float | None, drain_timeout_s: float) -> None:
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


def test_stop_refuses_a_negative_limit() -> None:
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


def test_immediate_signal_ends_running_requests() -> None:
    driver = in_state(State.READY)
    driver.signal(is_immediate=True)
    assert driver.errors() == {"r1": ErrorCode.SHUTTING_DOWN}
    assert (driver.state(), driver.signals()) == (State.STOPPING, [])


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
def test_classify_words_of_libraries(line: str, cause: Cause) -> None:
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
def test_last_words_skip_routine_lines(routine: str) -> None:
    assert last_words(["first", "  cause  ", routine]) == "cause"
    assert last_words([routine]) == ""


def test_last_words_may_be_an_error_and_always_are_a_fatal_line() -> None:
    assert last_words(["x", "2026-01-01T00:00:00.1Z ERROR y"]) == "2026-01-01T00:00:00.1Z ERROR y"
    assert last_words(["Fatal Python error: Aborted ", "later"]) == "Fatal Python error: Aborted"
    assert last_words(["Fatal Python error: " + "x" * 300])[:21] == "Fatal Python error: x"
    assert len(last_words(["Fatal Python error: " + "x" * 300])) == 200
    assert last_words([]) == ""


# Log level


def change(driver: Driver, level: str) -> dict[str, str]:
    """Changes it; returns what each worker is sent."""
    driver.say(ChangeLogLevel(id=RequestId("c"), level=level))
    return told(driver)


def told(driver: Driver) -> dict[str, str]:
    sent = [one for one in driver.of(SendToWorker) if isinstance(one.message, LogLevel)]
    return {str(one.model): one.message.level for one in sent if isinstance(one.message, LogLevel)}


def test_log_level_reaches_workers_at_once_or_when_ready() -> None:
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


# Outline for the service manager


def is_busy(driver: Driver) -> bool:
    return driver.core.outline().is_busy


def test_a_load_is_work_and_a_model_that_waits_for_requests_is_none() -> None:
    driver = Driver()
    assert not is_busy(driver)
    driver.load()
    assert driver.core.outline().states == (("m", State.LOADING),)
    assert is_busy(driver)
    driver.come_up()
    assert driver.core.outline().states == (("m", State.READY),)
    assert not is_busy(driver)


def test_outline_is_busy_with_unpaused_requests() -> None:
    driver = Driver()
    driver.load()
    driver.come_up()
    driver.ask()
    assert is_busy(driver)
    driver.accept(1)
    driver.token(1)
    driver.pause()
    assert is_busy(driver)
    driver.row_left(1, tokens=1)
    assert not is_busy(driver)
    driver.resume()
    assert is_busy(driver)
    driver.cancel()
    assert not is_busy(driver)


def test_a_download_is_work() -> None:
    driver = Driver([entry(download=Repository("org/tiny"))])
    driver.load()
    assert driver.core.outline().states == (("m", State.PENDING),)
    assert is_busy(driver)


# The gateway process

ADDRESS = Address(host="127.0.0.1", port=0)
GIVEN = Address(host="127.0.0.1", port=4000)
ROUNDING_S = 1e-6
"""By how much sums of times may differ."""


class Driven:
    """A core with a gateway; the test plays the gateway's process."""

    def __init__(self, address: Address | None = ADDRESS) -> None:
        self.now = 100.0
        self.core = Core(
            CoreSettings(), [entry()], facts={}, random=random.Random(1), is_strict=True,
            gateway=address,
        )  # fmt: skip
        self.actions: list[Action] = []
        self.number = 0
        self.do(Started(now=self.now))

    def do(self, event: CoreEvent) -> None:
        """One event; keeps what the core does about it."""
        self.actions = self.core.handle(event)
        for action in self.actions:
            if isinstance(action, StartGateway):
                self.number = action.number

    def listens(self, pid: int = 7) -> None:
        """It accepts connections."""
        self.do(GatewayListening(now=self.now, number=self.number, pid=pid, address=GIVEN))

    def beats(self) -> None:
        """Its event loop runs."""
        self.do(GatewayBeat(now=self.now, number=self.number))

    def ends(self, cause: str = "it died", *, is_crash: bool = True) -> None:
        """Its process is gone, or never was."""
        self.do(GatewayEnded(now=self.now, number=self.number, cause=cause, is_crash=is_crash))

    def waits(self, seconds: float) -> None:
        """Time passes, and the core is woken."""
        self.now += seconds
        self.do(Tick(now=self.now))

    def kinds(self) -> list[type[Action]]:
        """What the latest event led to, besides wake-ups."""
        return [type(action) for action in self.actions if not isinstance(action, WakeAt)]

    def status(self) -> dict[str, Any]:
        """What the status says of the gateway."""
        value: dict[str, Any] = self.core.status(self.now)["gateway"]
        return value


def test_gateway_starts_first_and_shows_its_address() -> None:
    driven = Driven()
    assert StartGateway(number=1, address=ADDRESS) in driven.actions
    assert (driven.status()["state"], driven.status()["pid"]) == ("starting", None)
    driven.listens()
    assert driven.status() == {
        "state": "listening", "address": "127.0.0.1:4000", "url": "http://127.0.0.1:4000",
        "pid": 7, "since_s": 0.0, "restarts": 0, "ends_in_a_row": 0, "cause": None,
        "retry_in_s": None,
    }  # fmt: skip


def test_the_first_death_after_it_listened_costs_no_connection() -> None:
    driven = Driven()
    driven.listens()
    driven.ends()
    assert driven.kinds() == [StartGateway], "its socket stays: who connects now waits"
    assert (driven.status()["restarts"], driven.status()["cause"]) == (1, "it died")


def test_later_deaths_wait_longer_and_longer_and_become_a_crash_loop() -> None:
    driven = Driven()
    delays = []
    for deaths in range(1, 9):
        driven.listens()
        driven.ends()
        status = driven.status()
        assert status["ends_in_a_row"] == deaths
        if deaths == 1:
            continue
        assert driven.kinds() == [CloseListener], "who connects now is refused"
        assert status["state"] == ("crash loop" if deaths >= LOOP_ENDS else "backoff")
        delays.append(status["retry_in_s"])
        driven.waits(status["retry_in_s"] - 0.01)
        assert driven.status()["retry_in_s"] == pytest.approx(0.01)
        assert driven.kinds() == []
        driven.waits(0.01)
        assert driven.kinds() == [StartGateway]
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_an_address_that_is_taken_is_tried_again_and_is_no_crash_loop() -> None:
    driven = Driven()
    for _ in range(5):
        driven.ends("the address is taken", is_crash=False)
        assert driven.kinds() == [CloseListener]
        assert driven.status()["state"] == "backoff"
        driven.waits(MOST_DELAY_S)
        assert driven.kinds() == [StartGateway]
    driven.listens()
    assert driven.status()["state"] == "listening"


def test_a_long_gateway_life_resets_its_delays() -> None:
    driven = Driven()
    for _ in range(4):
        driven.ends()
        driven.waits(MOST_DELAY_S)
    driven.listens()
    driven.now += STABLE_S
    driven.ends()
    assert driven.kinds() == [StartGateway]
    driven.listens()
    driven.ends()
    driven.waits(MOST_DELAY_S)
    driven.listens()
    for _ in range(int(STABLE_S)):
        driven.now += 1.0
        driven.beats()
    driven.waits(FROZEN_S)
    driven.ends()
    assert driven.kinds() == [StartGateway], "also if that is because it froze"


def test_silent_gateway_is_killed_and_replaced() -> None:
    driven = Driven()
    driven.listens()
    for _ in range(20):
        driven.waits(FROZEN_S - 0.01)
        assert driven.kinds() == []
        driven.beats()
    driven.waits(FROZEN_S - 0.01)
    assert driven.kinds() == []
    driven.waits(0.01)
    cause = f"it was frozen: no sign of life for {FROZEN_S:g} s"
    assert KillGateway(number=1, cause=cause) in driven.actions
    assert (driven.status()["state"], driven.status()["cause"]) == ("frozen", cause)
    driven.beats()  # of a loop that goes on in its last moment
    driven.waits(STABLE_S)
    assert driven.kinds() == [], "it is killed once"
    driven.ends("it ended with signal SIGKILL")
    assert driven.kinds() == [StartGateway], "at once, and its socket stays"
    assert (driven.status()["cause"], driven.status()["restarts"]) == (cause, 1)


def test_gateway_frozen_at_its_start_is_killed_and_retried() -> None:
    driven = Driven()
    driven.waits(START_LIMIT_S - 0.01)
    assert driven.kinds() == []
    driven.waits(0.01)
    assert driven.kinds() == [KillGateway]
    driven.ends()
    assert driven.kinds() == [CloseListener]
    assert driven.status()["cause"] == f"it did not listen within {START_LIMIT_S:g} s"


def test_gateway_is_not_restarted_while_the_daemon_ends() -> None:
    driven = Driven()
    driven.listens()
    driven.do(ShutdownAsked(now=driven.now, is_immediate=True))
    assert driven.kinds() == [Finish]
    driven.ends()
    assert driven.kinds() == []
    waiting = Driven()
    waiting.ends()
    waiting.do(ShutdownAsked(now=waiting.now, is_immediate=True))
    waiting.waits(MOST_DELAY_S)
    assert waiting.kinds() == []


def test_messages_of_an_earlier_gateway_are_ignored() -> None:
    driven = Driven()
    driven.listens()
    driven.ends()
    before = driven.status()
    for late in (
        GatewayListening(now=driven.now, number=1, pid=9, address=ADDRESS),
        GatewayEnded(now=driven.now, number=1, cause="late", is_crash=True),
        GatewayBeat(now=driven.now, number=1),
    ):
        driven.do(late)
        assert (driven.kinds(), driven.status()) == ([], before)


@hypothesis.settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.sampled_from(["listen", "beat", "crash", "refuse", "wait"]), st.floats(0, 90))
    )
)
def test_there_is_at_most_one_gateway_and_always_one_to_come(
    steps: list[tuple[str, float]],
) -> None:
    driven = Driven()
    alive = True
    for what, seconds in steps:
        if what == "wait":
            driven.waits(seconds)
        elif what == "listen" and alive:
            driven.listens()
        elif what == "beat":
            driven.beats()
        elif alive:
            driven.ends(is_crash=what == "crash")
            alive = False
        starts = driven.kinds().count(StartGateway)
        assert starts <= (0 if alive else 1)
        alive = alive or starts == 1
        retry_in_s = driven.status()["retry_in_s"]
        assert (retry_in_s is None) == alive
        assert alive or retry_in_s <= MOST_DELAY_S + ROUNDING_S
