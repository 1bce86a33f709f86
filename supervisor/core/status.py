"""The core's state as maps: models and requests as `status --json` and `mlxsup requests` show them.
The keys are a contract.

The list of all open requests is no part of the status, which is asked for every second: it is made
only on request, and nothing is kept for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from mlxsup.protocol.download import DownloadProgress
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import LAST_REQUEST, ModelName
from mlxsup.protocol.states import PauseReason, PendingReason, State, WaitReason, Why
from mlxsup.protocol.tasks import capabilities
from mlxsup.protocol.worker_messages import Heartbeat, RankState

from .gateway import Gateway
from .life import Backoff, Draining, Loading, Pending, Phase, Ready
from .model import Model
from .requests import URGENT, Ledger, Request, Stage

if TYPE_CHECKING:
    from .fleet import Fleet

SCHEMA_VERSION = 1


@dataclass(slots=True, kw_only=True)
class Daemon:
    """The part of the status that is about the daemon itself.

    Attributes:
        facts: version, pid, endpoint and the like, as the shell found them.
        started_at: monotonic seconds.
        gateway: what is known of its gateway.
    """

    facts: Mapping[str, Any]
    gateway: Gateway
    started_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """The daemon at one moment.

    Attributes:
        states: each model's state, in the order of the configuration.
        is_busy: whether there is an answer that is not paused, a load or a download, all of
            which would stand still if the machine fell asleep.
        is_ending: whether the daemon was asked to end.
    """

    states: tuple[tuple[ModelName, State], ...]
    is_busy: bool
    is_ending: bool


def outline_of(fleet: Fleet) -> Outline:
    """Return what the machine around the daemon wants to know of it."""
    return Outline(
        states=tuple((model.name, model.life.state) for model in fleet),
        is_busy=any(request.stage is not Stage.PAUSED for request in fleet.ledger)
        or any(_is_coming_up(model.life.phase) for model in fleet),
        is_ending=fleet.is_shutting_down,
    )


def _is_coming_up(phase: Phase) -> bool:
    """True if its process loads, or its files arrive; it may wait for memory for ever."""
    if isinstance(phase, Pending):
        return phase.fetching is not None
    return phase.STATE is State.LOADING


def status_map(fleet: Fleet, daemon: Daemon, now: float) -> dict[str, Any]:
    """Return everything `status --json` shows; seconds and bytes are plain numbers."""
    budget, warm_pool = fleet.settings.budget, fleet.warm_pool.status(fleet.settings, now)
    rows = [model_row(model, now) for model in fleet]
    engine_s = sum(model.meter.engine_s for model in fleet)
    over_bytes = fleet.overshoot_bytes(now)
    is_lacking = over_bytes > 0 or any(row["memory_wait"] for row in rows)
    for row in rows:
        row["share"] = row["engine_s"] / engine_s if engine_s else None
    return {
        "schema_version": SCHEMA_VERSION,
        **daemon.facts,
        "uptime_s": now - daemon.started_at,
        "stopping": _stopping_map(fleet, now) if fleet.is_shutting_down else None,
        "memory": {
            # The one place where either is added up. Prewarmed workers are in neither: they go
            # before any model does.
            "used_bytes": sum(row["footprint_bytes"] for row in rows),
            "may_grow_to_bytes": sum(
                max(row["reserved_bytes"], row["footprint_bytes"]) for row in rows
            ),
            "budget_bytes": budget.whole_bytes if budget else None,
            "effective_budget_bytes": budget.size_bytes if budget else None,
            "shortage": budget.shortage if budget else "",
            # Any desktop's programs lower the budget: it is short once a model loses by that.
            "is_short": budget is not None and bool(budget.shortage) and is_lacking,
            "over_bytes": over_bytes,
            "reserved_bytes": sum(row["reserved_bytes"] for row in (*rows, *warm_pool["workers"])),
            "machine_bytes": fleet.machine_bytes,
        },
        "warm_pool": warm_pool,
        "gateway": daemon.gateway.status(now),
        "queue": queue_map(fleet, fleet.ledger),
        "models": rows,
    }


def _stopping_map(models: Iterable[Model], now: float) -> dict[str, Any]:
    """Return how many requests still run while the daemon ends, and how long they may take
    at most."""
    ends = [model.life.phase.due_at for model in models if isinstance(model.life.phase, Draining)]
    return {
        "running": sum(len(model.batch.running) for model in models),
        "limit_s": max(0.0, max(ends, default=now) - now),
    }


def model_row(model: Model, now: float) -> dict[str, Any]:
    """Return one model's part of the status."""
    model.blame.expire(now)  # nothing else may have happened since an hour was over
    model.queue.age(now)
    model.meter.settle()
    life, process, running = model.life, model.process, model.batch.running
    phase, settings, need = life.phase, life.settings, life.need
    ready, beat, doing = process.ready, process.heartbeat, process.doing
    known = ready or need  # what its worker has said counts before what its files say
    again = model.queue.again
    return {
        "name": model.name,
        "aliases": list(settings.aliases),
        "presets": {name: dict(given) for name, given in settings.presets.items()},
        "adapters": dict(settings.launch.adapters),
        "repo": settings.repo or None,
        "revision": settings.revision or None,
        "folder": life.launch.path or None,
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
        "exits": [
            {"reason": reason.value, "cause": cause.value, "count": count}
            for (reason, cause), count in life.exits.items()
        ],
        "cause": life.download_cause or life.failure or None,
        "retry_in_s": max(0.0, phase.due_at - now) if isinstance(phase, Backoff) else None,
        "progress": load_progress(model),
        "queued": len(model.queue),
        "queued_per_class": per_class_map(model),
        "line": [request_map(request, now) for request in islice(model.queue, MOST_LISTED)],
        "running": [request.id for request in running.values()],
        "rows": [request_map(request, now) for request in running.values()],
        "paused": [request.id for request in model.paused.values()],
        # Those whose rows have left for others return by themselves.
        "yielded": [
            one.id
            for one in again
            if one.pauses.is_paused and one.pauses.reason is not PauseReason.USER
        ],
        "paused_rows": [request_map(request, now) for request in model.paused.values()],
        "alone": on_turn.id if (on_turn := model.on_turn) else None,
        "row_limit": model.row_limit,
        "suspects": len(model.blame.suspects),
        "on_probation": model.blame.on_probation,
        "quarantined": model.blame.quarantined,
        "tokens_per_s": process.tokens_per_s(now),
        "steps": process.steps,
        "engine_s": model.meter.engine_s,
        "repeated_s": model.meter.repeated_s,
        "pinned": settings.pinned,
        "needed_bytes": model.bytes_to_load,
        "raised_bytes": need.raise_for(model.longest_stream) if need else 0,
        "reserved_bytes": life.reserved_bytes,
        "row_budget_bytes": model.batch.budget.size_bytes if model.batch.budget else None,
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
        **_traffic_map(beat),
        "decode_stall_target_ms": life.launch.decode_stall_target_ms,
        "backend": ready.backend if ready else None,
        "parallel": (ready.parallel or None) if ready else None,
        "context_length": ready.context_length if ready else need.context_tokens if need else None,
        "task": known.task.value if known else None,
        "capabilities": capabilities(known.task, takes_pictures=known.takes_pictures)
        if known
        else [],
        "dimensions": (ready.dimensions or None) if ready else None,
        "batching": batching_map(model),
        "drafts": _drafts_map(model),
        "warnings": warnings_of(model),
        "loaded_for_s": now - phase.since if isinstance(phase, Ready) else None,
        "unloads_in_s": model.unloads_in_s(now),
        "load_phases_s": load_phases(model, now),
        "ranks": ranks_of(model),
    }


