"""A worker's process as the simulation plays it: it obeys, and it fails as the plan's dice say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.protocol.log_level import LogLevel
from mlxsup.protocol.message import Message
from mlxsup.protocol.rendering import Render
from mlxsup.protocol.states import Batching, LoadPhase
from mlxsup.protocol.version import VERSION
from mlxsup.protocol.worker_messages import (
    CancelRow,
    Dispatch,
    DropKept,
    Dying,
    Exit,
    GiveBack,
    Hello,
    Lease,
    Leases,
    LoadProgress,
    PauseRow,
    Ready,
    SetBudget,
    WorkerMessage,
)
from mlxsup.supervisor.core.actions import Spawn, WorkerSignal

from . import mishaps
from .costs import backend_of
from .faults import ACCUSING, HANGS, Fault
from .links import Link
from .pulse import Pulse
from .reports import Reports
from .row_memory import PlayedMemory
from .rows import Batch
from .violation import check

if TYPE_CHECKING:
    from .world import World

TEARDOWN_S = (0.0, 0.0, 0.01, 0.3, 3.0)
"""How long the kernel may take from an exit to its being seen."""


class PlayedWorker:
    """One incarnation.

    Attributes:
        fault: what is wrong with it while it lives: the truth, by which kills are judged.
        is_alive: until it exits; that is seen later.
        is_linked: whether it is still connected.
        works_since, waits_since: when its step began, and when it last found nothing to do.
    """

    def __init__(self, world: World, spawn: Spawn, pid: int) -> None:
        plan = world.plan
        self._world, self._dice, self._time = world, plan.random, world.time
        self.model: ModelName = spawn.model
        self.generation: Generation = spawn.generation
        self._reports = Reports(model=spawn.model, generation=spawn.generation)
        self.pid = pid
        self.fault: Fault | None = None
        self.is_alive = self.is_linked = True
        self.is_ready = self.is_asked = self.has_greeted = False
        self.has_given_back = False
        self.is_frozen = self.is_abandoned = False
        self.is_known = self.is_broken = False
        self.sent = self.received = 0
        self.predicted_s = 0.0
        self._up = Link(self._time, self._dice, plan.delays_s["worker_up"], 1.0)
        self._down = Link(self._time, self._dice, plan.delays_s["worker_down"], 1.0)
        self.pulse = Pulse(self, world)
        self.batch = Batch(
            dice=self._dice,
            generation=int(spawn.generation),
            max_rows=spawn.launch.max_concurrency,
            by_number=world.prompts.by_number,
            by_body=world.prompts.by_body,
            say=self.say,
            keeps=plan.kept_share,
            memory=PlayedMemory(plan.layers_of(spawn.launch)),
        )
        self._layers = plan.layers_of(spawn.launch)
        self._fixed_bytes = plan.needs[spawn.model] - plan.row_bytes
        self._timeout_s = spawn.launch.step_timeout_s
        self.works_since: float | None = None
        self.waits_since = 0.0
        self._time.after(self._dice.uniform(0.0, 0.1), self._start)

    def footprint_bytes(self, granted_bytes: int) -> int:
        """What it holds; `granted_bytes` as long as it is not known what its rows take."""
        if not (self._layers and self.is_ready):
            return granted_bytes
        return self._fixed_bytes + self.batch.taken_bytes()

    @property
    def is_hung(self) -> bool:
        """Whether it no longer does anything by itself."""
        return self.fault is not None and self.fault.name in HANGS

    # ------------------------------------------------------------ coming up

    def _start(self) -> None:
        if self._world.happens("spawn_fails"):
            self.is_alive = False
            self._world.gone(self)
            self._world.handle(self._reports.spawn_failed(self._time.now))
            return
        self._world.handle(self._reports.spawned(self.pid, self._time.now))
        self._time.after(0.02, self._greet)

    def _greet(self) -> None:
        if not self.is_alive:
            return
        if self._world.happens("load_stops"):
            self.hang("load_stops")
            return
        version = VERSION
        if self._world.happens("other_version"):
            self.fault = Fault(name="other_version", since=self._time.now)
            if self._dice.random() < 0.5:
                self.breaks(is_other_version=True)
                return
            version = "0.0.0"
        self.has_greeted = True
        self.say(
            Hello(
                model=self.model,
                generation=self.generation,
                token="t",
                pid=self.pid,
                version=version,
            )
        )
        self.pulse.begin()
        self._load(0)

    def _load(self, part: int) -> None:
        if not self.is_alive or self.fault is not None:
            return
        happens, number = self._world.happens, self._dice.randrange(10**6)
        if happens("bad_model"):
            self.die(self._dice.choice((64, 65, 66, 69)), f"no file {number}")
        elif happens("load_dies"):
            self.exit(signal=self._dice.choice(("SIGKILL", "SIGSEGV", "SIGTERM")))
        elif happens("load_raises"):
            self.die(self._dice.choice((70, 71)), f"error of {self._dice.choice('pq')}")
        elif happens("load_alike"):
            self.die(70, f"shape mismatch at 0x{number:x}")
        elif happens("load_lacks_memory"):
            self.die(self._dice.choice((75, 72)), f"no room for {number} bytes")
        elif happens("load_stalls"):
            self.hang("load_stalls")
        elif part < 2:
            self.say(LoadProgress(phase=LoadPhase.WEIGHTS, progress=(part + 1) / 3))
            self._time.after(self._dice.uniform(0.02, 0.5), lambda: self._load(part + 1))
        else:
            self.is_ready = True
            self.say(
                Ready(
                    context_length=100,
                    fingerprint="f",
                    backend=backend_of(self.model),
                    active_bytes=self._fixed_bytes if self._layers else 0,
                    own_bytes=0 if self._layers else None,
                    cache_layers=list(self._layers),
                    batching=self._dice.choice(list(Batching)),
                    batching_reason=f"seen in life {self.generation}",
                )
            )
            mishaps.while_idle(self, self._world)

    # ------------------------------------------------------------ what it receives

    def tell(self, message: Message) -> None:
        """The supervisor sends a message, which may find the process gone."""
        self._down.send(lambda: self._take(message))

    def _take(self, message: Message) -> None:
        if not self.is_alive or not self.is_linked or self.is_frozen or self.is_hung:
            return
        self.received += 1
        match message:
            case Dispatch():
                check("dispatched before READY", self.is_ready, message.key)
                check("dispatched after Exit", not self.is_asked, message.key)
                self.batch.begin(message)
                self._wake()
            case CancelRow(key=key):
                if self.batch.cancel(key):
                    self._wake()
            case Leases() | Lease():
                self.batch.reading.unread.append(message)
                self._wake()
            case PauseRow(key=key, keep=keep):
                if self.batch.pause(key, keep=keep):
                    self._wake()
            case DropKept(key=key):
                check("drops what is not kept", key in self.batch.kept, key)
                self.batch.kept.remove(key)
            case SetBudget():
                self.batch.memory.heard(message)
                if self.works_since is None:
                    self.batch.keep_to_budget()
                    self._wake()
            case GiveBack():
                self.has_given_back = True
            case Render():
                self._world.renderer.answers(self, message)
            case LogLevel():
                pass  # nothing answers
            case Exit():
                self.is_asked = True
                self._wake()
            case _:
                raise AssertionError(message)

    def signalled(self, signal: WorkerSignal) -> None:
        """A signal arrives; whether it was deserved is for the oracle."""
        if not self.is_alive:
            return
        if signal is WorkerSignal.KILL:
            if self.is_frozen:
                return
            if self._world.happens("unkillable"):
                self.is_frozen = True
                self._up.lose_end()
                if self._dice.random() < 0.6:
                    self._time.after(self._dice.uniform(5.0, 40.0), self._thaw)
                return
            self._time.after(0.005, lambda: self.exit(signal="SIGKILL"))
        elif signal is WorkerSignal.TERM and not self.is_hung and self._dice.random() < 0.85:
            if self._dice.random() < 0.5:
                self._time.after(0.02, lambda: self.exit(signal="SIGTERM"))
            else:
                self._time.after(0.02, lambda: self.exit(code=143))

    def _thaw(self) -> None:
        self.is_frozen = False
        self.exit(signal="SIGKILL")

    # ------------------------------------------------------------ working

    def _wake(self) -> None:
        if self.works_since is not None or self.is_hung or self.is_frozen:
            return
        batch = self.batch
        batch.reading.hear()
        if batch.reads_with_lease and self._world.happens("waits_on"):
            self.hang("waits_on")
            return
        if not (batch.can_step or batch.preparing or batch.has_news or self.is_asked):
            self.waits_since = self._time.now
            return
        self.works_since = self._time.now
        self.predicted_s = 0.0
        step_s = self._world.plan.step_s * self._dice.uniform(0.5, 1.5)
        if batch.is_reading and batch.may_read:  # slower than the limit, as predicted
            self.predicted_s = self._timeout_s * 0.75
            slow_s = self._timeout_s * self._dice.choice((0.5, 1.5, 3.0))
            step_s = step_s if self._world.is_healing else slow_s
        self._time.after(step_s, lambda: self._work(step_s))

    def _work(self, took_s: float) -> None:
        if not self.is_alive or self.is_hung or self.is_frozen or not self.is_linked:
            return
        self.works_since = None
        if self.is_asked:
            self._time.after(self._dice.uniform(0.0, 0.1), lambda: self.exit(code=0))
            return
        if self.batch.poison():
            self._world.struck("poison")
            self.exit(signal=self._dice.choice(ACCUSING))
            return
        if mishaps.lacks_memory(self, self._world):
            return
        if self.batch.rows and not self._world.is_healing and mishaps.strikes(self, self._world):
            return
        self.batch.keep_to_budget()
        self.batch.prepare()
        if self.batch.can_step:
            self.batch.step(took_s)
        else:
            self.batch.flush()
        if self.batch.rows:
            self._wake()

    def hang(self, name: str) -> None:
        """From now on it does nothing by itself."""
        self.fault = Fault(name=name, since=self._time.now)
        self.works_since = self._time.now

    # ------------------------------------------------------------ speaking and ending

    def say(self, message: WorkerMessage) -> None:
        """Sends the supervisor a message."""
        if self.is_alive and self.is_linked:
            self.sent += 1
            self._up.send(lambda: self.hand_over(message))

    def hand_over(self, message: WorkerMessage) -> None:
        """What it has sent arrives."""
        self.is_known = self.is_known or isinstance(message, Hello)
        if not (self.is_abandoned or self.is_broken or self._world.is_gone(self)):
            self._world.handle(self._reports.said(message, self._time.now))

    def breaks(self, *, is_other_version: bool = False) -> None:
        """It sends what is no message: nothing more is read from it, and nothing said to it."""
        self.is_linked = False

        def report() -> None:
            self.is_broken = True
            if self.is_abandoned or self._world.is_gone(self):
                return
            now = self._time.now
            self._world.handle(self._reports.broke(now, is_other_version=is_other_version))

        self._up.send(report)

    def unlink(self) -> None:
        """Its connection ends."""
        self.is_linked = False

        def report() -> None:
            if self.is_known and not self.is_abandoned:
                self._world.handle(self._reports.unlinked(self._time.now))

        self._up.send(report)

    def die(self, code: int, message: str) -> None:
        """The process says why it ends, and ends."""
        self.say(Dying(code=code, message=message))
        self.exit(code=code)

    def exit(self, *, code: int | None = None, signal: str = "", fault: str = "") -> None:
        """The process ends; what it had said is read before that is seen, if it left at all."""
        if not self.is_alive or self.is_frozen:
            return
        if fault and self._world.is_healing:
            return
        self.is_alive = False
        if signal:
            self._up.lose_end()
        if self.has_greeted and self.is_linked:
            self.unlink()
        exited = self._reports.exited(code, signal, now=0.0)
        teardown_s = self._dice.choice(TEARDOWN_S)
        self._up.send(lambda: self._world.exited(self, exited), more_s=teardown_s)
