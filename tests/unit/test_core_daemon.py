"""Test the daemon as a whole: wake-ups, slow clients, log level, outline, gateway."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from mlxsup.protocol.client_messages import Event, Subscribe
from mlxsup.protocol.download import Repository
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.gateway import Address
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.states import FinishReason, State
from mlxsup.protocol.worker_messages import LogLevel
from mlxsup.supervisor.core.actions import (
    Action,
    CloseListener,
    Finish,
    KillGateway,
    SendToWorker,
    SetLogLevel,
    StartGateway,
    WakeAt,
)
from mlxsup.supervisor.core.core import Core
from mlxsup.supervisor.core.events import (
    ClientTooSlow,
    GatewayBeat,
    GatewayEnded,
    GatewayListening,
    Reloaded,
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
from mlxsup.supervisor.core.settings import CoreSettings, ModelSettings

from support.core.driver import Driver, entry
from support.core.looks import ALICE, BOB
from support.core.scripts import play
from support.core.states import in_state

# Wake-ups and clients


def test_a_wake_up_is_asked_for_once_and_again_only_if_it_is_to_be_earlier() -> None:
    driver = Driver()
    load_stalls_at = 1020.0
    events: list[tuple[Callable[[], object], list[float]]] = [
        (lambda: driver.ask("a", timeout_s=50.0), [load_stalls_at]),
        (lambda: driver.ask("b", timeout_s=30.0), []),
        (lambda: driver.ask("c", timeout_s=10.0), [1010.0]),
        (lambda: driver.cancel("c"), []),  # the earlier one stands
        (lambda: driver.do(Tick(now=1010.0)), [load_stalls_at]),
    ]
    for event, woken_at in events:
        event()
        assert [wake.when for wake in driver.of(WakeAt)] == woken_at


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


# Log level


def change(driver: Driver, level: str, *models: ModelSettings) -> dict[str, str]:
    """Changes it by a reload; returns what each worker is sent."""
    settings = CoreSettings(log_level=level)
    driver.do(Reloaded(now=driver.now, settings=settings, models=models))
    return told(driver)


def told(driver: Driver) -> dict[str, str]:
    sent = [one for one in driver.of(SendToWorker) if isinstance(one.message, LogLevel)]
    return {str(one.model): one.message.level for one in sent if isinstance(one.message, LogLevel)}


def test_log_level_reaches_workers_at_once_or_when_ready() -> None:
    models = [entry("serves"), entry("loads"), entry("rests")]
    driver = Driver(models)
    driver.load("serves")
    driver.come_up("serves")
    assert told(driver) == {}, "as it was started"
    driver.load("loads")
    driver.spawned("loads")
    driver.hello("loads")
    assert change(driver, "debug", *models) == {"serves": "debug"}
    assert [action.level for action in driver.of(SetLogLevel)] == ["debug"]
    driver.ready("loads")
    assert told(driver) == {"loads": "debug"}
    assert change(driver, "debug", *models) == {}, "nothing has changed"
    assert driver.of(SetLogLevel) == []
    assert change(driver, "error", *models) == {"serves": "error", "loads": "error"}


def test_a_worker_that_is_asked_to_end_before_it_is_ready_is_told_nothing() -> None:
    driver = Driver()
    driver.load()
    driver.spawned()
    driver.hello()
    change(driver, "debug", entry())
    driver.unload()
    driver.ready()
    assert told(driver) == {}


# Outline for the service manager


def is_busy(driver: Driver) -> bool:
    return driver.core.outline().is_busy


def is_idle(driver: Driver) -> bool:
    return not is_busy(driver)


def test_loads_and_unpaused_requests_are_work() -> None:
    busy, idle = "is_busy -> returns=True;", "is_idle -> returns=True;"
    driver = play(
        Driver(),
        f"{idle} load; {busy} up; {idle} ask; accept 1; pause; {busy} row_left 1; {idle} resume;"
        f" {busy} cancel; {idle}",
        is_busy,
        is_idle,
    )
    assert driver.core.outline().states == (("m", State.READY),)


def test_a_download_is_work() -> None:
    driver = Driver([entry(download=Repository("org/tiny"))])
    driver.load()
    assert driver.core.outline().states == (("m", State.PENDING),)
    assert is_busy(driver)


# The gateway process

ADDRESS = Address(host="127.0.0.1", port=0)
GIVEN = Address(host="127.0.0.1", port=4000)


class Driven:
    """A core with a gateway; the test plays the gateway's process."""

    def __init__(self) -> None:
        self.now = 100.0
        self.core = Core(
            CoreSettings(), [entry()], facts={}, random=random.Random(1), is_strict=True,
            gateway=ADDRESS,
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

    def listens(self) -> None:
        """It accepts connections."""
        self.do(GatewayListening(now=self.now, number=self.number, pid=7, address=GIVEN))

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
    status = driven.status()
    assert (status["restarts"], status["cause"], status["pid"]) == (1, "it died", None)


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
        assert (driven.kinds(), driven.status()["retry_in_s"]) == ([StartGateway], None)
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_an_address_that_is_taken_is_no_crash_loop() -> None:
    driven = Driven()
    for _ in range(LOOP_ENDS + 1):
        driven.ends("it is taken", is_crash=False)
        assert driven.status()["state"] == "backoff"
        driven.waits(MOST_DELAY_S)


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
    assert KillGateway(cause=cause) in driven.actions
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
