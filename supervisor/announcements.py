"""Changes of models, and ends of requests, for the log and for the terminal of the daemon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .core.actions import Announce, RequestEnded, SetLogLevel
from .logs import DaemonLog

OnChange = Callable[[dict[str, Any]], None]

SHOWN = ("model", "from", "to", "generation", "why", "note")


class Announcer:
    """Writes each change to the log, and passes it on.

    Args:
        log: the daemon's log.
        on_change: called with each change of a model's state; with `gateway` (its URL) and `pid`
            when the gateway accepts connections; and with `stopping` (how many requests run) and
            `limit_s` (how long they may take) when a signal asks for the end.
    """

    def __init__(self, log: DaemonLog, on_change: OnChange) -> None:
        self._log = log
        self._on_change = on_change

    def take(self, action: Announce | RequestEnded | SetLogLevel) -> None:
        """A model has changed, a request has ended, or other lines are wanted from now on."""
        if isinstance(action, Announce):
            self.announce(action.change)
        elif isinstance(action, SetLogLevel):
            self._log.change_level(action.level)
            self._log.write("info", "log level changed", to=action.level)
        else:
            self._log.write(
                "info" if not action.is_refused else "debug", "request ended", **action.facts
            )

    def announce(self, change: dict[str, Any]) -> None:
        """A model has changed, as `core.actions.Announce` describes it."""
        is_new_state = change["from"] != change["to"]
        facts = {name: change[name] for name in SHOWN if change.get(name) not in (None, "")}
        model = facts.pop("model")
        self._log.write("info" if is_new_state else "debug", "model state", model=model, **facts)
        if change["batching"] is not None:
            self._log_ready(model, change)
        self._pass_on(change)

    def gateway_listens(self, url: str, pid: int) -> None:
        """The gateway accepts connections."""
        self._pass_on({"gateway": url, "pid": pid})

    def ends(self, running: int, limit_s: float) -> None:
        """A signal asks for the end: how many requests run, and how long they may take."""
        self._pass_on({"stopping": running, "limit_s": limit_s})

    def _pass_on(self, change: dict[str, Any]) -> None:
        try:
            self._on_change(change)
        except OSError as error:  # a terminal or a pipe that is gone must not end the daemon
            self._log.write("warning", "status output disabled", error=error.strerror)
            self._on_change = lambda change: None

    def _log_ready(self, model: str, change: dict[str, Any]) -> None:
        batching = change["batching"]
        reason = {"reason": batching["reason"]} if batching["reason"] else {}
        took = {f"{phase}_s": seconds for phase, seconds in change["load_phases_s"].items()}
        facts = {"batching": batching["mode"], **reason, **took}
        self._log.write("info", "model ready", model=model, **facts)
        for warning in change["warnings"]:
            self._log.write("warning", "model warning", model=model, warning=warning)
