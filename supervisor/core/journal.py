"""The journal: the facts of models and requests that the core records, for `mlxsup why`.

Only what is rare is recorded (changes of state, deaths, and the start, pauses and end of each
request), as facts and not as sentences: a better sentence then explains an old death, too.
Requests that are refused on arrival are left out, because a flood of them would push out what
others ask for.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mlxsup.protocol.client_messages import Timings, Usage
from mlxsup.protocol.codec import to_map
from mlxsup.protocol.flight import (
    CONTINUES,
    GIVEN_UP,
    PAUSED,
    PROMPT_ONLY,
    Entry,
    LostRow,
    ModelChanged,
    RequestContinued,
    RequestEnded,
    RequestPaused,
    RequestStarted,
    WorkerDied,
)
from mlxsup.protocol.states import ExitReason, FinishReason, State

from .poison import Verdict
from .requests import Request, Stage
from .states import Backoff, Died, GivenUp, Loading
from .transitions import ending_of

if TYPE_CHECKING:
    from .actions import Action
    from .model import Model

CHANGES_OF_A_MODEL = 40
DEATHS_OF_A_MODEL = 8
OF_REQUESTS = 256
MOST_MODELS = 1024
"""Those that changed last; a configuration has far fewer."""

MOST_ROWS = 32
"""The entry of a death names at most this many requests, and counts the others."""


class Journal:
    """The latest entries, in memory; the shell writes all of them to files."""

    def __init__(self) -> None:
        self._last_number = 0
        # Entries with their numbers, which count as those in the files do, and their times in
        # monotonic seconds. Bounded by the four numbers above.
        self._changes: dict[str, deque[tuple[int, float, Entry]]] = {}
        self._deaths: dict[str, deque[tuple[int, float, Entry]]] = {}
        self._requests: deque[tuple[int, float, Entry]] = deque(maxlen=OF_REQUESTS)

    def keep(self, entry: Entry, now: float) -> None:
        """Keep an entry."""
        self._last_number += 1
        kept = (self._last_number, now, entry)
        match entry:
            case WorkerDied(model=model):
                _ring(self._deaths, model, DEATHS_OF_A_MODEL).append(kept)
            case ModelChanged(model=model):
                _ring(self._changes, model, CHANGES_OF_A_MODEL).append(kept)
            case _:
                self._requests.append(kept)

    def entries(self, now: float) -> list[dict[str, Any]]:
        """Return what is kept, oldest first: `n`, `kind`, the entry's fields, and `ago_s`."""
        kept = heapq.merge(*self._changes.values(), *self._deaths.values(), self._requests)
        return [
            {"n": number, "ago_s": now - at, "kind": entry.KIND, **to_map(entry)}
            for number, at, entry in kept
        ]


def _ring(
    rings: dict[str, deque[tuple[int, float, Entry]]], model: str, length: int
) -> deque[tuple[int, float, Entry]]:
    """Return the ring of a model, which becomes the latest; the oldest of too many goes."""
    ring = rings.pop(model, None)
    if ring is None:
        ring = deque(maxlen=length)
    rings[model] = ring
    while len(rings) > MOST_MODELS:
        del rings[next(iter(rings))]
    return ring


# ---------------------------------------------------------------- models


def model_changed(model: Model, before: State, note: str) -> ModelChanged:
    """Return that a model has another state than before."""
    life = model.life
    return ModelChanged(
        model=life.name,
        generation=life.generation,
        before=before.value,
        after=life.state.value,
        why=life.why.value,
        note=note,
    )