def ranks_of(model: Model) -> list[dict[str, Any]]:
    """Return the hosts that serve the model together, each as a rank; empty without hosts."""
    hosts, beat, ready = model.life.launch.hosts, model.process.heartbeat, model.process.ready
    states: dict[int, RankState] = {}
    if beat is not None and hosts:
        leader = RankState(state="loading", active_bytes=beat.active_bytes)
        states = {one.rank: one for one in (leader, *beat.ranks)}
    unknown = RankState()

    def name(rank: int) -> str:
        """Return a state; the latest beat may be older than READY."""
        if ready is None:
            return states.get(rank, unknown).state
        return "ready" if rank in (0, *ready.ranks) else "left out"

    return [
        {
            "rank": rank,
            "host": host.ssh or None,
            "address": host.address,
            "state": name(rank),
            "silent_s": (state := states.get(rank, unknown)).silent_s,
            "active_bytes": state.active_bytes,
        }
        for rank, host in enumerate(hosts)
    ]


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
    launch = model.life.launch
    if launch.drafts == "off":
        return None
    return {
        "mode": "model" if launch.draft_folder else launch.drafts,
        "model": launch.draft_folder or None,
        "tokens": model.process.ready.draft_tokens if model.process.ready else None,
        "drafted": model.totals.drafted,
        "accepted": model.totals.draft_accepted,
    }


