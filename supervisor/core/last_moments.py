"""What a process was doing when it died, and what became of it: an entry of the flight recorder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlxsup.protocol.flight import CONTINUES, GIVEN_UP, PAUSED, LostRow, RequestEnded, WorkerDied
from mlxsup.protocol.states import ExitReason

from .health.blame import Verdict
from .lifecycle.on_exit import ending_of, ready_for_s
from .lifecycle.states import Backoff, Loading
from .lifecycle.triggers import Died, GivenUp
from .model import Model
from .outbox import Outbox
from .requests.ledger import Request, Stage

MOST_ROWS = 32
"""An entry names at most this many requests, and counts the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastMoments:
    """What is forgotten as soon as the end of a process has been handled.

    Attributes:
        died: how it ended.
        process: the fields of the entry that are about the process.
        running: the requests that it ran.
    """

    died: Died
    process: dict[str, Any]
    running: list[Request]

    @classmethod
    def of(cls, model: Model, died: Died, now: float) -> LastMoments:
        """Looks at a process that has ended, before anything follows from that."""
        life, beat = model.life, model.heartbeat
        stopping = ending_of(life, died)
        process = {
            "model": life.name,
            "generation": life.generation,
            "pid": life.pid,
            "ended_by": stopping.cause.name.lower() if stopping else "",
            "doing": _doing(model),
            "steps": model.steps,
            "footprint_bytes": life.footprint_bytes,
            "active_bytes": beat.active_bytes if beat else 0,
            "cache_bytes": beat.cache_bytes if beat else 0,
            "limit_bytes": life.launch.memory_limit_bytes or 0,
            "machine_bytes": model.machine_bytes,
            "ready_s": ready_for_s(life, now),
        }
        return cls(died=died, process=process, running=list(model.running.values()))

    def record(self, model: Model, verdict: Verdict, outbox: Outbox, now: float) -> None:
        """Records the end, once everything has followed from it, unless it was asked for and hit no
        request.

        Args:
            model: whose process it was.
            verdict: what its end means for its requests.
            outbox: takes the entry, and has the ends of those that did not outlive it.
            now: monotonic seconds.
        """
        entry = self._entry(model, verdict, outbox, now)
        if entry.rows or entry.reason != ExitReason.ASKED:
            outbox.record(entry, now)

    def _entry(self, model: Model, verdict: Verdict, outbox: Outbox, now: float) -> WorkerDied:
        life, died, last = model.life, self.died, model.life.last_exit
        phase, restarts = life.phase, life.settings.restart
        is_given_up = isinstance(died, GivenUp)
        detail = died.text if last is None or is_given_up else last.detail
        outcomes = {
            action.number: action.outcome for action in outbox if isinstance(action, RequestEnded)
        }
        return WorkerDied(
            **self.process,
            reason=GIVEN_UP if last is None or is_given_up else last.reason.value,
            code=died.exit_code,
            signal=died.signal_name,
            cause=died.cause.value,
            detail=detail,
            evidence=verdict.evidence.value,
            verdict=verdict.story,
            rows=[_row(model, one, outcomes) for one in self.running[:MOST_ROWS]],
            more_rows=max(0, len(self.running) - MOST_ROWS),
            after=life.state.value,
            retry_in_s=max(0.0, phase.retry_at - now) if isinstance(phase, Backoff) else None,
            failure=life.failure,
            crashes=life.restarts.crashes,
            most_crashes=restarts.max_restarts,
            window_s=restarts.window_s,
        )


def _doing(model: Model) -> str:
    """`decode`, or `weights 40%` while it loads; empty if nobody knows."""
    phase = model.life.phase
    if isinstance(phase, Loading):
        return f"{phase.load_phase} {phase.progress:.0%}"
    return model.doing.phase.value if model.doing else ""


def _row(model: Model, request: Request, outcomes: dict[int, str]) -> LostRow:
    waits = PAUSED if request.stage is Stage.PAUSED else CONTINUES
    return LostRow(
        id=request.id,
        number=request.key,
        tokens=request.tokens_sent,
        fate=outcomes.get(request.key, waits),
        is_suspect=model.blame.is_suspect(request.digest),
    )
