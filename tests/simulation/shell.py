"""What surrounds the core besides workers and clients: a hub to download from, and a machine whose
memory others need.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING

from mlxsup.protocol.download import (
    DownloadDone,
    DownloadFailed,
    DownloadProblem,
    DownloadProgress,
    DownloadReport,
    Repository,
)
from mlxsup.protocol.ids import ModelName
from mlxsup.supervisor.core.actions import EndDownload, StartDownload
from mlxsup.supervisor.core.events import Appraised, DownloadSaid, Sampled
from mlxsup.supervisor.core.memory.need import Need
from mlxsup.supervisor.core.memory.pressure import Reading, Strain
from mlxsup.supervisor.core.settings import ModelSettings

from .plan import Kind, Plan

if TYPE_CHECKING:
    from .world import World


# ---------------------------------------------------------------- hub

LACKING_SHARE = 0.3
"""Of runs."""
REPOSITORIES = (Repository("org/one"), Repository("org/two", "v2"))
TOTAL_BYTES = 1000
STEPS_S = (0.02, 0.2, 0.6)
FAILS_SHARE = 0.15
"""Of steps, where downloads fail at all."""
REMOVED_SHARE = 0.2
"""Of readings of the file, those before which somebody has removed a snapshot."""
OUTAGES = (DownloadProblem.NETWORK, DownloadProblem.RATE_LIMITED)
BUGS = (DownloadProblem.INTERNAL,)
PROBLEMS: dict[Kind, tuple[DownloadProblem, ...]] = {
    Kind.LOADS: (*OUTAGES, DownloadProblem.GATED),
    Kind.PEOPLE: OUTAGES,
    Kind.STORM: (*OUTAGES, *BUGS, DownloadProblem.DISK_FULL),
}


def lack_files(plan: Plan) -> None:
    """In some runs most models have to be downloaded first; a pinned one is there already.

    The dice are not those of the run, so that the others stay as they are.
    """
    dice = random.Random(f"hub of {plan.seed}")
    if dice.random() >= LACKING_SHARE:
        return
    for place, entry in enumerate(plan.models):
        if not entry.pinned and dice.random() < 0.8:
            lacks = dice.choice(REPOSITORIES)
            plan.models[place] = replace(
                entry, repo=lacks.repo, revision=lacks.revision, download=lacks
            )


class Hub:
    """Its repositories, the downloads that run, and the snapshots that are on the disk.

    Args:
        world: in which it happens.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._dice = world.plan.dice("downloads of")
        self._problems = PROBLEMS.get(world.plan.kind, ())
        self._running: dict[int, Repository] = {}
        self._bytes: dict[Repository, int] = {}
        self._folders: dict[Repository, str] = {}
        self._arrived = 0

    # ------------------------------------------------------------ what is on the disk

    def as_read(self, entry: ModelSettings) -> ModelSettings:
        """What the file says of a model if it is read now: what is there is a folder."""
        folder = self._folders.get(entry.download) if entry.download is not None else None
        if folder is None:
            return entry
        return replace(entry, download=None, launch=replace(entry.launch, path=folder))

    def needs(self) -> dict[ModelName, Need]:
        """What the models need whose files are there, and what running out of memory has raised;
        nothing without a memory budget."""
        plan = self._world.plan
        if plan.budget_bytes is None:
            return {}
        raised = self._world.record.raised
        appraised = plan.appraised()
        return {
            entry.name: replace(appraised[entry.name], raised_bytes=raised.get(entry.name, 0))
            for entry in plan.models
            if self.as_read(entry).download is None
        }

    def lose_one(self) -> None:
        """Somebody may remove a snapshot; not where what processes need is counted, because the
        needs of those that still have it loaded would no longer be known."""
        if not self._folders or self._world.is_healing:
            return
        if self._world.plan.budget_bytes is None and self._dice.random() < REMOVED_SHARE:
            lost = self._dice.choice(sorted(self._folders))
            del self._folders[lost]
            self._bytes.pop(lost, None)
            self._world.record.count("a snapshot was removed")

    # ------------------------------------------------------------ downloads

    def obey(self, action: StartDownload | EndDownload) -> None:
        """What the shell does about it: nothing more is reported of a download that was ended."""
        if isinstance(action, EndDownload):
            del self._running[action.number]
            return
        self._running[action.number] = action.repository
        self._continue_later(action.number)

    def _continue_later(self, number: int) -> None:
        self._world.time.after(self._dice.choice(STEPS_S), lambda: self._continue(number))

    def _continue(self, number: int) -> None:
        repository = self._running.get(number)
        if repository is None:
            return
        is_there = repository in self._folders
        is_smooth = is_there or self._world.is_healing or not self._problems
        if not is_smooth and self._dice.random() < FAILS_SHARE:
            self._fail(number)
            return
        done = self._bytes.get(repository, 0) + self._dice.randint(0, TOTAL_BYTES // 3)
        if is_there or done >= TOTAL_BYTES:
            self._complete(number, repository)
            return
        self._bytes[repository] = done
        is_waiting = self._dice.random() < 0.1
        self._say(
            number,
            DownloadProgress(done_bytes=done, total_bytes=TOTAL_BYTES, is_waiting=is_waiting),
        )
        self._continue_later(number)

    def _complete(self, number: int, repository: Repository) -> None:
        if repository not in self._folders:
            self._arrived += 1
            self._folders[repository] = f"/hub/{repository.repo}/{self._arrived}"
        if needs := self.needs():
            self._world.handle(Appraised(now=self._world.time.now, needs=needs))
        folder = self._folders[repository]
        done = DownloadDone(folder=folder, total_bytes=TOTAL_BYTES, fetched_bytes=TOTAL_BYTES)
        del self._running[number]
        self._say(number, done)

    def _fail(self, number: int) -> None:
        del self._running[number]
        problem = self._dice.choice(self._problems)
        is_limited = problem is DownloadProblem.RATE_LIMITED
        after_s = self._dice.choice((0.0, 0.7, 4.0)) if is_limited else 0.0
        failed = DownloadFailed(problem=problem, message=f"no: {problem}", retry_after_s=after_s)
        self._say(number, failed)

    def _say(self, number: int, report: DownloadReport) -> None:
        world = self._world
        world.handle(DownloadSaid(now=world.time.now, number=number, report=report))


# ---------------------------------------------------------------- machine

SHARED_SHARE = 0.5
"""Of runs with a memory budget, those in which others need memory, too."""
MACHINE_BYTES = 10_000
OTHERS = (0.0, 0.0, 0.5, 1.2, 1.6, 2.1)
"""What others hold, of the budget; the machine has twice the budget, and what stays free."""
HEALS_S = 60
"""So long after the last shortage it is still measured; nothing changes any more."""
LASTS_S = (2.0, 4.0, 12.0, 25.0)
NOISE = 0.01


class Machine:
    """Measured each second, if others need its memory, until the daemon has ended.

    Args:
        world: whose processes live here.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._dice = world.plan.dice("others of")
        self._whole = world.plan.budget_bytes or 0
        self._is_shared = self._whole > 0 and self._dice.random() < SHARED_SHARE
        self._others = 0.0
        self._until = 0.0
        self._healed_s = 0
        self.overgrown: dict[int, int] = {}

    def take(self, share: float) -> None:
        """Other programs hold this share of the budget from now on."""
        self._others, self._until = share, math.inf

    def begin(self) -> None:
        """The daemon has begun."""
        if self._is_shared:
            self._measure()

    def sampled(self) -> Sampled:
        """What is measured now."""
        world = self._world
        footprint = dict(self.overgrown)
        if self._is_shared:
            for worker in world.living():
                own = worker.footprint_bytes(world.record.memory_need(worker.model))
                footprint.setdefault(worker.pid, own)
                if not worker.is_alive:  # its memory is being freed
                    footprint[worker.pid] = 0
        return Sampled(
            now=world.time.now,
            footprint_bytes=footprint,
            machine_bytes=MACHINE_BYTES,
            reading=self._reading() if self._is_shared else None,
        )

    def _measure(self) -> None:
        if self._world.has_finished or self._healed_s == HEALS_S:
            return
        if self._world.is_healing:
            self._others = 0.0
            self._healed_s += 1
        elif self._world.time.now >= self._until:
            self._others = self._dice.choice(OTHERS)
            self._until = self._world.time.now + self._dice.choice(LASTS_S)
        self._world.handle(self.sampled())
        self._world.time.after(1.0, self._measure)

    def _reading(self) -> Reading:
        world, kept = self._world, self._whole // 10
        held = sum(
            max(
                self.overgrown.get(worker.pid, 0),
                worker.footprint_bytes(world.record.memory_need(worker.model)),
            )
            for worker in world.living()
        )
        others = self._others + self._dice.uniform(0.0, NOISE)
        available = 2 * self._whole + kept - held - int(others * self._whole)
        is_stalled = available < kept and self._dice.random() < 0.3
        return Reading(
            available_bytes=max(0, available),
            kept_free_bytes=kept,
            strain=Strain.STALLED if is_stalled else Strain.UNSAID,
        )
