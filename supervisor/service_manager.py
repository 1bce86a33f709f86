"""What a service manager that has started the daemon learns of it, by systemd's sd_notify(3).

The watchdog is fed by the event loop: a thread would say that all is well while the loop stands
still. Nothing waits for the service manager; a message that is lost is lost.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.states import State

from .core.status import Outline

SOCKET_VARIABLE = "NOTIFY_SOCKET"
WATCHDOG_VARIABLE = "WATCHDOG_USEC"
WATCHDOG_PID_VARIABLE = "WATCHDOG_PID"

EXTEND_S = 60.0
"""A daemon that ends says each second that it may take this much longer. What comes after its last
word (clients' last messages, logs) takes less."""

MAX_NAMES = 8
"""How many models a status names; systemd ignores messages of more than 4096 bytes."""

LEAST_WATCHDOG_S = 2.0
"""A daemon that says something each second may miss a shorter interval."""

MAX_SHOWN = 40
"""How much of a variable that makes no sense is shown."""

_INTERVAL = re.compile(r"[0-9]{1,15}")
"""Microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogTrouble:
    """Why a watchdog may end a daemon that is well.

    Attributes:
        is_fed: whether it is fed at all.
        cause: what is wrong.
        hint: the next step.
    """

    is_fed: bool
    cause: str
    hint: str


class ServiceManager:
    """The service manager at `NOTIFY_SOCKET`, if there is one; nothing that fails here matters.

    Everything is sent from the supervisor's one thread, between two events: a daemon whose loop is
    stuck says nothing, so the manager's watchdog ends it.

    Args:
        address: the path of a socket, or `@` and an abstract name; empty: there is no manager.
        watchdog_s: it ends a daemon from which it has heard nothing for this long; 0: never.
        monotonic: seconds of CLOCK_MONOTONIC.
        trouble: what is wrong with the watchdog.

    Attributes:
        trouble: the same; None if nothing is.
    """

    def __init__(
        self,
        address: str = "",
        watchdog_s: float = 0.0,
        monotonic: Callable[[], float] = time.monotonic,
        trouble: WatchdogTrouble | None = None,
    ) -> None:
        self.trouble = trouble
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._ping_interval_s = watchdog_s / 2
        self._monotonic = monotonic
        self._next_ping_at = monotonic()
        self._status = ""
        self._refusal = ""
        self._is_stopping = False

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> ServiceManager:
        """Return the manager that the environment names, and remove its variables there: they are
        for this process, and not for those that it starts."""
        address = environment.pop(SOCKET_VARIABLE, "")
        interval = environment.pop(WATCHDOG_VARIABLE, "")
        pid = environment.pop(WATCHDOG_PID_VARIABLE, str(os.getpid()))
        address = address if address.startswith(("/", "@")) else ""
        trouble = _trouble(address, interval, pid)
        is_fed = interval and (trouble is None or trouble.is_fed)
        return cls(address, int(interval) / 1e6 if is_fed else 0.0, trouble=trouble)

    def ready(self) -> None:
        """Say that the configuration has been read, and clients can connect."""
        self._send("READY=1", "STATUS=ready")

    def pulse(self, outline: Outline) -> None:
        """Say every second what is served, and feed the watchdog."""
        if outline.is_ending or self._is_stopping:
            self.stopping()
        else:
            self._say(summary(outline.states))
        if self._ping_interval_s and self._monotonic() >= self._next_ping_at:
            self._next_ping_at = self._monotonic() + self._ping_interval_s
            self._send("WATCHDOG=1")

    def reloading(self) -> None:
        """Say that the configuration is about to be read again."""
        if not self._is_stopping:
            self._send("RELOADING=1", f"MONOTONIC_USEC={self._monotonic() * 1e6:.0f}")

    def reloaded(self, problems: int) -> None:
        """Say that it was read, and is in effect unless it has problems."""
        if self._is_stopping:
            return
        mistakes = f"{problems} mistake{'' if problems == 1 else 's'}"
        self._refusal = f"reload refused: the configuration has {mistakes}" if problems else ""
        self._status = self._refusal or "reloaded"
        self._send("READY=1", f"STATUS={self._status}")

    def stopping(self) -> None:
        """Say once that the daemon was asked to end, and each time that it may take longer."""
        if not self._is_stopping:
            self._is_stopping = True
            self._send("STOPPING=1", "STATUS=stopping")
        self._send(f"EXTEND_TIMEOUT_USEC={EXTEND_S * 1e6:.0f}")

    def _say(self, text: str) -> None:
        """Send a line for people, if it is another one than before."""
        said = "; ".join(filter(None, (text, self._refusal)))
        if said != self._status:
            self._status = said
            self._send(f"STATUS={said}")

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        with (
            contextlib.suppress(OSError),  # such as when no file is free
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
        ):
            sender.setblocking(False)  # a manager that does not read must not hold up streams
            sender.sendto("\n".join(lines).encode("utf-8", "replace"), self._address)


def _trouble(address: str, interval: str, pid: str) -> WatchdogTrouble | None:
    """Return what is wrong with a watchdog; None if nothing is, or if there is none.

    Args:
        address: of the manager's socket; empty if none is named.
        interval: of the watchdog; empty if there is none.
        pid: of the process that it watches.
    """
    if not interval:
        return None
    if not _INTERVAL.fullmatch(interval):
        return WatchdogTrouble(
            is_fed=False,
            cause=f"{WATCHDOG_VARIABLE} is {interval[:MAX_SHOWN]!r}",
            hint="it takes microseconds, such as 10000000",
        )
    if pid != str(os.getpid()):
        return WatchdogTrouble(
            is_fed=False,
            cause=f"{WATCHDOG_PID_VARIABLE} names process {pid[:MAX_SHOWN]}, this is {os.getpid()}",
            hint="if this daemon is the watched one, as in a container, start it with `exec` or "
            f"unset {WATCHDOG_PID_VARIABLE}",
        )
    if not address:
        return WatchdogTrouble(
            is_fed=False,
            cause=f"{SOCKET_VARIABLE} is not set to a socket",
            hint="pass it on to the daemon, or switch the watchdog off",
        )
    if 0 < int(interval) < LEAST_WATCHDOG_S * 1e6:
        return WatchdogTrouble(
            is_fed=True,
            cause=(
                f"it would end the daemon after {int(interval) / 1000000.0:g} s without a sign of "
                "life"
            ),
            hint=f"set WatchdogSec to {LEAST_WATCHDOG_S:g} s or more: it is fed once a second",
        )
    return None


def summary(states: tuple[tuple[ModelName, State], ...]) -> str:
    """Return how many models are in each state, and which have FAILED; one line."""
    names_in = {state: [name for name, its in states if its is state] for state in State}
    parts = [f"{len(names)} {state.value}" for state, names in names_in.items() if names]
    if failed := names_in[State.FAILED]:
        more = ["…"] if len(failed) > MAX_NAMES else []
        parts[-1] += f" ({', '.join([*failed[:MAX_NAMES], *more])})"
    return ", ".join(parts) or "no models"
