"""A worker's process as the simulation plays it: it obeys, and it fails as the plan's dice say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import Batching, LoadPhase, WorkerPhase
from mlxsup.protocol.version import VERSION
from mlxsup.protocol.worker_messages import (
    CancelRow,
    Dispatch,
    DropKept,
    Dying,
    Exit,
    Heartbeat,
    Hello,
    Lease,
    Leases,
    LoadProgress,
    PauseRow,
    Ready,
    WorkerMessage,
)
from mlxsup.supervisor.core.actions import Spawn, WorkerSignal

from .costs import backend_of
from .faults import ACCUSING, HANGS, MUTE_HANGS, Fault
from .links import Link
from .reading import Has
from .reports import Reports
from .rows import Batch
from .violation import check

if TYPE_CHECKING:
    from .world import World

BEAT_S = 0.5
TEARDOWN_S = (0.0, 0.0, 0.01, 0.3, 3.0)
"""How long the kernel may take from an exit to its being seen."""


class PlayedWorker:
    """One incarnation.

    Attributes:
        fault: what is wrong with it while it lives: the truth, by which kills are judged.
        is_alive: until it exits; that is seen later.
        is_linked: whether it is still connected.
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
        self.is_frozen = self.is_abandoned = False
        self.is_known = self.is_broken = False
        self.sent = self.received = 0
        self.predicted_s = 0.0
        self._up = Link(self._time, self._dice, plan.delays_s["worker_up"], 1.0)
        self._down = Link(self._time, self._dice, plan.delays_s["worker_down"], 1.0)
        self._beats = Link(self._time, self._dice, plan.delays_s["beat"], 1.0)
        self.batch = Batch(
            dice=self._dice,
            generation=int(spawn.generation),
            max_rows=spawn.launch.max_concurrency,
            by_number=world.prompts.by_number,
            by_body=world.prompts.by_body,
            say=self.say,
        )
        self._timeout_s = spawn.launch.step_timeout_s
        self._works_since: float | None = None
        self._waits_since = 0.0
        self._time.after(self._dice.uniform(0.0, 0.1), self._start)

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
            self._hang("load_stops")
            return
        version = VERSION
        if self._world.happens("other_version"):
            self.fault = Fault(name="other_version", since=self._time.now)
            if self._dice.random() < 0.5:
                self._break(is_other_version=True)
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
        self._beat()
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
            self._hang("load_stalls")
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
                    batching=self._dice.choice(list(Batching)),
                    batching_reason=f"seen in life {self.generation}",
                )
            )
            self._idle_faults()

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
        if self._works_since is not None or self.is_hung or self.is_frozen:
            return
        batch = self.batch
        batch.reading.hear()
        if batch.reads_with_lease and self._world.happens("waits_on"):
            self._hang("waits_on")
            return
        if not (batch.can_step or batch.preparing or batch.has_news or self.is_asked):
            self._waits_since = self._time.now
            return
        self._works_since = self._time.now
        self.predicted_s = 0.0
        step_s = self._world.plan.step_s * self._dice.uniform(0.5, 1.5)
        if batch.is_reading and batch.may_read:  # slower than the limit, as predicted
            self.predicted_s = self._timeout_s * 0.75
            step_s = self._timeout_s * self._dice.choice((0.5, 1.5, 3.0))
        self._time.after(step_s, lambda: self._work(step_s))

    def _work(self, took_s: float) -> None:
        if not self.is_alive or self.is_hung or self.is_frozen or not self.is_linked:
            return
        self._works_since = None
        if self.is_asked:
            self._time.after(self._dice.uniform(0.0, 0.1), lambda: self.exit(code=0))
            return
        if self.batch.poison():
            self._world.struck("poison")
            self.exit(signal=self._dice.choice(ACCUSING))
            return
        if self.batch.rows and not self._world.is_healing and self._fails():
            return
        self.batch.prepare()
        if self.batch.can_step:
            self.batch.step(took_s)
        else:
            self.batch.flush()
        if self.batch.rows:
            self._wake()

    def _fails(self) -> bool:
        """Whether a fault ends this step."""
        happens, dice = self._world.happens, self._dice
        for name, codes in (("fault_71", (71,)), ("gpu_72", (72,)), ("raise_70", (70,)),
                            ("oom_75", (75,)), ("odd_exit", (1, 65, 0))):  # fmt: skip
            if happens(name):
                self.die(dice.choice(codes), f"{name} at {dice.randrange(10**6)}")
                return True
        for name, signals in (("kill", ("SIGKILL",)), ("term", ("SIGTERM",)), ("segv", ACCUSING)):
            if happens(name):
                self.exit(signal=dice.choice(signals))
                return True
        for name in ("oom_kill", "oom_near", "oom_beat"):
            if happens(name):
                self._world.measure(self, name)
                self._tell_beat()
                self._time.after(0.001, lambda: self.exit(signal="SIGKILL"))
                return True
        if self.fault is not None:
            return False  # one at a time, so that it is known what a kill is for
        for name in ("stop", "stall", "gil", "blocked"):
            if happens(name):
                self._hang(name)
                return True
        if happens("link_drops"):
            self.fault = Fault(name="link_drops", since=self._time.now)
            self._unlink()
            return True
        if happens("garbage"):
            self.fault = Fault(name="garbage", since=self._time.now)
            self._break()
            return True
        if happens("row_lost"):
            self.fault = Fault(name="row_lost", since=self._time.now)
            self.batch.lose_one()
        elif happens("mute"):
            self.fault = Fault(name="mute", since=self._time.now)
        return False

    def _idle_faults(self) -> None:
        if self._world.happens("idle_dies"):
            self._time.after(
                self._dice.uniform(0.0, 6.0), lambda: self.exit(signal="SIGKILL", fault="idle_dies")
            )

    def _hang(self, name: str) -> None:
        self.fault = Fault(name=name, since=self._time.now)
        self._works_since = self._time.now

    def _beat(self) -> None:
        if not self.is_alive or self.is_frozen or (self.fault and self.fault.name == "mute"):
            return
        if self.is_hung and self.fault is not None and self.fault.name in MUTE_HANGS:
            return
        self._tell_beat()
        self._time.after(BEAT_S, self._beat)

    def _tell_beat(self) -> None:
        phase, phase_s, predicted_s = self._phase()
        memory = self._world.reported_bytes(self)
        beat = Heartbeat(
            step=self.batch.steps,
            phase=phase,
            phase_s=phase_s,
            predicted_s=predicted_s,
            requests=self.batch.held,
            preparing=self.batch.preparing,
            sent=self.sent,
            received=self.received,
            active_bytes=memory - memory // 3,
            cache_bytes=memory // 3,
        )
        self._beats.send(lambda: self._hand_over(beat))

    def _phase(self) -> tuple[WorkerPhase, float, float]:
        if not self.is_ready:
            return WorkerPhase.LOADING, 0.0, 0.0
        if self.fault is not None and self.fault.name == "waits_on":
            return WorkerPhase.WAITING, self._time.now - self.fault.since, 0.0
        if self._works_since is None and self.batch.rows and self.batch.reading.has is Has.ASKED:
            return WorkerPhase.WAITING, self._time.now - self._waits_since, 0.0
        if self._works_since is None:
            return WorkerPhase.IDLE, 0.0, 0.0
        took_s = self._time.now - self._works_since
        if self.fault is not None and self.fault.name == "blocked":
            return WorkerPhase.ROWS, took_s, 0.0
        if self.predicted_s:
            return WorkerPhase.PREFILL, took_s, self.predicted_s
        return WorkerPhase.DECODE, took_s, 0.0

    # ------------------------------------------------------------ speaking and ending

    def say(self, message: WorkerMessage) -> None:
        """Sends the supervisor a message."""
        if self.is_alive and self.is_linked:
            self.sent += 1
            self._up.send(lambda: self._hand_over(message))

    def _hand_over(self, message: WorkerMessage) -> None:
        self.is_known = self.is_known or isinstance(message, Hello)
        if not (self.is_abandoned or self.is_broken or self._world.is_gone(self)):
            self._world.handle(self._reports.said(message, self._time.now))

    def _break(self, *, is_other_version: bool = False) -> None:
        """It sends what is no message: nothing more is read from it, and nothing said to it."""
        self.is_linked = False

        def report() -> None:
            self.is_broken = True
            if self.is_abandoned or self._world.is_gone(self):
                return
            now = self._time.now
            self._world.handle(self._reports.broke(now, is_other_version=is_other_version))

        self._up.send(report)

    def _unlink(self) -> None:
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
            self._unlink()
        exited = self._reports.exited(code, signal, now=0.0)
        teardown_s = self._dice.choice(TEARDOWN_S)
        self._up.send(lambda: self._world.exited(self, exited), more_s=teardown_s)
