"""The world around one core: the shell, with played processes and clients, a hub and a machine."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mlxsup.protocol import download
from mlxsup.protocol.download import DownloadProblem, Repository
from mlxsup.protocol.flight import Entry
from mlxsup.protocol.ids import ConnectionId, Generation, ModelName
from mlxsup.supervisor.core import actions, events
from mlxsup.supervisor.core.budget import Need, Reading, Strain
from mlxsup.supervisor.core.core import Core
from mlxsup.supervisor.core.settings import ModelSettings

from .clients import Client, People
from .ground import Link, Timeline, Violation, check
from .plan import EVENTS, Kind, Plan, Prompt
from .record import Record
from .worker import PlayedWorker

# From a look at a process to its report: what has arrived meanwhile is read before.
LOOK_S = 0.05
# Virtual seconds in which everything that is open must end once the faults have ended.
MAX_HEAL_S = 400.0
MAX_EVENTS = 30_000
# The core checks itself after this many events: what is wrong there stays wrong.
INVARIANTS_EVERY = 8
IGNORED = (
    actions.AdoptLaunch, actions.Announce, actions.BudgetChanged, actions.ForgetModel,
    actions.NeedRaised, actions.RequestRefused, Entry,
)  # fmt: skip


class World:
    """One run.

    Args:
        plan: what is decided beforehand.
        has_invariants: have the core check itself, too.
        on_turn: is given each event and its actions before they are obeyed.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        has_invariants: bool = True,
        on_turn: Callable[[events.Event, Sequence[actions.Action]], None] = lambda *turn: None,
    ) -> None:
        self.plan = plan
        self.time = Timeline()
        self.prompts: dict[int, Prompt] = {}
        self.bodies: dict[bytes, Prompt] = {}
        self.events: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.happened = 0
        self.to_strike: list[str] = []
        self.is_healing = self.has_finished = self.is_broken = False
        self._has_invariants = has_invariants
        self._on_turn = on_turn
        # Processes that live, or whose exit has not been seen.
        self.workers: dict[tuple[ModelName, Generation], PlayedWorker] = {}
        self.reported_bytes: dict[int, int] = {}
        self.rest_s = 0.0
        self._pids = 1000
        self._tick_at: float | None = None
        self.hub = Hub(self)
        self.renders = plan.dice("renders in")
        self.core = Core(
            plan.settings,
            plan.models,
            facts={"pid": 1},
            random=random.Random(plan.seed + 1),
            is_strict=has_invariants,
        )
        self.record = Record(plan, self.core.status)
        self.people = People(self)
        self.machine = Machine(self)

    @classmethod
    def of(cls, seed: int, **options: Any) -> World:
        """Return the world in which a seed decides everything."""
        return cls(Plan.of(seed), **options)

    # ------------------------------------------------------------ running

    def run(self) -> None:
        """Live through the plan, end all faults, and check what must be true then."""
        self.begin()
        self.people.begin()
        while self.happened < EVENTS and not self.has_finished:
            self.time.advance()
        self.finish()

    def begin(self) -> None:
        if self.plan.budget_bytes is not None:
            self.handle(events.Appraised(now=0.0, needs=self.hub.needs()))
        self.handle(events.Started(now=0.0))
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
        return self.has_finished or not (self.record.open or self.people.awaited())

    def _until(self, is_reached: Callable[[], bool], name: str) -> None:
        limit = self.time.now + MAX_HEAL_S + self.rest_s
        while not is_reached():
            if not len(self.time) or self.time.now >= limit:
                raise Violation(name, f"open: {list(map(str, self.record.open))[:3]}")
            self.time.advance()

    def handle(self, event: events.Event) -> None:
        """Hand an event to the core, obey its actions, and let the record judge both."""
        if self.has_finished:
            return
        try:
            self._handle(event)
        except Violation:
            self.is_broken = True
            raise

    def _handle(self, event: events.Event) -> None:
        said = event.message if isinstance(event, events.WorkerSaid) else event
        self.events[type(said).__name__] += 1
        self.happened += 1
        check("busy with nothing", self.happened < MAX_EVENTS, self.events)
        self.record.before(event)
        try:
            found = self.core.handle(event)
            self._on_turn(event, found)
            if self._has_invariants and self.happened % INVARIANTS_EVERY == 0:
                self.core.check_invariants()
        except AssertionError as error:
            raise Violation("own invariant", str(error)) from error
        except Exception as error:
            raise Violation("raised", f"{type(error).__name__}: {error}") from error
        for action in found:
            self.record.judge(action)
            self._obey(action)
        self.record.after()

    def _obey(self, action: actions.Action) -> None:
        match action:
            case actions.SendToClient(connection=connection, message=message):
                self.people.deliver(bytes(connection), message)
            case actions.SendToWorker(model=model, generation=generation, message=message):
                worker = self.workers.get((model, generation))
                if worker is not None and not worker.is_abandoned:
                    worker.tell(message)
            case actions.Spawn(model=model, generation=generation):
                self._pids += 1
                worker = PlayedWorker(self, action, self._pids)
                self.workers[model, generation] = worker
                self.record.begins(action, worker)
            case actions.StartDownload() | actions.EndDownload():
                self.hub.obey(action)
            case actions.SignalWorker(model=model, generation=generation, signal=signal):
                worker = self.workers.get((model, generation))
                if worker is not None:
                    self.time.after(0.001, partial(worker.signalled, signal))
            case actions.LookAtWorker(model=model, generation=generation):
                worker = self.workers.get((model, generation))
                if worker is not None:
                    fault = worker.fault.name if worker.fault and worker.is_alive else ""
                    self._tell_later(
                        events.WorkerSeen(
                            now=0.0,
                            model=model,
                            generation=generation,
                            is_stopped=fault in ("stop", "load_stops"),
                        )
                    )
            case actions.LookAtFiles(model=model, generation=generation):
                self._tell_later(
                    events.FilesSeen(now=0.0, model=model, generation=generation, change="")
                )
            case actions.WakeAt(when=when):
                self._wake_at(when)
            case actions.ReadConfiguration(caller=caller, is_dry=is_dry):
                self.people.read_configuration(caller, is_dry=is_dry)
            case actions.ChangeConfiguration(caller=caller):
                self.people.read_configuration(caller)
            case actions.Abandon(model=model, generation=generation):
                self.workers[model, generation].is_abandoned = True
            case actions.LogFault(story=story):
                raise Violation("no rule", "; ".join(story[-3:]))
            case actions.Finish():
                self.has_finished = True
            case _:
                assert isinstance(action, IGNORED), action

    def _tell_later(self, event: events.WorkerSeen | events.FilesSeen) -> None:
        self.time.after(LOOK_S, lambda: self.handle(replace(event, now=self.time.now)))

    def _wake_at(self, when: float) -> None:
        if self._tick_at is not None and self._tick_at <= when:
            return
        self._tick_at = when
        late_s = self.plan.random.choice((0.0, 0.0, 0.001, 0.01))

        def tick() -> None:
            if self._tick_at == when:
                self._tick_at = None
                self.handle(events.Tick(now=self.time.now))

        self.time.at(when + late_s, tick)

    # ------------------------------------------------------------ what workers need

    def happens(self, fault: str) -> bool:
        """True if this fault strikes now."""
        if self.is_healing:
            return False
        if fault in self.to_strike:
            self.to_strike.remove(fault)
        else:
            chance = self.plan.faults.get(fault)
            if chance is None or self.plan.random.random() >= chance:
                return False
        self.faults[fault] += 1
        return True

    def measure(self, worker: PlayedWorker, fault: str) -> None:
        """Let a process near its limit: its next beat says so, or the monitor does."""
        limit = self.record.memory_limit(worker.model)
        if fault == "oom_beat":
            self.reported_bytes[worker.pid] = limit + 1
            return
        self.machine.overgrown[worker.pid] = limit + (fault == "oom_kill")
        self.handle(self.machine.sampled())

    def link(self, name: str) -> Link:
        return Link(self.time, self.plan.random, self.plan.delays_s[name], 1.0)

    def too_slow(self, client: Client) -> None:
        """Give a client up: what waits for it is dropped, ends excepted."""
        client.is_slow = True
        self.handle(events.ClientTooSlow(now=self.time.now, connection=ConnectionId(client.name)))