def change_map(model: Model, note: str, before: State | None = None) -> dict[str, Any]:
    """Return one change of a model, as watchers see it.

    Args:
        before: the state that it had; None: the same.
    """
    life = model.life
    before = before or life.state
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
    """Return the warnings that its worker gave at READY."""
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


def _download_progress(fetching: DownloadProgress) -> dict[str, Any]:
    if fetching.is_waiting:
        return {"phase": "waiting for another download of it", "fraction": 0.0}
    return {
        "phase": PendingReason.DOWNLOAD.value,
        "fraction": fetching.fraction,
        "done_bytes": fetching.done_bytes,
        "total_bytes": fetching.total_bytes,
    }


def memory_wait(model: Model, now: float) -> dict[str, Any] | None:
    """Return for how long the model has been waiting for memory, and what is in the way; None if it
    does not wait for memory."""
    lack = model.lack
    return {"waits_s": now - lack.since, "reason": lack.wait.reason} if lack else None


def waiting_news(model: Model) -> tuple[WaitReason, str, int]:
    """Return what all who wait for this model are notified of: the reason, and the load in
    tenths."""
    load = load_progress(model) or {"phase": "", "fraction": 0.0}
    return wait_reason(model), load["phase"], int(load["fraction"] * 10 + 1e-9)


# ---------------------------------------------------------------- requests

MOST_SUGGESTED = 8
"""An error lists at most this many requests."""


def find_named(ledger: Ledger, name: str) -> Request:
    """Return the open request with this id, of any client, or else with this number, `#12` or
    `12`; `last` is the one that came last, unless it is the id of another.

    Ids are unique for one connection only. If several open requests have the same one, only their
    numbers, which `status` and the error show, tell them apart.

    Raises:
        RemoteError: `invalid_request`, if none is called that, or several are.
    """
    found = [request for request in ledger if request.id == name]
    if not found:
        found = [request for request in ledger if number_of(request) in (name, f"#{name}")]
    if not found and name == LAST_REQUEST:
        found = sorted(ledger, key=lambda request: request.key)[-1:]
    if len(found) == 1:
        return found[0]
    if found:
        sentence = f"{len(found)} open requests have the id {name!r}; use the number of one"
        raise _wrong_name(sentence, found)
    raise _wrong_name(f"no open request has the id or number {name!r}", list(ledger))


def number_of(request: Request) -> str:
    """Return the supervisor's number for a request, as people write it: `#12`."""
    return f"#{request.key}"


def _wrong_name(sentence: str, candidates: list[Request]) -> RemoteError:
    shown = ", ".join(map(_shown, candidates[:MOST_SUGGESTED])) or "none"
    more = len(candidates) - MOST_SUGGESTED
    rest = f" and {more} more; see `mlxsup requests`" if more > 0 else ""
    return RemoteError(
        ErrorCode.INVALID_REQUEST,
        f"{sentence}; open: {shown}{rest}",
        detail={
            "parameter": "request",
            "known": [request.id for request in candidates[:MOST_SUGGESTED]],
            "numbers": [number_of(request) for request in candidates[:MOST_SUGGESTED]],
        },
    )


def _shown(request: Request) -> str:
    match request.stage:
        case Stage.QUEUED:
            doing = "waits for"
        case Stage.PAUSED:
            doing = "is paused on"
        case _:
            doing = "runs for"
    return f"{request.id} ({number_of(request)}, {doing} {request.model})"


