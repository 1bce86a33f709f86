"""The core's state as maps; the keys are the contract of `status --json`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mlxsup.protocol.pooling import Task, capabilities
from mlxsup.protocol.states import PendingReason, State, WaitReason
from mlxsup.protocol.worker_messages import Heartbeat

from .gateway import Gateway
from .kv_budget import bytes_to_load, longest_stream
from .lifecycle.life import Life
from .lifecycle.states import Backoff, Draining, Fetching, Loading, Pending, Ready
from .memory.budget import Budget
from .memory_view import overshoot_bytes
from .model import Model
from .request_status import (
    line_map,
    paused_rows_map,
    per_class_map,
    queue_map,
    rows_map,
    wait_reason,
    yielded_ids,
)
from .requests.ledger import Ledger

SCHEMA_VERSION = 1

"""What the status calls what a model is for."""


@dataclass(slots=True, kw_only=True)
class Daemon:
    """What the status says about the daemon itself.

    Attributes:
        facts: version, pid, endpoint and the like, as the shell found them.
        started_at: monotonic seconds.
        machine_bytes: memory of the machine; 0 before it was measured.
        gateway: what is known of its gateway.
    """

    facts: Mapping[str, Any]
    gateway: Gateway | None = None
    started_at: float = 0.0
    machine_bytes: int = 0


def status_map(
    models: Iterable[Model],
    ledger: Ledger,
    daemon: Daemon,
    budget: Budget | None,
    now: float,
    *,
    warm_pool: dict[str, Any],
    is_ending: bool,
) -> dict[str, Any]:
    """Everything `status --json` shows; seconds and bytes are plain numbers."""
    fleet = list(models)
    rows = [model_row(model, now) for model in fleet]
    engine_s = sum(model.totals.engine_s for model in fleet)
    over_bytes = overshoot_bytes(fleet, budget)
    is_lacking = over_bytes > 0 or any(row["memory_wait"] for row in rows)
    for row in rows:
        row["share"] = row["engine_s"] / engine_s if engine_s else None
    return {
        "schema_version": SCHEMA_VERSION,
        **daemon.facts,
        "uptime_s": now - daemon.started_at,
        "stopping": _stopping_map(fleet, now) if is_ending else None,
        "memory": {
            **_amounts_map(rows),
            "budget_bytes": budget.whole_bytes if budget else None,
            "effective_budget_bytes": budget.size_bytes if budget else None,
            "shortage": budget.shortage if budget else "",
            # Any desktop's programs lower the budget: it is short once a model loses by that.
            "is_short": budget is not None and bool(budget.shortage) and is_lacking,
            "over_bytes": over_bytes,
            "reserved_bytes": sum(row["reserved_bytes"] for row in (*rows, *warm_pool["workers"])),
            "machine_bytes": daemon.machine_bytes,
        },
        "warm_pool": warm_pool,
        "gateway": daemon.gateway.status(now) if daemon.gateway else None,
        "queue": queue_map(fleet, ledger),
        "models": rows,
    }


def _amounts_map(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """What the processes of models take, and what they may grow to: the one place where either is
    added up. Prewarmed workers are in neither: they go before any model does."""
    used_bytes = reserved_bytes = 0
    for row in rows:
        used_bytes += row["footprint_bytes"]
        reserved_bytes += max(row["reserved_bytes"], row["footprint_bytes"])
    return {"used_bytes": used_bytes, "may_grow_to_bytes": reserved_bytes}


def _stopping_map(models: Iterable[Model], now: float) -> dict[str, Any]:
    """How many requests still run while the daemon ends, and how long they may take at most."""
    ends = [model.life.phase.ends_at for model in models if isinstance(model.life.phase, Draining)]
    return {
        "running": sum(len(model.batch.running) for model in models),
        "limit_s": max(0.0, max(ends, default=now) - now),
    }


def model_row(model: Model, now: float) -> dict[str, Any]:
    """One model's part of the status."""
    model.blame.expire(now)  # nothing else may have happened since an hour was over
    model.queue.age(now)
    model.settle()
    life, phase, beat, doing = (
        model.life,
        model.life.phase,
        model.process.heartbeat,
        model.process.doing,
    )
    task = _task(model)
    return {
        **_names_map(model),
        "state": life.state.value,
        "wanted": life.wanted.value,
        "why": life.why.value,
        "since_s": now - phase.since
        if life.generation or life.state is not State.STOPPED
        else None,
        "generation": life.generation,
        "pid": life.pid,
        "restarts": life.crash_restarts,
        "last_exit": asdict(life.last_exit) if life.last_exit else None,
        "exits": _exits_map(life),
        "cause": _cause(life),
        "retry_in_s": max(0.0, phase.retry_at - now) if isinstance(phase, Backoff) else None,
        "progress": load_progress(model),
        "queued": len(model.queue),
        "queued_per_class": per_class_map(model),
        "line": line_map(model, now),
        "running": [request.id for request in model.batch.running.values()],
        "rows": rows_map(model, now),
        "paused": [request.id for request in model.paused.values()],
        "yielded": yielded_ids(model),
        "paused_rows": paused_rows_map(model, now),
        "alone": on_turn.id if (on_turn := model.on_turn) else None,
        "row_limit": model.row_limit,
        "suspects": model.blame.suspects,
        "on_probation": model.blame.on_probation,
        "quarantined": model.blame.quarantined,
        "tokens_per_s": model.process.tokens_per_s(now),
        "steps": model.process.steps,
        "engine_s": model.totals.engine_s,
        "repeated_s": model.totals.repeated_s,
        "pinned": life.settings.pinned,
        **_planned_map(model),
        "memory_wait": memory_wait(model, now),
        "footprint_bytes": life.footprint_bytes,
        "phase": doing.phase.value if doing else None,
        "phase_s": doing.phase_s if doing else None,
        "held_by_worker": beat.requests if beat else 0,
        "active_bytes": beat.active_bytes if beat else 0,
        "cache_bytes": beat.cache_bytes if beat else 0,
        "peak_bytes": beat.peak_bytes if beat else 0,
        "kept_bytes": beat.kept_bytes if beat else 0,
        "prefix_bytes": beat.prefix_bytes if beat else 0,
        "prefill_chunk": beat.prefill_chunk if beat else None,
        **_traffic_map(beat),
        "decode_stall_target_ms": life.launch.decode_stall_target_ms,
        "backend": model.process.ready.backend if model.process.ready else None,
        "context_length": _context_length(model),
        "task": task.value if task else None,
        "capabilities": _capabilities(model),
        "dimensions": (model.process.ready.dimensions or None) if model.process.ready else None,
        "batching": batching_map(model),
        "drafts": _drafts_map(model),
        "warnings": warnings_of(model),
        "loaded_for_s": now - phase.since if isinstance(phase, Ready) else None,
        "unloads_in_s": model.unloads_in_s(now),
        "load_phases_s": load_phases(model, now),
    }


