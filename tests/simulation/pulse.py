"""The heartbeats of a played process: what it says of itself beside its messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxsup.protocol.states import WorkerPhase
from mlxsup.protocol.worker_messages import Heartbeat

from .faults import MUTE_HANGS
from .reading import Has

if TYPE_CHECKING:
    from .worker import PlayedWorker
    from .world import World

BEAT_S = 0.5


class Pulse:
    """Of one process.

    Args:
        worker: whose beats they are.
        world: that it lives in.
    """

    def __init__(self, worker: PlayedWorker, world: World) -> None:
        self._worker, self._world = worker, world
        self._link = world.link("beat")

    def begin(self) -> None:
        """From now on it beats, until it is dead or mute."""
        worker = self._worker
        fault = worker.fault.name if worker.fault else ""
        if worker.is_alive and not worker.is_frozen and fault not in (*MUTE_HANGS, "mute"):
            self.beat()
            self._world.time.after(BEAT_S, self.begin)

    def beat(self) -> None:
        """Sends one beat."""
        worker = self._worker
        phase, phase_s, predicted_s = self._phase()
        memory = self._world.reported_bytes(worker)
        beat = Heartbeat(
            step=worker.batch.steps,
            phase=phase,
            phase_s=phase_s,
            predicted_s=predicted_s,
            requests=worker.batch.held,
            preparing=worker.batch.preparing,
            budget=worker.batch.memory.budget,
            sent=worker.sent,
            received=worker.received,
            active_bytes=memory - memory // 3,
            cache_bytes=0 if worker.has_given_back else memory // 3,
        )
        self._link.send(lambda: worker.hand_over(beat))

    def _phase(self) -> tuple[WorkerPhase, float, float]:
        worker, now = self._worker, self._world.time.now
        if not worker.is_ready:
            return WorkerPhase.LOADING, 0.0, 0.0
        if worker.fault is not None and worker.fault.name == "waits_on":
            return WorkerPhase.WAITING, now - worker.fault.since, 0.0
        if (
            worker.works_since is None
            and worker.batch.rows
            and worker.batch.reading.has is Has.ASKED
        ):
            return WorkerPhase.WAITING, now - worker.waits_since, 0.0
        if worker.works_since is None:
            return WorkerPhase.IDLE, 0.0, 0.0
        took_s = now - worker.works_since
        if worker.fault is not None and worker.fault.name == "blocked":
            return WorkerPhase.ROWS, took_s, 0.0
        if worker.predicted_s:
            return WorkerPhase.PREFILL, took_s, worker.predicted_s
        return WorkerPhase.DECODE, took_s, 0.0