MOST_LISTED = 32
"""The status lists at most this many waiting requests of a model, those that are next."""


def queue_map(models: Iterable[Model], ledger: Ledger) -> dict[str, Any]:
    """Count the waiting requests of all models; `per_client` and `waiting` leave out answers that
    have begun."""
    per_class: Counter[str] = Counter()
    for model in models:
        per_class.update(per_class_map(model))
    waiting, running = dict(ledger.waiting_by_account), ledger.running_by_account
    clients = {
        account: {
            "waiting": waiting.get(account, 0),
            "running": running.get(account, 0),
            "weight": ledger.terms.of(account).weight,
        }
        for account in sorted({*waiting, *running})
    }
    return {
        "waiting": ledger.waiting,
        "per_client": waiting,
        "per_class": dict(per_class),
        "clients": clients,
    }


def per_class_map(model: Model) -> dict[str, int]:
    """Return how many requests of a model wait in each class, as they stand in the line now."""
    return {priority.value: count for priority, count in model.queue.per_class.items()}


def paused_map(request: Request) -> dict[str, Any]:
    """Return the answer to a pause or a resume.

    Its `stage` is `pausing` until the row has left the batch, then `paused`; `queued` if it waits
    for a row, or will as soon as its own has left.
    """
    is_to_queue = request.stage is Stage.YIELDING
    return {
        "request": request.id,
        "number": number_of(request),
        "model": request.model,
        "stage": "queued" if is_to_queue else request.stage.name.lower(),
        "tokens_sent": request.tokens_sent,
    }


def cancelled_map(request: Request) -> dict[str, Any]:
    """Return the answer to a cancel."""
    return {
        "request": request.id,
        "number": number_of(request),
        "model": request.model,
        "tokens_sent": request.tokens_sent,
    }


def request_map(request: Request, now: float) -> dict[str, Any]:
    """Return one open request: how people name it, on whose behalf it is, and its class; `paused`
    is the reason why its row has left, until it has continued, `resumed` how many crashes it
    outlived, and `read_tokens` how many of its `prompt_tokens` have been read, which are None until
    a worker has accepted it."""
    waits_s = now - request.waiting.since if request.stage is Stage.QUEUED else 0.0
    return {
        "id": request.id,
        "number": number_of(request),
        "client": request.account,
        "priority": request.priority.value,
        "class": request.waiting.standing.value,
        "waited_s": request.waiting.waited_s + waits_s,
        "paused": request.pauses.reason.value if request.pauses.is_paused else None,
        "resumed": request.crashes.resumed,
        "prompt_tokens": request.prompt_tokens if request.acceptance else None,
        "read_tokens": request.cost.read_tokens,
        "tokens_sent": request.tokens_sent,
    }


# ---------------------------------------------------------------- what a request waits for


def wait_reason(model: Model) -> WaitReason:
    """Return the reason why the requests of this model wait."""
    phase = model.life.phase
    if model.life.why is Why.SWAP and not isinstance(phase, Loading):
        return WaitReason.SWAP
    if model.lack is not None:
        return WaitReason.MEMORY
    if model.serves_queue:
        if model.batch.held_back is not None:
            return WaitReason.MEMORY
        has_turns = model.has_room and model.blame.is_anyone_on_probation
        return WaitReason.TURN if has_turns else WaitReason.ROWS
    match model.life.state:
        case State.BACKOFF:
            is_crash = not (isinstance(phase, Backoff) and phase.download_cause)
            return WaitReason.BACKOFF if is_crash else WaitReason.DOWNLOAD
        case State.DRAINING | State.STOPPING:
            return WaitReason.RESTART
        case _:
            return WaitReason.LOAD


def expected_s(model: Model, request: Request, place: int, now: float) -> float | None:
    """Return the seconds until a waiting request should get a row; None if that is not known.

    Rows share the seconds of one engine, so one becomes free each time as many have passed as a
    request costs on average. For a request of the highest class a row may be freed earlier.

    Args:
        place: in the line, from 1.
    """
    if wait_reason(model) is not WaitReason.ROWS:
        return None
    if request.priority is URGENT:
        rows = (one for one in model.batch.running.values() if one.stage is Stage.YIELDING)
        if any(one.pauses.reason is PauseReason.CLASS for one in rows):
            return 0.0
        if model.batch.yields_at is not None:
            return max(model.batch.yields_at - now, 0.0)
    is_known = model.queue.counters.cost_s is not None
    return place * model.next_free_s() if is_known else None