def _traffic_map(beat: Heartbeat | None) -> dict[str, float | None]:
    """Return what prompts cost the rows beside them, and new shapes of steps all rows."""
    if beat is None:
        return dict.fromkeys(
            ("decode_kept", "interleaved_s", "interleaved_decode_s", "shapes_seen", "shapes_s")
        )
    kept = beat.interleaved_decode_s / beat.interleaved_s if beat.interleaved_s else None
    return {
        "decode_kept": kept,
        "interleaved_s": beat.interleaved_s,
        "interleaved_decode_s": beat.interleaved_decode_s,
        "shapes_seen": beat.shapes_seen,
        "shapes_s": beat.shapes_s,
    }


def _drafts_map(model: Model) -> dict[str, Any] | None:
    """Return how its rows guess tokens, and how many guesses were right; None if they are not to.

    `tokens` is how many a row guesses at once: 0 if it cannot, None before that is known.
    """
    if model.life.launch.drafts == "off":
        return None
    return {
        "mode": model.life.launch.drafts,
        "tokens": model.process.ready.draft_tokens if model.process.ready else None,
        "drafted": model.totals.drafted,
        "accepted": model.totals.draft_accepted,
    }


def _exits_map(life: Life) -> list[dict[str, Any]]:
    """Return how many of its processes have ended each way."""
    return [
        {"reason": reason.value, "cause": cause.value, "count": count}
        for (reason, cause), count in life.exits.items()
    ]


def _cause(life: Life) -> str | None:
    """Why it is FAILED, or why its download is tried again."""
    return life.download_cause or life.failure or None


