"""Turns a worker's messages, and events of its process, into triggers for its model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import assert_never

from mlxsup.protocol.states import HAS_PROCESS, SERVES
from mlxsup.protocol.version import VERSION
from mlxsup.protocol.worker_messages import (
    Accepted,
    Dying,
    Heartbeat,
    Hello,
    LoadProgress,
    Ready,
    Rejected,
    Rendered,
    Step,
    WorkerMessage,
)

from .events import (
    Exited,
    FilesSeen,
    Spawned,
    SpawnFailed,
    WorkerBroke,
    WorkerSaid,
    WorkerSeen,
    WorkerUnlinked,
)
from .fleet import Fleet
from .kv_budget import keeps_to
from .memory import loaded_problem
from .model import Model, Residency
from .states import Abandoned, Died, Loading, StopCause
from .transitions import classify
from .watchdog import Watch

MAX_LAST_WORDS = 200
ROUTINE = re.compile(
    r"\S+Z (DEBUG|INFO|WARNING) |Extension modules:|(Current t|T)hread 0x|Stack \(most recent"
    r"|\s*(File|Binary file) \".*\",? |\s*<"
)
"""Lines that say nothing about a death: logs below an error, and what a fault handler lists."""

WorkerEvent = (
    Spawned
    | SpawnFailed
    | WorkerSaid
    | WorkerSeen
    | FilesSeen
    | WorkerBroke
    | WorkerUnlinked
    | Exited
)


def take(fleet: Fleet, event: WorkerEvent) -> None:
    """Handle one event; ignore those of earlier generations (F9)."""
    model = fleet.by_name.get(event.model)
    if model is None or event.generation != model.life.generation:
        return
    is_abandoned = isinstance(model.life.phase, Abandoned)
    if not (model.life.state in HAS_PROCESS or (is_abandoned and isinstance(event, Exited))):
        return
    watch, now = model.process.watch, event.now
    match event:
        case WorkerSaid(message=message):
            if watch is not None and not isinstance(message, Heartbeat):
                watch.said(now)
            _said(fleet, model, message, now)
        case Spawned():
            model.process.watch = Watch.over(now)
            fleet.trigger(model, event, now)
        case SpawnFailed(detail=detail):
            said = f"could not be started: {detail}"
            died = Died(exit_code=None, signal_name="", said=said, is_spawn_error=True)
            fleet.handle_exit(model, died, now)
        case WorkerSeen(is_stopped=is_stopped):
            if watch is not None:
                watch.looked(is_stopped=is_stopped, now=now)
                fleet.look_after(model, now)
        case FilesSeen(change=change):
            fleet.files_seen(model, change, now)
        case WorkerBroke(is_other_version=True):
            _is_of_other_version(fleet, model, "another one", now)
        case WorkerBroke(detail=detail):
            fleet.fault(model, StopCause.BROKEN, detail, now)
        case WorkerUnlinked():
            if watch is not None:
                watch.unlinked(now)
                fleet.touch(model)
                fleet.look_after(model, now)
        case Exited():
            _exited(fleet, model, event)
        case _:
            assert_never(event)


def _exited(fleet: Fleet, model: Model, event: Exited) -> None:
    died = Died(
        exit_code=event.exit_code,
        signal_name=event.signal_name,
        said=model.process.dying or last_words(event.last_lines),
        announced=model.process.dying,
        at=event.at,
        cause=classify(
            event.exit_code,
            [*event.last_lines, model.process.dying],
            is_over_memory=event.signal_name == "SIGKILL" and model.is_over_memory,
        ),
    )
    fleet.handle_exit(model, died, event.now)


def last_words(lines: Sequence[str]) -> str:
    """Return the line of a worker's output that may be a cause: a fault handler's name for it, or
    the last line that is neither a routine log nor the end of such a report."""
    for line in reversed(lines):
        if line.startswith("Fatal Python error:"):
            return line.strip()[:MAX_LAST_WORDS]
    for line in reversed(lines):
        if line.strip() and not ROUTINE.match(line):
            return line.strip()[:MAX_LAST_WORDS]
    return ""


# ---------------------------------------------------------------- what it says


def _said(fleet: Fleet, model: Model, message: WorkerMessage, now: float) -> None:
    match message:
        case Step():
            _step(fleet, model, message, now)
        case Heartbeat():
            model.process.heartbeat = message
            if keeps_to(model, message.budget):
                fleet.memory_changed()
                fleet.touch(model)
            if model.process.watch is not None:
                model.process.watch.beat(message, len(model.batch.held), now)
                fleet.look_after(model, now)
        case Accepted():
            fleet.serving.accepted(model, message, now)
        case Rejected(key=key, error=error):
            fleet.serving.rejected(model, key, error, now)
            fleet.touch(model)
        case Rendered():
            fleet.attaching.rendered(model, message)
        case Hello(version=version) if version != VERSION:
            _is_of_other_version(fleet, model, version, now)
        case Hello() if model.life.state in SERVES:
            fleet.fault(model, StopCause.BROKEN, "said HELLO after READY", now)
        case Hello():
            fleet.trigger(model, message, now)
        case LoadProgress() if model.life.state in SERVES:
            fleet.fault(model, StopCause.BROKEN, "reported a load after READY", now)
        case LoadProgress():
            fleet.trigger(model, message, now)
        case Ready() if model.life.state in SERVES:
            fleet.fault(model, StopCause.BROKEN, "said READY twice", now)
        case Ready():
            _ready(fleet, model, message, now)
        case Dying():
            model.process.dying = message.message
        case _:
            assert_never(message)


def _step(fleet: Fleet, model: Model, message: Step, now: float) -> None:
    if message.step not in (model.process.steps, model.process.steps + 1):
        detail = f"counted step {message.step} after step {model.process.steps}"
        fleet.fault(model, StopCause.BROKEN, detail, now)
        return
    fault = fleet.prefill_slots.stepped(model, message)
    if fault:
        fleet.fault(model, StopCause.BROKEN, fault, now)
        return
    if model.process.watch is not None:
        model.process.watch.stepped(message.step, now)
    fleet.attaching.heard(message.rows)
    if fleet.serving.step(model, message, now):
        fleet.touch(model)


def _ready(fleet: Fleet, model: Model, message: Ready, now: float) -> None:
    too_large = loaded_problem(model.life.need, message)
    if too_large:
        fleet.fault(model, StopCause.TOO_LARGE, too_large, now)
        return
    if isinstance(model.life.phase, Loading):
        model.learn(message)
        model.idle_since = now
        model.load_s = now - model.life.phase.since
        model.process.residency = Residency(ready_at=now, tokens_before=model.totals.tokens)
    fleet.trigger(model, message, now)
    fleet.tell_log_level(model)


def _is_of_other_version(fleet: Fleet, model: Model, version: str, now: float) -> None:
    detail = f"mlxsup was upgraded to {version}; restart the daemon"
    fleet.fault(model, StopCause.VERSION, detail, now)
