"""The world around one core: what the shell guarantees, with played processes and clients."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlxsup.protocol.flight import Entry
from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.supervisor.core.actions import (
    Abandon,
    Action,
    AdoptLaunch,
    Announce,
    BudgetChanged,
    EndDownload,
    Finish,
    ForgetModel,
    LogFault,
    LookAtFiles,
    LookAtWorker,
    NeedRaised,
    ReadConfiguration,
    RequestRefused,
    SendToClient,
    SendToWorker,
    SignalWorker,
    Spawn,
    StartDownload,
    WakeAt,
)
from mlxsup.supervisor.core.core import Core
from mlxsup.supervisor.core.events import (
    Appraised,
    ClientTooSlow,
    ConnectionId,
    Event,
    Exited,
    FilesSeen,
    Started,
    Tick,
    WorkerSaid,
    WorkerSeen,
)

from .clients import Client, People
from .ground import Link, Timeline, Violation, check
from .plan import EVENTS, Plan, Prompt
from .record import Record
from .shell import Hub, Machine, lack_files
from .worker import PlayedWorker, Renderer

LOOK_S = 0.05
"""From a look at a process to its being told: what has arrived meanwhile is read before."""
MAX_HEAL_S = 400.0
"""Virtual seconds in which everything that is open must end once the faults have ended."""
MAX_EVENTS = 30_000
INVARIANTS_EVERY = 8
"""Events, from one look of the core at itself to the next: what is wrong there stays wrong."""


@dataclass(slots=True)
class Prompts:
    """Every prompt that was sent, by number and by body."""

    by_number: dict[int, Prompt] = field(default_factory=dict)
    by_body: dict[bytes, Prompt] = field(default_factory=dict)

    def add(self, prompt: Prompt) -> None:
        """One more, or one again."""
        self.by_number[prompt.number] = prompt
        self.by_body[prompt.body] = prompt


USUALLY_BYTES = 150
"""What a worker's beats say that it holds: a third of it is worth asking back whenever memory is
short."""


class World:
    """One run.

    Args:
        plan: what is decided beforehand.
        has_invariants: have the core check itself, too.
        on_turn: is given each event, and the actions that came of it before they are obeyed.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        has_invariants: bool = True,
        on_turn: Callable[[Event, Sequence[Action]], None] = lambda event, actions: None,
    ) -> None:
        self.plan = plan
        self.time = Timeline()
        self.prompts = Prompts()
        self.events: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.happened = 0
        self.to_strike: list[str] = []
        self.is_healing = self.has_finished = self.is_broken = False
        self._has_invariants = has_invariants
        self._on_turn = on_turn
        # One for each process that lives or whose exit has not been seen.
        self._workers: dict[tuple[ModelName, Generation], PlayedWorker] = {}
        self._pids = 1000
        self._tick_at: float | None = None
        self._rest_s = 0.0
        self._reported: dict[int, int] = {}
        self.hub = Hub(self)
        self.renderer = Renderer(self.plan, self.time)
        self.core = Core(
            self.plan.settings,
            self.plan.models,
            facts={"pid": 1},
            random=random.Random(plan.seed + 1),
            is_strict=has_invariants,
        )
        self.record = Record(self.plan, self.core.status)
        self.people = People(self)
        self.machine = Machine(self)

    # ------------------------------------------------------------ running

    @classmethod
    def of(cls, seed: int, **options: Any) -> World:
        """Return the world in which a seed decides everything; the same for the same seed."""
        plan = Plan.of(seed)
        lack_files(plan)
        return cls(plan, **options)

    def run(self) -> None:
        """Lives through the plan, heals, ends, and checks what must be true then."""
        self.begin()
        self.people.begin()
        while self.happened < EVENTS and not self.has_finished:
            self.time.advance()
        self.finish()

    def begin(self) -> None:
        """Start the daemon."""
        if self.plan.budget_bytes is not None:
            self.handle(Appraised(now=0.0, needs=self.hub.needs()))
        self.handle(Started(now=0.0))
        self.machine.begin()

    def finish(self) -> None:
        """End all faults: everything must come to its end, and then the daemon."""
        self.is_healing = True
        if not self.has_finished:
            self._until(self._has_healed, "heals")
            if not self.record.is_shutting_down:
                self.people.say_goodbye()
        self._until(lambda: self.has_finished, "ends")
        while len(self.time):  # what is still on its way to clients
            self.time.advance()
        self.people.check_ends()
        self.record.check_ends()

    def _has_healed(self) -> bool:
        is_served = not (self.record.open or self.people.awaited())
        return is_served or self.has_finished  # what arrives later is not heard

    def rest(self, seconds: float) -> None:
        """The end is expected later by so much."""
        self._rest_s = seconds

    def _until(self, is_reached: Callable[[], bool], name: str) -> None:
        limit = self.time.now + MAX_HEAL_S + self._rest_s
        while not is_reached():
            if not len(self.time) or self.time.now >= limit:
                why = f"after {MAX_HEAL_S:g} s" if len(self.time) else "and nothing is to come"
                raise Violation(name, f"open {why}: {list(map(str, self.record.open))[:3]}")
            self.time.advance()

    def handle(self, event: Event) -> None:
        """Hands an event to the core, obeys, and lets the record judge."""
        if self.has_finished:
            return  # the daemon has ended
        try:
            self._handle(event)
        except Violation:
            self.is_broken = True
            raise

    def _handle(self, event: Event) -> None:
        kind = type(event).__name__
        if isinstance(event, WorkerSaid):
            kind = type(event.message).__name__
        self.events[kind] += 1
        self.happened += 1
        check("busy with nothing", self.happened < MAX_EVENTS, self.events)
        self.record.before(event)
        try:
            actions = self.core.handle(event)
            self._on_turn(event, actions)
            if self._has_invariants and self.happened % INVARIANTS_EVERY == 0:
                self.core.check_invariants()
        except AssertionError as error:
            raise Violation("own invariant", str(error)) from error
        except Exception as error:
            raise Violation("raised", f"{type(error).__name__}: {error}") from error
        for action in actions:
            self.record.act(action)
            self._obey(action)
        self.record.after()

    def _obey(self, action: Action) -> None:
        match action:
            case SendToClient(connection=connection, message=message):
                self.people.deliver(bytes(connection), message)
            case SendToWorker(model=model, generation=generation, message=message):
                worker = self._workers.get((model, generation))
                if worker is not None and not worker.is_abandoned:
                    worker.tell(message)
            case Spawn(model=model, generation=generation):
                self._pids += 1
                worker = PlayedWorker(self, action, self._pids)
                self._workers[model, generation] = worker
                self.record.begins(action, worker)
            case StartDownload() | EndDownload():
                self.hub.obey(action)
            case SignalWorker(model=model, generation=generation, signal=signal):
                worker = self._workers.get((model, generation))
                if worker is not None:
                    self.time.after(0.001, lambda: worker.signalled(signal))
            case LookAtWorker(model=model, generation=generation):
                self._look_at(model, generation)
            case LookAtFiles(model=model, generation=generation):
                self._files_seen(model, generation)
            case WakeAt(when=when):
                self._wake_at(when)
            case ReadConfiguration(caller=caller):
                self.people.operators.read_configuration(caller)
            case Abandon(model=model, generation=generation):
                self._workers[model, generation].is_abandoned = True
            case AdoptLaunch() | Announce() | BudgetChanged() | ForgetModel() | NeedRaised():
                pass
            case RequestRefused() | Entry():
                pass
            case LogFault(story=story):
                raise Violation("no rule", "; ".join(story[-3:]))
            case Finish():
                self.has_finished = True
            case _:
                raise AssertionError(action)

    def _files_seen(self, model: ModelName, generation: Generation) -> None:
        """The files of a model never change here."""

        def tell() -> None:
            now = self.time.now
            self.handle(FilesSeen(now=now, model=model, generation=generation, change=""))

        self.time.after(LOOK_S, tell)

    def _wake_at(self, when: float) -> None:
        if self._tick_at is not None and self._tick_at <= when:
            return
        self._tick_at = when
        late_s = self.plan.random.choice((0.0, 0.0, 0.001, 0.01))

        def tick() -> None:
            if self._tick_at == when:
                self._tick_at = None
                self.handle(Tick(now=self.time.now))

        self.time.at(when + late_s, tick)

    def _look_at(self, model: ModelName, generation: Generation) -> None:
        worker = self._workers.get((model, generation))
        if worker is None:
            return
        fault = worker.fault.name if worker.fault and worker.is_alive else ""
        is_stopped = fault in ("stop", "load_stops")

        def tell() -> None:
            self.handle(
                WorkerSeen(
                    now=self.time.now, model=model, generation=generation, is_stopped=is_stopped
                )
            )

        self.time.after(LOOK_S, tell)

    # ------------------------------------------------------------ what workers need

    def happens(self, fault: str) -> bool:
        """Whether this fault strikes now."""
        if fault in self.to_strike and not self.is_healing:
            self.to_strike.remove(fault)
            self.faults[fault] += 1
            return True
        chance = self.plan.faults.get(fault)
        if chance is None or self.is_healing or self.plan.random.random() >= chance:
            return False
        self.faults[fault] += 1
        return True

    def struck(self, fault: str) -> None:
        """A fault that no dice decide has struck."""
        self.faults[fault] += 1

    def gone(self, worker: PlayedWorker) -> None:
        """Nothing of this process is left."""
        self._workers.pop((worker.model, worker.generation), None)

    def is_gone(self, worker: PlayedWorker) -> bool:
        """Whether its end has been seen: nothing that it said is still read."""
        return self._workers.get((worker.model, worker.generation)) is not worker

    def exited(self, worker: PlayedWorker, exited: Exited) -> None:
        """The exit is seen."""
        self.gone(worker)
        self.handle(replace(exited, now=self.time.now))

    def measure(self, worker: PlayedWorker, fault: str) -> None:
        """A process nears its limit, or is over it: its next beat says so, or the monitor does,
        which measures all others too."""
        limit = self.record.memory_limit(worker.model)
        if fault == "oom_beat":
            self._reported[worker.pid] = limit + 1
            return
        self.machine.overgrown[worker.pid] = limit + (fault == "oom_kill")
        self.handle(self.machine.sampled())

    def living(self) -> list[PlayedWorker]:
        """Every process that lives, or whose end has not been seen."""
        return list(self._workers.values())

    def reported_bytes(self, worker: PlayedWorker) -> int:
        """What a worker's beats say that it holds."""
        return self._reported.get(worker.pid, USUALLY_BYTES)

    def link(self, name: str) -> Link:
        """A new link with the delays of the plan."""
        return Link(self.time, self.plan.random, self.plan.delays_s[name], 1.0)

    def too_slow(self, client: Client) -> None:
        """The shell gives a client up: what waits for it is dropped, ends excepted."""
        client.is_slow = True
        self.handle(ClientTooSlow(now=self.time.now, connection=ConnectionId(client.name)))