def last_moments(model: Model, died: Died, now: float) -> dict[str, Any]:
    """Return the fields of `WorkerDied` that are forgotten once the end of a process is handled."""
    life, beat = model.life, model.process.heartbeat
    stopping = ending_of(life, died)
    if isinstance(life.phase, Loading):
        doing = f"{life.phase.load_phase} {life.phase.progress:.0%}"
    else:
        doing = model.process.doing.phase.value if model.process.doing else ""
    return {
        "model": life.name,
        "generation": life.generation,
        "pid": life.pid,
        "ended_by": stopping.cause.value if stopping else "",
        "doing": doing,
        "steps": model.process.steps,
        "footprint_bytes": life.footprint_bytes,
        "active_bytes": beat.active_bytes if beat else 0,
        "cache_bytes": beat.cache_bytes if beat else 0,
        "limit_bytes": life.launch.memory_limit_bytes or 0,
        "machine_bytes": model.process.machine_bytes,
        "ready_s": life.ready_for_s(now),
    }


def worker_died(
    model: Model,
    died: Died,
    verdict: Verdict,
    moments: dict[str, Any],
    running: list[Request],
    actions: Iterable[Action],
    now: float,
) -> WorkerDied | None:
    """Return how a process ended, and what became of what it ran, once that has been decided.

    Args:
        moments: `last_moments` of it.
        actions: what the end has led to, with the ends of the requests that did not outlive it.

    Returns:
        None if its end was asked for and hit no request.
    """
    life, last = model.life, model.life.last_exit
    phase, restarts = life.phase, life.settings.restart
    is_given_up = last is None or isinstance(died, GivenUp)
    reason = GIVEN_UP if is_given_up or last is None else last.reason.value
    if reason == ExitReason.ASKED and not running:
        return None
    outcomes = {one.number: one.outcome for one in actions if isinstance(one, RequestEnded)}
    rows = [
        LostRow(
            id=request.id,
            number=request.key,
            tokens=request.tokens_sent,
            fate=outcomes.get(request.key, PAUSED if request.stage is Stage.PAUSED else CONTINUES),
            is_suspect=model.blame.is_suspect(request.digest),
        )
        for request in running[:MOST_ROWS]
    ]
    return WorkerDied(
        **moments,
        reason=reason,
        code=died.exit_code,
        signal=died.signal_name,
        cause=died.cause.value,
        detail=died.text if is_given_up or last is None else last.detail,
        evidence=verdict.evidence.value,
        verdict=verdict.story,
        rows=rows,
        more_rows=max(0, len(running) - MOST_ROWS),
        after=life.state.value,
        retry_in_s=max(0.0, phase.due_at - now) if isinstance(phase, Backoff) else None,
        failure=life.failure,
        crashes=life.restarts.crashes,
        most_crashes=restarts.max_restarts,
        window_s=restarts.window_s,
    )


# ---------------------------------------------------------------- requests


def request_started(model: Model, request: Request, now: float) -> RequestStarted:
    """Return that a request is handed to a worker as new."""
    return RequestStarted(
        id=request.id,
        number=request.key,
        model=request.model,
        client=request.account,
        generation=model.life.generation,
        queued_s=now - request.arrived_at,
    )


def request_paused(request: Request) -> RequestPaused:
    """Return that the row of a request has left the batch."""
    return RequestPaused(
        id=request.id,
        number=request.key,
        model=request.model,
        reason=request.pauses.reason.value,
        tokens=request.tokens_sent,
    )


def request_continued(model: Model, request: Request) -> RequestContinued:
    """Return that a request is about to say something again, after a crash or a pause."""
    return RequestContinued(
        id=request.id,
        number=request.key,
        model=request.model,
        after="crash" if request.crashes.is_interrupted else "pause",
        generation=model.life.generation,
        tokens=request.tokens_sent,
    )


def request_ended(request: Request, outcome: str, usage: Usage, timings: Timings) -> RequestEnded:
    """Return that a request has its end.

    Args:
        outcome: its finish reason, the code of its error, or `gone`.
    """
    if outcome == FinishReason.LENGTH and not usage.completion_tokens:
        outcome = PROMPT_ONLY
    return RequestEnded(
        id=request.id,
        number=request.key,
        model=request.model,
        outcome=outcome,
        client=request.account,
        usage=usage,
        timings=timings,
        resumed=request.crashes.resumed,
        paused=request.pauses.count,
        warnings=list(request.sent.warnings),
    )
