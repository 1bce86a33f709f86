"""What the shell reports of one incarnation: its process, its connection, and what it says."""

from __future__ import annotations

from dataclasses import dataclass

from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.protocol.worker_messages import WorkerMessage
from mlxsup.supervisor.core.events import (
    Exited,
    Spawned,
    SpawnFailed,
    WorkerBroke,
    WorkerSaid,
    WorkerUnlinked,
)

from .faults import SIGNAL_NUMBERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """Makes the events of one incarnation; `now` is when the shell sees what they report."""

    model: ModelName
    generation: Generation

    def spawned(self, pid: int, now: float) -> Spawned:
        """Its process runs."""
        return Spawned(now=now, model=self.model, generation=self.generation, pid=pid)

    def spawn_failed(self, now: float) -> SpawnFailed:
        """No process could be started."""
        return SpawnFailed(
            now=now, model=self.model, generation=self.generation, detail="no processes"
        )

    def said(self, message: WorkerMessage, now: float) -> WorkerSaid:
        """It has sent a message."""
        return WorkerSaid(now=now, model=self.model, generation=self.generation, message=message)

    def broke(self, now: float, *, is_other_version: bool) -> WorkerBroke:
        """It has sent what is no message."""
        return WorkerBroke(
            now=now,
            model=self.model,
            generation=self.generation,
            detail="garbage",
            is_other_version=is_other_version,
        )

    def unlinked(self, now: float) -> WorkerUnlinked:
        """Its connection has ended."""
        return WorkerUnlinked(now=now, model=self.model, generation=self.generation)

    def exited(self, code: int | None, signal: str, now: float) -> Exited:
        """Its process has ended, with `code` or by `signal`; nothing was printed before."""
        return Exited(
            now=now,
            model=self.model,
            generation=self.generation,
            exit_code=code,
            signal=SIGNAL_NUMBERS.get(signal),
            signal_name=signal,
        )
