"""The news of the daemon, for its log, its terminal, and the machine around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlxsup.protocol.flight import Entry, RequestEnded

from .core.actions import Announce, LogFault, RequestRefused, SetLogLevel
from .core.status import Outline
from .logs import DaemonLog
from .service_manager import ServiceManager
from .sleep import SleepGuard

OnChange = Callable[[dict[str, Any]], None]

SHOWN = ("model", "from", "to", "generation", "why", "note")


class Announcer:
    """Writes each change to the log, and passes it on to whom it concerns.

    Args:
        log: the daemon's log.
        on_change: called with each change of a model's state; with `gateway` (its URL) and `pid`
            when the gateway accepts connections; and with `stopping` (how many requests run) and
            `limit_s` (how long they may take) when a signal asks for the end.
        manager: the service manager that has started the daemon.
        sleep: decides whether the machine may sleep.
    """

    def __init__(
        self, log: DaemonLog, on_change: OnChange, manager: ServiceManager, sleep: SleepGuard
    ) -> None:
        self._log = log
        self._manager = manager
        self._sleep = sleep
        self._on_change = on_change

    def take(self, action: Announce | RequestRefused | SetLogLevel | Entry | LogFault) -> None:
        """Write what the core wants to be known, or change how much of it."""
        match action:
            case Announce(change=change):
                self.announce(change)
            case SetLogLevel(level=level):
                self._log.change_level(level)
                self._log.write("info", "log level changed", to=level)
            case Entry():
                self._log.flight.write(action)
                if isinstance(action, RequestEnded):
                    level = "warning" if action.warnings else "info"
                    self._log.write(level, "request ended", **facts_of(action))
            case LogFault(model=model, story=story):
                self._log.write("error", "no rule for an event", model=model)
                self._log.block("\n".join(story))
            case RequestRefused(id=id, model=model, outcome=outcome):
                self._log.write("debug", "request ended", id=id, model=model, outcome=outcome)

    def announce(self, change: dict[str, Any]) -> None:
        """Log and pass on the change of a model, as `core.actions.Announce` describes it."""
        is_new_state = change["from"] != change["to"]
        facts = {name: change[name] for name in SHOWN if change.get(name) not in (None, "")}
        model = facts.pop("model")
        self._log.write("info" if is_new_state else "debug", "model state", model=model, **facts)
        if change["batching"] is not None:
            self._log_ready(model, change)
        self._pass_on(change)

    def gateway_listens(self, url: str, pid: int) -> None:
        """Pass on that the gateway accepts connections."""
        self._pass_on({"gateway": url, "pid": pid})

    def ends(self, signal: str, running: int, limit_s: float) -> None:
        """Say that a signal asks for the end, how many requests run, and how long they may take."""
        self._log.write("info", "signal received", signal=signal)
        self._manager.stopping()
        self._pass_on({"stopping": running, "limit_s": limit_s})

    def reloads(self) -> None:
        """Say that the configuration is about to be read again."""
        self._manager.reloading()

    def reloaded(self, later: tuple[str, ...]) -> None:
        """Say that it is in effect, except for what takes effect at the next start."""
        self._log.write("info", "configuration reloaded", later=",".join(later) or "-")
        self._manager.reloaded(0)

    def reload_refused(self, problems: Sequence[str]) -> None:
        """Say that it is wrong, and nothing changes."""
        self._log.write("error", "reload refused", problems=len(problems))
        self._log.block("\n".join(problems))
        self._manager.reloaded(len(problems))

    def finishes(self) -> None:
        """Say that nothing is left to decide: processes end, and then the daemon itself."""
        self._manager.stopping()

    def pulse(self, look: Callable[[], Outline]) -> None:
        """Say every second that the daemon lives; `look` returns its outline."""
        outline = look()
        self._manager.pulse(outline)
        self._sleep.pulse(outline)

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


def facts_of(ended: RequestEnded) -> dict[str, Any]:
    """Return what the log says of a request that has ended, in order; nothing of its text."""
    usage, timings = ended.usage, ended.timings
    facts: dict[str, Any] = {
        "id": ended.id,
        "number": ended.number,
        "model": ended.model,
        "client": ended.client,
        "outcome": ended.outcome,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "queued_s": timings.queued_s,
        "first_token_s": timings.first_token_s,
        "total_s": timings.total_s,
        "engine_s": usage.engine_s,
    }
    if (rate := ended.tokens_per_s) is not None:
        facts["tokens_per_s"] = rate
    if ended.resumed:
        facts["resumed"] = ended.resumed
    if ended.paused:
        facts["paused"] = ended.paused
    if ended.warnings:
        facts["warnings"] = "; ".join(ended.warnings)
    return facts