def wait_of(
    model: Model, ledger: Ledger, request: Request, place: int, now: float
) -> tuple[WaitReason, float | None]:
    """Return what a waiting request waits for, and the seconds until it should get a row; None if
    they are not known.

    Args:
        place: in the line, from 1.
    """
    if model.serves_queue and not ledger.may_run(request.account):
        return WaitReason.LIMIT, None
    return wait_reason(model), expected_s(model, request, place, now)


# ---------------------------------------------------------------- all open requests

MOST_ASKED_FOR = 256
"""One answer lists at most this many requests, and counts the others."""

LEAST_READ = 0.02
"""Before this share of a prompt has been read, it is not known how long the rest will take."""


def requests_map(
    models: Iterable[Model], ledger: Ledger, client: str | None, now: float
) -> dict[str, Any]:
    """Return the answer: `requests`, model by model what runs, what is paused, and what waits in
    the order of the line; and `more`, how many were left out.

    Args:
        client: only those of this account, or of the process or terminal with this number; None
            for all.
    """
    listed: list[dict[str, Any]] = []
    more = 0
    for model in models:
        model.meter.settle()
        model.queue.age(now)
        for request, place in _in_order(model):
            if client is not None and not _is_of(request.account, client):
                continue
            if len(listed) < MOST_ASKED_FOR:
                listed.append(_map(model, ledger, request, place, now))
            else:
                more += 1
    return {"requests": listed, "more": more}


def _in_order(model: Model) -> Iterator[tuple[Request, int | None]]:
    """Return the requests of a model; those in its line with their place, from 1."""
    for request in (*model.batch.running.values(), *model.paused.values()):
        yield request, None
    for place, request in enumerate(model.queue, start=1):
        yield request, place


def _is_of(account: str, client: str) -> bool:
    """True if `client` means this account: `team`, `process 12@34`, or `12`."""
    number = account.partition("@")[0].rpartition(" ")[2]
    return client in (account, number)


def _map(
    model: Model, ledger: Ledger, request: Request, place: int | None, now: float
) -> dict[str, Any]:
    reason, prefill = None, _read_share(request)
    if place is None:
        wait_s = _reading_s(request, prefill, now)
    else:
        reason, wait_s = wait_of(model, ledger, request, place, now)
    return {
        **request_map(request, now),
        "model": request.model,
        "state": _state(request),
        "place": place,
        "reason": None if reason is None else reason.value,
        "prefill": prefill,
        "expected_s": wait_s,
        "tokens_per_s": _tokens_per_s(request, now),
        "engine_s": request.cost.engine_s,
        "age_s": now - request.waiting.arrived_at,
    }


def _tokens_per_s(request: Request, now: float) -> float | None:
    """Return how fast its answer has come since its first token, pauses and crashes included; None
    before its second token."""
    if request.cost.first_token_at is None or request.tokens_sent < 2:
        return None
    took_s = now - request.cost.first_token_at
    return (request.tokens_sent - 1) / took_s if took_s > 0 else None


def _state(request: Request) -> str:
    match request.stage:
        case Stage.QUEUED:
            return "waiting"
        case Stage.PAUSING | Stage.PAUSED:
            return request.stage.name.lower()
        case _:
            return "reading" if request.run.gains_since is None else "answering"


def _read_share(request: Request) -> float | None:
    """Return the share of its prompt that has been read, 0 to 1; None unless it is being read now,
    for the first time."""
    if _state(request) != "reading" or request.acceptance is None or request.sent.tokens:
        return None
    return min(request.cost.read_tokens / request.prompt_tokens, 1.0)


def _reading_s(request: Request, prefill: float | None, now: float) -> float | None:
    """Return the seconds until the first token if the rest of the prompt is read at the same pace;
    None if they are not known."""
    if prefill is None or prefill < LEAST_READ or request.run.dispatched_at is None:
        return None
    return (now - request.run.dispatched_at) * (1.0 - prefill) / prefill
