"""The machine that a run takes place on: other programs take its memory, and give it back."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from mlxsup.supervisor.core.events import Sampled
from mlxsup.supervisor.core.memory.pressure import Reading, Strain

if TYPE_CHECKING:
    from .world import World

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
        self._dice = random.Random(f"others of {world.plan.seed}")
        self._whole = world.plan.budget_bytes or 0
        self._is_shared = self._whole > 0 and self._dice.random() < SHARED_SHARE
        self._others = 0.0
        self._until = 0.0
        self._healed_s = 0
        self.overgrown: dict[int, int] = {}

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