# ---------------------------------------------------------------- hub

TOTAL_BYTES = 1000
PROBLEMS: dict[Kind, tuple[DownloadProblem, ...]] = {
    Kind.LOADS: (DownloadProblem.NETWORK, DownloadProblem.RATE_LIMITED, DownloadProblem.GATED),
    Kind.PEOPLE: (DownloadProblem.NETWORK, DownloadProblem.RATE_LIMITED),
    Kind.STORM: (
        DownloadProblem.NETWORK, DownloadProblem.RATE_LIMITED, DownloadProblem.INTERNAL,
        DownloadProblem.DISK_FULL,
    ),
}  # fmt: skip
"""How downloads fail, with a chance of 0.15 at each step."""


class Hub:
    """Its repositories, the downloads that run, and the snapshots that are on the disk."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._dice = world.plan.dice("downloads of")
        self._problems = PROBLEMS.get(world.plan.kind, ())
        self._running: dict[int, Repository] = {}
        self._bytes: dict[Repository, int] = {}
        self._folders: dict[Repository, str] = {}
        self._arrived = 0

    def as_read(self, entry: ModelSettings) -> ModelSettings:
        """Return what the file says of a model now: what has been downloaded is a folder."""
        folder = self._folders.get(entry.download) if entry.download is not None else None
        if folder is None:
            return entry
        return replace(entry, download=None, launch=replace(entry.launch, path=folder))

    def needs(self) -> dict[ModelName, Need]:
        """Return what the models need whose files are there; nothing without a memory budget."""
        plan = self._world.plan
        if plan.budget_bytes is None:
            return {}
        raised, appraised = self._world.record.raised, plan.appraised()
        return {
            entry.name: replace(appraised[entry.name], raised_bytes=raised.get(entry.name, 0))
            for entry in plan.models
            if self.as_read(entry).download is None
        }

    def lose_one(self) -> None:
        """Remove a snapshot now and then; not with a budget, whose needs would be unknown."""
        if not self._folders or self._world.is_healing:
            return
        if self._world.plan.budget_bytes is None and self._dice.random() < 0.2:
            lost = self._dice.choice(sorted(self._folders))
            del self._folders[lost]
            self._bytes.pop(lost, None)

    def obey(self, action: actions.StartDownload | actions.EndDownload) -> None:
        if isinstance(action, actions.EndDownload):
            del self._running[action.number]
            return
        self._running[action.number] = action.repository
        self._continue_later(action.number)

    def _continue_later(self, number: int) -> None:
        self._world.time.after(self._dice.choice((0.02, 0.2, 0.6)), lambda: self._continue(number))

    def _continue(self, number: int) -> None:
        repository = self._running.get(number)
        if repository is None:
            return
        dice = self._dice
        is_there = repository in self._folders
        may_fail = self._problems and not (is_there or self._world.is_healing)
        if may_fail and dice.random() < 0.15:
            problem = dice.choice(self._problems)
            is_limited = problem is DownloadProblem.RATE_LIMITED
            after_s = dice.choice((0.0, 0.7, 4.0)) if is_limited else 0.0
            self._end(
                number,
                download.DownloadFailed(
                    problem=problem, message=f"no: {problem}", retry_after_s=after_s
                ),
            )
            return
        done = self._bytes.get(repository, 0) + dice.randint(0, TOTAL_BYTES // 3)
        if is_there or done >= TOTAL_BYTES:
            if not is_there:
                self._arrived += 1
                self._folders[repository] = f"/hub/{repository.repo}/{self._arrived}"
            if needs := self.needs():
                self._world.handle(events.Appraised(now=self._world.time.now, needs=needs))
            self._end(
                number,
                download.DownloadDone(
                    folder=self._folders[repository],
                    total_bytes=TOTAL_BYTES,
                    fetched_bytes=TOTAL_BYTES,
                ),
            )
            return
        self._bytes[repository] = done
        is_waiting = dice.random() < 0.1
        self._say(
            number,
            download.DownloadProgress(
                done_bytes=done, total_bytes=TOTAL_BYTES, is_waiting=is_waiting
            ),
        )
        self._continue_later(number)

    def _end(self, number: int, report: download.SnapshotReport) -> None:
        del self._running[number]
        self._say(number, report)

    def _say(self, number: int, report: download.SnapshotReport) -> None:
        now = self._world.time.now
        self._world.handle(events.DownloadSaid(now=now, number=number, report=report))


# ---------------------------------------------------------------- machine

MACHINE_BYTES = 10_000
# What others hold, of the budget; the machine has twice the budget, and what stays free.
OTHERS = (0.0, 0.0, 0.5, 1.2, 1.6, 2.1)
# Memory is measured for so long after the last shortage; nothing changes any more.
HEALS_S = 60


class Machine:
    """Its memory, measured each second in half of the runs with a budget."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._dice = world.plan.dice("others of")
        self._whole = world.plan.budget_bytes or 0
        self._is_shared = self._whole > 0 and self._dice.random() < 0.5
        self._others = self._until = 0.0
        self._healed_s = 0
        self.overgrown: dict[int, int] = {}

    def take(self, share: float) -> None:
        """Let other programs hold this share of the budget from now on."""
        self._others, self._until = share, math.inf

    def begin(self) -> None:
        if self._is_shared:
            self._measure()

    def sampled(self) -> events.Sampled:
        world = self._world
        footprint = dict(self.overgrown)
        if self._is_shared:
            for worker in world.workers.values():
                footprint.setdefault(worker.pid, self._footprint(worker))
                if not worker.is_alive:  # its memory is being freed
                    footprint[worker.pid] = 0
        return events.Sampled(
            now=world.time.now,
            footprint_bytes=footprint,
            machine_bytes=MACHINE_BYTES,
            reading=self._reading() if self._is_shared else None,
        )

    def _footprint(self, worker: PlayedWorker) -> int:
        return worker.footprint_bytes(self._world.record.memory_need(worker.model))

    def _measure(self) -> None:
        world, dice = self._world, self._dice
        if world.has_finished or self._healed_s == HEALS_S:
            return
        if world.is_healing:
            self._others = 0.0
            self._healed_s += 1
        elif world.time.now >= self._until:
            self._others = dice.choice(OTHERS)
            self._until = world.time.now + dice.choice((2.0, 4.0, 12.0, 25.0))
        world.handle(self.sampled())
        world.time.after(1.0, self._measure)

    def _reading(self) -> Reading:
        kept = self._whole // 10
        held = sum(
            max(self.overgrown.get(worker.pid, 0), self._footprint(worker))
            for worker in self._world.workers.values()
        )
        others = self._others + self._dice.uniform(0.0, 0.01)
        available = 2 * self._whole + kept - held - int(others * self._whole)
        is_stalled = available < kept and self._dice.random() < 0.3
        return Reading(
            available_bytes=max(0, available),
            kept_free_bytes=kept,
            strain=Strain.STALLED if is_stalled else Strain.UNSAID,
        )
