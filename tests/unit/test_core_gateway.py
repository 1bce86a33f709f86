"""The gateway's process: when it is started, when again, and what the status says of it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.gateway import Address
from mlxsup.supervisor.core.actions import (
    Action,
    CloseListener,
    Finish,
    KillGateway,
    StartGateway,
    WakeAt,
)
from mlxsup.supervisor.core.core import Core
from mlxsup.supervisor.core.events import (
    Event,
    GatewayBeat,
    GatewayEnded,
    GatewayListening,
    ShutdownAsked,
    Started,
    Tick,
)
from mlxsup.supervisor.core.gateway import (
    FROZEN_S,
    LOOP_ENDS,
    MOST_DELAY_S,
    STABLE_S,
    START_LIMIT_S,
)
from mlxsup.supervisor.core.settings import CoreSettings

from support.core_driver import entry

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

    def do(self, event: Event) -> None:
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


def test_without_an_address_there_is_none() -> None:
    driven = Driven(None)
    assert driven.kinds() == []
    assert driven.core.status(driven.now)["gateway"] is None


def test_it_is_started_first_and_its_address_is_the_one_that_it_was_given() -> None:
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


def test_a_long_life_makes_the_next_death_the_first() -> None:
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


def test_one_whose_loop_beats_is_left_alone_and_one_that_is_silent_is_killed_and_replaced() -> None:
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


def test_one_that_freezes_again_and_again_is_in_a_crash_loop() -> None:
    driven = Driven()
    for deaths in range(1, LOOP_ENDS + 1):
        driven.listens()
        driven.waits(FROZEN_S)
        driven.ends()
        assert driven.status()["ends_in_a_row"] == deaths
        driven.waits(driven.status()["retry_in_s"] or 0.0)
    driven.listens()
    driven.waits(FROZEN_S)
    driven.ends()
    assert driven.status()["state"] == "crash loop"


def test_one_that_freezes_while_it_starts_is_killed_and_tried_again_later() -> None:
    driven = Driven()
    driven.waits(START_LIMIT_S - 0.01)
    assert driven.kinds() == []
    driven.waits(0.01)
    assert driven.kinds() == [KillGateway]
    driven.ends()
    assert driven.kinds() == [CloseListener]
    assert driven.status()["cause"] == f"it did not listen within {START_LIMIT_S:g} s"


def test_while_the_daemon_ends_it_is_not_started_again() -> None:
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


def test_what_an_earlier_process_says_changes_nothing() -> None:
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


@given(
    st.lists(
        st.tuples(st.sampled_from(["listen", "beat", "crash", "refuse", "wait"]), st.floats(0, 90))
    )
)
def test_there_is_never_more_than_one_and_always_one_to_come(
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
