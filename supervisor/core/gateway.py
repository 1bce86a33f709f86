"""The start of the gateway, and its restart after it has ended.

It serves no request of the core's: to the core it is one more client. So it has no part in memory,
in turns or in drains, and it ends last, when the shell does.

It is never given up, because no command would start it again. Its event loop beats through a pipe:
a request for `/health` could be starved by clients that fill the backlog, and a healthy gateway
would be killed for it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from mlxsup.protocol.gateway import Address

from .accounting import Terms
from .actions import CloseListener, Housekeeping, KillGateway, Outbox, StartGateway

FIRST_DELAY_S = 0.5
MOST_DELAY_S = 30.0
"""Until the next attempt; doubled each time in between."""

STABLE_S = 60.0
"""The end of one that has listened for this long starts the delay afresh."""

LOOP_ENDS = 3
"""After this many crashes in a row it is in a crash loop."""


FROZEN_S = 7.0
"""Without a beat of its event loop for this long it is killed; beats come every second. The
supervisor's clock leaves out the time in which that did not run itself."""

START_LIMIT_S = 60.0
"""From its start to its first beat."""


class GatewayState(StrEnum):
    """The states of the gateway."""

    STARTING = "starting"
    LISTENING = "listening"
    FROZEN = "frozen"
    """Its loop does nothing, and it was killed; usually gone within milliseconds."""
    BACKOFF = "backoff"
    CRASH_LOOP = "crash loop"


class Gateway:
    """The gateway's process, if the configuration has one.

    Args:
        address: where it listens; None: there is none.
        terms: of accounts, which depend on its process.
    """

    def __init__(self, address: Address | None, terms: Terms, outbox: Outbox) -> None:
        self._address = address
        self._shown: Address | None = address
        self._terms = terms
        self._outbox = outbox
        self._state = GatewayState.STARTING
        self._since = 0.0
        self._number = 0
        self._ends_in_a_row = 0
        self._crashes_in_a_row = 0
        self._cause: str | None = None
        self._retry_at: float | None = None

    def start(self, now: float) -> None:
        """Start it: the supervisor is up, or the time of the next attempt has come."""
        if self._address is None:
            return
        self._number += 1
        self._retry_at = None
        self._enter(GatewayState.STARTING, now)
        self._outbox.deadlines.set(Housekeeping.GATEWAY, now + START_LIMIT_S)
        self._outbox.add(StartGateway(number=self._number, address=self._address))

    def listening(self, number: int, pid: int, address: Address, now: float) -> None:
        """Note that its process accepts connections.

        Args:
            number: of the attempt.
            address: with the port that it was given.
        """
        if number == self._number and self._state is GatewayState.STARTING:
            self._terms.gateway_pid, self._shown = pid, address
            self._enter(GatewayState.LISTENING, now)
            self.beat(number, now)

    def beat(self, number: int, now: float) -> None:
        """Note that its event loop runs; `number` is that of the attempt."""
        if number == self._number and self._state is GatewayState.LISTENING:
            self._outbox.deadlines.set(Housekeeping.GATEWAY, now + FROZEN_S)

    def due(self, now: float) -> None:
        """Act on the time of the next attempt, or on a sign of life that has not come."""
        match self._state:
            case GatewayState.STARTING:
                self._kill(f"it did not listen within {START_LIMIT_S:g} s", now)
            case GatewayState.LISTENING:
                if now - self._since >= STABLE_S:
                    self._ends_in_a_row = self._crashes_in_a_row = 0
                self._kill(f"it was frozen: no sign of life for {FROZEN_S:g} s", now)
            case _:
                self.start(now)

    def _kill(self, cause: str, now: float) -> None:
        self._cause = cause
        self._enter(GatewayState.FROZEN, now)
        self._outbox.add(KillGateway(cause=cause))

    def ended(
        self, number: int, cause: str, now: float, *, is_crash: bool, is_ending: bool
    ) -> None:
        """Handle the end of its process, or that it could not be started.

        Args:
            number: of the attempt.
            cause: one phrase for people.
            is_crash: whether there was a process; otherwise its address could not be had.
            is_ending: whether the daemon is ending, so that none is started again.
        """
        if number != self._number:
            return
        was_frozen = self._state is GatewayState.FROZEN
        has_listened = self._terms.gateway_pid is not None
        if self._state is GatewayState.LISTENING and now - self._since >= STABLE_S:
            self._ends_in_a_row = self._crashes_in_a_row = 0
        self._ends_in_a_row += 1
        self._crashes_in_a_row = self._crashes_in_a_row + 1 if is_crash else 0
        self._terms.gateway_pid, self._cause = None, self._cause if was_frozen else cause
        self._outbox.deadlines.set(Housekeeping.GATEWAY, None)
        is_loop = self._crashes_in_a_row >= LOOP_ENDS
        self._enter(GatewayState.CRASH_LOOP if is_loop else GatewayState.BACKOFF, now)
        if is_ending:
            return
        if has_listened and self._ends_in_a_row == 1:
            self.start(now)
            return
        # A client that is refused knows more than one that waits for a gateway that does not come.
        self._outbox.add(CloseListener())
        delay_s = min(MOST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(self._ends_in_a_row - 1, 16))
        self._retry_at = now + delay_s
        self._outbox.deadlines.set(Housekeeping.GATEWAY, self._retry_at)

    def status(self, now: float) -> dict[str, Any] | None:
        """Return what the status says about it; None if there is none."""
        if self._shown is None:
            return None
        is_up = self._state is GatewayState.LISTENING
        return {
            "state": self._state.value,
            "address": str(self._shown),
            "url": self._shown.url,
            "pid": self._terms.gateway_pid,
            "since_s": now - self._since,
            "restarts": max(0, self._number - 1),
            "ends_in_a_row": 0 if is_up else self._ends_in_a_row,
            "cause": self._cause,
            "retry_in_s": None if self._retry_at is None else max(0.0, self._retry_at - now),
        }

    def _enter(self, state: GatewayState, now: float) -> None:
        self._state, self._since = state, now
