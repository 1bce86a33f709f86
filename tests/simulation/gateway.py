"""A gateway's lives under a core that has nothing else to do, and the oracle's own account of them.

It shares nothing with models and requests, so it has its own core: the runs of theirs stay as they
are.
"""

from __future__ import annotations

import random
from collections.abc import Callable

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
from mlxsup.supervisor.core.settings import CoreSettings

from .links import Timeline
from .violation import check

ADDRESS = Address(host="127.0.0.1", port=0)
GIVEN = Address(host="127.0.0.1", port=40_000)
MOST_ENDS = 12
STABLE_S = 60.0
BEAT_S, FROZEN_S, START_LIMIT_S = 1.0, 7.0, 60.0
FIRST_DELAY_S, MOST_DELAY_S = 0.5, 30.0
TICK_LATE_S, SLACK_S = 0.05, 0.1
EPSILON_S = 1e-6


class Gateways:
    """One run: a process that listens after a while, and dies or freezes now and then, or never
    gets its address; at some time the daemon ends.

    Args:
        seed: decides everything.
        count: is given what happened.
    """

    def __init__(self, seed: int, count: Callable[[str], None]) -> None:
        self._dice = random.Random(f"lives of the gateway of {seed}")
        self._count = count
        self._time = Timeline()
        self._core = Core(
            CoreSettings(), [], facts={}, random=random.Random(seed), is_strict=True,
            gateway=ADDRESS,
        )  # fmt: skip
        self._ends = 0
        self._is_ending = self._has_finished = False
        # The oracle's account.
        self._is_alive = self._is_closed = self._is_at_once = self._is_killed = False
        self._frozen_at: float | None = None
        self._number = 0
        self._listens_since: float | None = None
        self._ends_in_a_row = 0
        self._due_at: float | None = None

    def run(self) -> None:
        """Lives through it."""
        self._due_at, self._is_at_once = 0.0, True
        self._handle(Started(now=0.0))
        self._time.after(self._dice.uniform(0.0, 250.0), self._shut_down)
        while len(self._time):
            self._time.advance()
        check("the daemon ends", self._has_finished)

    def _shut_down(self) -> None:
        self._look()  # nothing else may have happened since something was due
        self._is_ending = True
        self._handle(ShutdownAsked(now=self._time.now, is_immediate=True))

    def _handle(self, event: Event) -> None:
        actions = self._core.handle(event)
        for action in actions:
            self._obey(action)
        self._look()

    def _obey(self, action: Action) -> None:
        match action:
            case StartGateway():
                self._check_start(action)
                self._start(action.number)
            case CloseListener():
                is_served = self._is_alive or self._is_at_once
                check("listener of a gateway closed", not is_served)
                self._is_closed = True
            case KillGateway(number=number):
                self._check_kill(number)
                self._time.after(self._dice.choice((0.0, 0.01, 5.0)), lambda: self._die(number))
            case WakeAt(when=when):
                late_s = self._dice.uniform(0.0, TICK_LATE_S)
                self._time.at(when + late_s, lambda: self._handle(Tick(now=self._time.now)))
            case Finish():
                self._has_finished = True

    # ------------------------------------------------------------ the process

    def _start(self, number: int) -> None:
        fate, delay_s = self._dice.random(), self._dice.choice((0.05, 0.3, 1.0))
        lives_s = self._dice.choice((0.0, 3.0, STABLE_S + 5.0))
        if self._ends >= MOST_ENDS:
            fate = 1.0
        if fate < 0.2:
            self._time.after(0.0, lambda: self._end(number, is_crash=False))
        elif fate < 0.35:
            self._time.after(delay_s, lambda: self._end(number, is_crash=True))
        elif fate < 0.4:
            self._frozen_at = self._time.now + START_LIMIT_S - FROZEN_S
        else:
            self._time.after(delay_s, lambda: self._listen(number))
            if fate < 0.7:
                self._time.after(delay_s + lives_s, lambda: self._end(number, is_crash=True))
            elif fate < 0.8:
                self._time.after(delay_s + lives_s, lambda: self._freeze(number))

    def _listen(self, number: int) -> None:
        now = self._time.now
        self._listens_since = now
        self._handle(GatewayListening(now=now, number=number, pid=number, address=GIVEN))
        self._time.after(BEAT_S, lambda: self._beat(number))

    def _beat(self, number: int) -> None:
        if self._number == number and self._is_alive and self._frozen_at is None:
            self._handle(GatewayBeat(now=self._time.now, number=number))
            if not self._has_finished:
                late_s = self._dice.choice((0.0, 0.0, 0.0, FROZEN_S - BEAT_S - SLACK_S))
                self._time.after(BEAT_S + late_s, lambda: self._beat(number))

    def _freeze(self, number: int) -> None:
        """Its latest beat, and then nothing more."""
        self._handle(GatewayBeat(now=self._time.now, number=number))
        self._frozen_at = self._time.now

    def _die(self, number: int) -> None:
        if self._is_alive:
            self._end(number, is_crash=True)

    def _end(self, number: int, *, is_crash: bool) -> None:
        if self._number != number or not self._is_alive:
            return  # it was killed meanwhile
        now = self._time.now
        self._ends += 1
        since, self._listens_since = self._listens_since, None
        until = now if self._frozen_at is None else self._frozen_at
        self._frozen_at, self._is_killed = None, False
        if since is not None and until - since >= STABLE_S:
            self._ends_in_a_row = 0
        self._ends_in_a_row += 1
        self._is_alive = self._is_closed = False
        self._is_at_once = since is not None and self._ends_in_a_row == 1
        delay_s = min(MOST_DELAY_S, FIRST_DELAY_S * 2.0 ** (self._ends_in_a_row - 1))
        self._due_at = now + (0.0 if self._is_at_once else delay_s)
        self._count("gateway ended")
        self._handle(GatewayEnded(now=now, number=number, cause="died", is_crash=is_crash))

    # ------------------------------------------------------------ the oracle

    def _check_start(self, action: StartGateway) -> None:
        """It is wanted, it is not there, and its time has come."""
        check("gateway unasked", action.address == ADDRESS, action)
        check("gateway twice", not self._is_alive, action)
        check("gateway after the end", not self._is_ending, action)
        is_due = self._due_at is not None and self._time.now >= self._due_at - EPSILON_S
        check("gateway without delay", is_due, self._due_at)
        self._is_alive, self._due_at, self._is_at_once = True, None, False
        self._number = action.number
        self._count("gateway started")

    def _check_kill(self, number: int) -> None:
        """It is frozen, and for long enough."""
        check("gateway killed that lives", self._frozen_at is not None, number)
        silent_s = self._time.now - (self._frozen_at or 0.0)
        check("gateway killed early", silent_s >= FROZEN_S - EPSILON_S, silent_s)
        check("gateway killed twice", not self._is_killed, number)
        self._is_killed = True
        self._count("gateway killed")

    def _look(self) -> None:
        """What is due was done."""
        if self._frozen_at is not None and not self._is_killed and not self._is_ending:
            frozen_s = self._time.now - self._frozen_at
            check("gateway left frozen", frozen_s <= FROZEN_S + SLACK_S, frozen_s)
        if self._due_at is None or self._is_ending:
            return
        check("gateway not at once", not self._is_at_once, self._due_at)
        check("gateway is missing", self._time.now <= self._due_at + SLACK_S, self._due_at)
        check("listener left open", self._is_closed, self._due_at)
