"""A core that keeps spare workers, for models of the MLX engine that need memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlxsup.protocol.ids import ModelName
from mlxsup.supervisor.core.actions import EndSpare, Spawn, StartSpare
from mlxsup.supervisor.core.events import Reloaded, Sampled, SpareEnded, SpareReady
from mlxsup.supervisor.core.settings import ModelSettings

from .core_driver import LAUNCH, entry
from .core_memory import MemoryDriver, limited

PID = 500
"""Of the first spare worker; the next ones count on."""


def real(name: str, needed_bytes: int = 4, **changes: Any) -> ModelSettings:
    """A model of the engine that spare workers have imported."""
    launch = replace(LAUNCH, engine="mlx", memory_limit_bytes=needed_bytes)
    return entry(name, launch=launch, **changes)


class SpareDriver(MemoryDriver):
    """Plays spare workers of two bytes each.

    Args:
        models: the entries.
        spare_workers: how many the configuration asks for.
        budget_bytes: for all.
        changes: of the settings.
    """

    def __init__(
        self, models: list[ModelSettings], spare_workers: int, budget_bytes: int, **changes: Any
    ) -> None:
        self.settings_now = limited(
            budget_bytes, spare_workers=spare_workers, spare_bytes=2, **changes
        )
        self.entries = models
        super().__init__(models, self.settings_now)

    def started(self) -> list[int]:
        """The numbers of the spares that the latest event has started."""
        return [action.number for action in self.actions if isinstance(action, StartSpare)]

    def told_to_end(self) -> list[int]:
        """The numbers of those that it has ended."""
        return [action.number for action in self.actions if isinstance(action, EndSpare)]

    def spawned_with(self) -> list[tuple[ModelName, int | None]]:
        """The models that it has spawned, and with which spare."""
        return [(a.model, a.spare) for a in self.actions if isinstance(a, Spawn)]

    def spare_ready(self, number: int) -> None:
        """One has imported everything."""
        self.do(SpareReady(now=self.now, number=number, pid=PID + number))

    def spare_gone(self, number: int) -> None:
        """The process of one is gone."""
        self.do(SpareEnded(now=self.now, number=number))

    def measure(self, number: int, held_bytes: int) -> None:
        """A spare is measured."""
        held = {PID + number: held_bytes}
        self.do(Sampled(now=self.now, footprint_bytes=held, machine_bytes=100))

    def reload(self, **changes: Any) -> None:
        """The configuration is read again, with these settings changed."""
        self.settings_now = replace(self.settings_now, **changes)
        models = tuple(self.entries)
        self.do(Reloaded(now=self.now, settings=self.settings_now, models=models))

    def spares(self) -> dict[str, str]:
        """By pid, or by `-` for one that has none yet, what the status says of each."""
        workers = self.core.status(self.now)["spares"]["workers"]
        return {str(worker["pid"] or "-"): worker["state"] for worker in workers}