def _names_map(model: Model) -> dict[str, Any]:
    """Return what the model may be called, and where its files are."""
    settings = model.life.settings
    presets = {name: dict(given) for name, given in settings.presets.items()}
    return {
        "name": model.name,
        "aliases": list(settings.aliases),
        "presets": presets,
        "adapters": dict(settings.launch.adapters),
        "repo": settings.repo or None,
        "revision": settings.revision or None,
        "folder": model.life.launch.path or None,
    }


def _context_length(model: Model) -> int | None:
    """Tokens of prompt and answer: what its worker has said, or else what its files say; None if
    they cannot be read."""
    if model.process.ready is not None:
        return model.process.ready.context_length
    return model.life.need.context_tokens if model.life.need else None


def _task(model: Model) -> Task | None:
    """What it is for: what its worker has said, or else what its files say; None if they cannot be
    read."""
    if model.process.ready is not None:
        return model.process.ready.task
    return model.life.need.task if model.life.need else None


def _capabilities(model: Model) -> list[str]:
    """Return what it can do, as its worker has said, or else its files; empty if that is not
    known."""
    known = model.process.ready or model.life.need
    return capabilities(known.task, takes_pictures=known.takes_pictures) if known else []


def _planned_map(model: Model) -> dict[str, int | None]:
    """What is planned for the model, and how much of what it needs is there because processes of
    it ran out of memory."""
    life = model.life
    return {
        "needed_bytes": bytes_to_load(model),
        "raised_bytes": life.need.raise_for(longest_stream(model)) if life.need else 0,
        "reserved_bytes": life.reserved_bytes,
        "row_budget_bytes": model.batch.budget.size_bytes if model.batch.budget else None,
    }


def change_map(model: Model, before: State, note: str) -> dict[str, Any]:
    """One change of a model's state, as watchers see it."""
    life = model.life
    is_loaded = before is State.LOADING and life.state is State.READY
    return {
        "model": model.name,
        "from": before.value,
        "to": life.state.value,
        "generation": life.generation,
        "pid": life.pid,
        "wanted": life.wanted.value,
        "why": life.why.value,
        "note": note,
        "progress": load_progress(model),
        "batching": batching_map(model) if is_loaded else None,
        "warnings": warnings_of(model) if is_loaded else [],
        "load_phases_s": load_phases(model, model.life.phase.since) if is_loaded else None,
    }


def batching_map(model: Model) -> dict[str, str] | None:
    """Return how rows of the model are batched and why; None while that is unknown."""
    ready = model.process.ready
    return {"mode": ready.batching.value, "reason": ready.batching_reason} if ready else None


def warnings_of(model: Model) -> list[str]:
    """The warnings that its worker gave at READY."""
    return list(model.process.ready.warnings) if model.process.ready else []


def load_phases(model: Model, now: float) -> dict[str, float] | None:
    """Return how many seconds each phase of its latest load took; None before any."""
    times = model.life.load_times.seconds(now)
    return {phase.value: seconds for phase, seconds in times.items()} or None


def load_progress(model: Model) -> dict[str, Any] | None:
    """Return how far a load has come, or what it is waiting for; None in every other state."""
    phase = model.life.phase
    if isinstance(phase, Loading):
        share = model.life.load_times.share_of_time(phase.progress)
        return {"phase": phase.load_phase.value, "fraction": share}
    if isinstance(phase, Pending) and phase.fetching is not None:
        return _download_progress(phase.fetching)
    if isinstance(phase, Pending):
        return {"phase": f"waiting for {phase.reason}", "fraction": 0.0}
    return None


def _download_progress(fetching: Fetching) -> dict[str, Any]:
    if fetching.is_waiting:
        return {"phase": "waiting for another download of it", "fraction": 0.0}
    return {
        "phase": PendingReason.DOWNLOAD.value,
        "fraction": fetching.fraction,
        "done_bytes": fetching.done_bytes,
        "total_bytes": fetching.total_bytes,
    }


def memory_wait(model: Model, now: float) -> dict[str, Any] | None:
    """For how long the model has been waiting for memory, and what is in the way; None if it does
    not wait for memory."""
    phase = model.life.phase
    if not isinstance(phase, Pending) or phase.lack is None:
        return None
    return {"waits_s": now - phase.lack.since, "reason": phase.lack.reason}


def waiting_news(model: Model) -> tuple[WaitReason, str, int]:
    """What all who wait for this model are notified of: the reason, and the load in tenths."""
    load = load_progress(model) or {"phase": "", "fraction": 0.0}
    return wait_reason(model), load["phase"], int(load["fraction"] * 10 + 1e-9)
