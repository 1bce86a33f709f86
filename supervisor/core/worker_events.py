"""Turns a worker's messages, and events of its process, into triggers for its model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import assert_never

from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.launch import ExitCode
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
)

from .attaching import Attaching
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
from .health.death_cause import classify
from .health.watchdog import Watch
from .kv_budget import keeps_to, longest_stream
from .lifecycle.states import Abandoned, Loading
from .lifecycle.triggers import (
    BecameReady,
    Broke,
    Died,
    FilesCompared,
    Greeted,
    GreetedByOtherVersion,
    HasPid,
    LoadedTooLarge,
    Progressed,
)
from .memory.need import loaded_problem
from .model import Model, Residency
from .prefill_slots import PrefillSlots
from .serving import Serving

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


class WorkerEvents:
    """Handles every event of a process.

    Args:
        fleet: the models that the processes belong to.
        serving: moves their requests.
        prefill_slots: has them read long prompts in turns.
        attaching: sends streams to those who have joined them.
    """

    def __init__(
        self,
        fleet: Fleet,
        serving: Serving,
        prefill_slots: PrefillSlots,
        attaching: Attaching,
    ) -> None:
        self._fleet = fleet
        self._serving = serving
        self._prefill_slots = prefill_slots
        self._attaching = attaching

    def take(self, event: WorkerEvent) -> None:
        """Handle one event; ignore those of earlier generations (F9)."""
        model = self._fleet.by_name.get(event.model)
        if model is None or event.generation != model.life.generation:
            return
        is_abandoned = isinstance(model.life.phase, Abandoned)
        if model.life.state in HAS_PROCESS or (is_abandoned and isinstance(event, Exited)):
            self._heard(event, model)

    def _heard(self, event: WorkerEvent, model: Model) -> None:
        match event:
            case WorkerSaid():
                self._on_said(event, model)
            case Spawned():
                self._on_spawned(event, model)
            case SpawnFailed():
                self._on_spawn_failed(event, model)
            case WorkerSeen():
                self._on_seen(event, model)
            case FilesSeen(change=change, now=now):
                self._fleet.trigger(model, FilesCompared(change=change), now)
            case WorkerBroke():
                self._on_broke(event, model)
            case WorkerUnlinked():
                self._on_unlinked(event, model)
            case Exited():
                self._on_exited(event, model)
            case _:
                assert_never(event)

    # ------------------------------------------------------------ about its process

    def _on_spawned(self, event: Spawned, model: Model) -> None:
        model.process.watch = Watch.over(event.now)
        self._fleet.trigger(model, HasPid(pid=event.pid), event.now)

    def _on_spawn_failed(self, event: SpawnFailed, model: Model) -> None:
        said = f"could not be started: {event.detail}"
        died = Died(exit_code=None, signal_name="", said=said, is_spawn_error=True)
        self._fleet.handle_exit(model, died, event.now)

    def _on_seen(self, event: WorkerSeen, model: Model) -> None:
        if model.process.watch is not None:
            model.process.watch.looked(is_stopped=event.is_stopped, now=event.now)
            self._fleet.look_after(model, event.now)

    def _on_unlinked(self, event: WorkerUnlinked, model: Model) -> None:
        if model.process.watch is not None:
            model.process.watch.unlinked(event.now)
            self._fleet.look_after(model, event.now)

    def _on_broke(self, event: WorkerBroke, model: Model) -> None:
        if event.is_other_version:
            self._fleet.trigger(model, GreetedByOtherVersion(version="another one"), event.now)
        else:
            self._fleet.trigger(model, Broke(detail=event.detail), event.now)

    def _on_exited(self, event: Exited, model: Model) -> None:
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
        model.life.stream_tokens = longest_stream(model)
        if event.exit_code == ExitCode.OUT_OF_MEMORY:
            self._fleet.raise_need(model, event.now)
        self._fleet.handle_exit(model, died, event.now)

    # ------------------------------------------------------------ what it says

    def _on_said(self, event: WorkerSaid, model: Model) -> None:
        if model.process.watch is not None and not isinstance(event.message, Heartbeat):
            model.process.watch.said(event.now)
        match event.message:
            case Step() as step:
                self._on_step(model, step, event.now)
            case Heartbeat() as beat:
                self._on_heartbeat(model, beat, event.now)
            case Accepted() as accepted:
                self._serving.accepted(model, accepted, event.now)
            case Rejected() as rejected:
                self._on_rejected(model, rejected, event.now)
            case Rendered() as rendered:
                self._attaching.rendered(model, rendered)
            case Hello() as hello:
                self._on_hello(model, hello, event.now)
            case LoadProgress() as progress:
                self._on_load_progress(model, progress, event.now)
            case Ready() as ready:
                self._on_ready(model, ready, event.now)
            case Dying() as dying:
                model.process.dying = dying.message
            case _:
                assert_never(event.message)

    def _on_step(self, model: Model, message: Step, now: float) -> None:
        if message.step not in (model.process.steps, model.process.steps + 1):
            detail = f"counted step {message.step} after step {model.process.steps}"
            self._fleet.trigger(model, Broke(detail=detail), now)
            return
        fault = self._prefill_slots.stepped(model, message)
        if fault:
            self._fleet.trigger(model, Broke(detail=fault), now)
            return
        if model.process.watch is not None:
            model.process.watch.stepped(message.step, now)
        self._attaching.heard(message.rows)
        if self._serving.step(model, message, now):
            self._fleet.touch(model)

    def _on_rejected(self, model: Model, message: Rejected, now: float) -> None:
        try:
            error = RemoteError.from_wire(message.error)
        except ValueError as wrong:
            self._fleet.trigger(model, Broke(detail=f"rejected a request wrongly: {wrong}"), now)
            return
        self._serving.rejected(model, message.key, error, now)
        self._fleet.touch(model)

    def _on_heartbeat(self, model: Model, message: Heartbeat, now: float) -> None:
        model.process.heartbeat = message
        if keeps_to(model, message.budget):
            self._fleet.memory_changed()
            self._fleet.touch(model)
        if model.process.watch is not None:
            model.process.watch.beat(message, len(model.batch.held), now)
            self._fleet.look_after(model, now)

    def _on_hello(self, model: Model, message: Hello, now: float) -> None:
        if message.version != VERSION:
            self._fleet.trigger(model, GreetedByOtherVersion(version=message.version), now)
        elif model.life.state in SERVES:
            self._fleet.trigger(model, Broke(detail="said HELLO after READY"), now)
        else:
            self._fleet.trigger(model, Greeted(), now)

    def _on_load_progress(self, model: Model, message: LoadProgress, now: float) -> None:
        if model.life.state in SERVES:
            self._fleet.trigger(model, Broke(detail="reported a load after READY"), now)
        else:
            progress = Progressed(phase=message.phase, progress=message.progress)
            self._fleet.trigger(model, progress, now)

    def _on_ready(self, model: Model, message: Ready, now: float) -> None:
        if model.life.state in SERVES:
            self._fleet.trigger(model, Broke(detail="said READY twice"), now)
            return
        too_large = loaded_problem(model.life.need, message)
        if too_large:
            self._fleet.trigger(model, LoadedTooLarge(detail=too_large), now)
            return
        if isinstance(model.life.phase, Loading):
            model.learn(message)
            model.idle_since = now
            model.load_s = now - model.life.phase.since
            model.process.residency = Residency(ready_at=now, tokens_before=model.totals.tokens)
        self._fleet.trigger(model, BecameReady(), now)
        self._fleet.tell_log_level(model)


def last_words(lines: Sequence[str]) -> str:
    """The line of a worker's output that may be a cause: a fault handler's name for it, or the
    last line that is neither a routine log nor the end of such a report."""
    for line in reversed(lines):
        if line.startswith("Fatal Python error:"):
            return line.strip()[:MAX_LAST_WORDS]
    for line in reversed(lines):
        if line.strip() and not ROUTINE.match(line):
            return line.strip()[:MAX_LAST_WORDS]
    return ""
