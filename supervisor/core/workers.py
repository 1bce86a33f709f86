"""The processes of models: what they say, which signs of life they give, and how they end.

It decides what that means: a trigger for the life of a model, or something about its requests.

An exit, its last lines and the state of the model show the cause of a death: a class to count and
to act on, and what the death says about the requests that the worker held. The same error in two
loads in a row is permanent, because most of what a load raises follows from the files; lack of
memory, faults of the GPU and signals depend on the neighbours and are tried again.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, assert_never

from mlxsup.protocol.flight import (
    CONTINUES,
    GIVEN_UP,
    PAUSED,
    LostRow,
    RequestEnded,
    WorkerDied,
)
from mlxsup.protocol.launch import PERMANENT_EXITS, ExitCode
from mlxsup.protocol.states import HAS_PROCESS, SERVES, DeathCause, ExitReason, State
from mlxsup.protocol.text import last_words
from mlxsup.protocol.version import VERSION
from mlxsup.protocol.worker_messages import (
    Accepted,
    Dying,
    Heartbeat,
    Hello,
    LoadProgress,
    Ready,
    Rejected,
    Rendered,
    Step,
    WorkerMessage,
)

from .actions import LookAtWorker, SignsOf
from .events import (
    Exited,
    FilesSeen,
    Sampled,
    Spawned,
    SpawnFailed,
    WorkerBroke,
    WorkerEvent,
    WorkerSaid,
    WorkerSeen,
    WorkerUnlinked,
)
from .fleet import Fleet
from .life import Abandoned, Backoff, Files, Life, Loading, StopCause, Stopping, StopStage
from .model import WATCHED, Model
from .poison import Evidence
from .transitions import Died, Due, Ending
from .watchdog import Alarm, Watch


def take(fleet: Fleet, event: WorkerEvent) -> None:
    """Handle one event; ignore those of earlier generations (F9)."""
    model = fleet.by_name.get(event.model)
    if model is None or event.generation != model.life.generation:
        return
    phase = model.life.phase
    is_late_exit = isinstance(phase, Abandoned) and isinstance(event, Exited)
    if phase.STATE not in HAS_PROCESS and not is_late_exit:
        return
    watch, now = model.process.watch, event.now
    match event:
        case WorkerSaid(message=message):
            if watch is not None and not isinstance(message, Heartbeat):
                watch.said(now)
            _said(fleet, model, message, now)
        case Spawned():
            model.process.watch = Watch.over(now)
            fleet.trigger(model, event, now)
            look_after(fleet, model, now)
        case SpawnFailed(detail=detail):
            text = f"could not be started: {detail}"
            _handle_exit(fleet, model, Ending(text=text, said=text, is_spawn_error=True), now)
        case WorkerSeen(is_stopped=is_stopped):
            if watch is not None:
                watch.looked(is_stopped=is_stopped, now=now)
                look_after(fleet, model, now)
        case FilesSeen(change=change):
            _files_seen(fleet, model, change, now)
        case WorkerBroke(is_other_version=True):
            _is_of_other_version(fleet, model, "another one", now)
        case WorkerBroke(detail=detail):
            fleet.fault(model, StopCause.BROKEN, detail, now)
        case WorkerUnlinked():
            if watch is not None:
                watch.unlinked(now)
                fleet.touch(model)
                look_after(fleet, model, now)
        case Exited():
            is_over_memory = model.is_over_memory(fleet.machine_bytes)
            seen = _seen_exit(event, model.process.dying, is_over_memory=is_over_memory)
            _handle_exit(fleet, model, seen, now)
        case _:
            assert_never(event)


# ---------------------------------------------------------------- what it says


def _said(fleet: Fleet, model: Model, message: WorkerMessage, now: float) -> None:
    match message:
        case Step():
            _step(fleet, model, message, now)
        case Heartbeat():
            model.process.heartbeat = message
            if model.keeps_to(message.budget):
                fleet.memory_changed()
                fleet.touch(model)
            if model.process.watch is not None:
                model.process.watch.beat(message, model.batch.rows, now)
                look_after(fleet, model, now)
        case Accepted():
            fleet.serving.accepted(model, message, now)
        case Rejected(key=key, error=error):
            fleet.serving.rejected(model, key, error, now)
            fleet.touch(model)
        case Rendered():
            fleet.attaching.rendered(model, message)
        case Hello(version=version) if version != VERSION:
            _is_of_other_version(fleet, model, version, now)
        case Hello() if model.life.state in SERVES:
            fleet.fault(model, StopCause.BROKEN, "said HELLO after READY", now)
        case Hello():
            fleet.trigger(model, message, now)
        case LoadProgress() if model.life.state in SERVES:
            fleet.fault(model, StopCause.BROKEN, "reported a load after READY", now)
        case LoadProgress():
            fleet.trigger(model, message, now)
        case Ready() if model.life.state in SERVES:
            fleet.fault(model, StopCause.BROKEN, "said READY twice", now)
        case Ready():
            _ready(fleet, model, message, now)
        case Dying():
            model.process.dying = message.message
        case _:
            assert_never(message)


def _step(fleet: Fleet, model: Model, message: Step, now: float) -> None:
    if message.step not in (model.process.steps, model.process.steps + 1):
        detail = f"counted step {message.step} after step {model.process.steps}"
        fleet.fault(model, StopCause.BROKEN, detail, now)
        return
    fault = fleet.prefill_slots.stepped(model, message)
    if fault:
        fleet.fault(model, StopCause.BROKEN, fault, now)
        return
    if model.process.watch is not None:
        model.process.watch.stepped(message.step, now)
    if fleet.attaching.readers:
        fleet.attaching.heard(message.rows)
    if fleet.serving.step(model, message, now) or model.name in fleet.prefill_slots.changed:
        fleet.touch(model)


def _ready(fleet: Fleet, model: Model, message: Ready, now: float) -> None:
    need = model.life.need
    too_large = need.loaded_problem(message) if need is not None else ""
    if too_large:
        fleet.fault(model, StopCause.TOO_LARGE, too_large, now)
        return
    if isinstance(model.life.phase, Loading):
        model.learn(message, fleet.ledger.devices[message.backend], now)
    fleet.trigger(model, message, now)
    fleet.tell_log_level(model)


def _is_of_other_version(fleet: Fleet, model: Model, version: str, now: float) -> None:
    detail = f"mlxsup was upgraded to {version}; restart the daemon"
    fleet.fault(model, StopCause.VERSION, detail, now)


# ---------------------------------------------------------------- signs of life


def due(fleet: Fleet, model: Model, now: float) -> None:
    """Act on a deadline of this model, if it has come."""
    fleet.touch(model)
    when = model.state_deadline()
    if when is None or now < when:
        return
    phase = model.life.phase
    is_killed = isinstance(phase, Stopping) and phase.stage is StopStage.KILL
    if is_killed and model.life.pid is not None:  # SIGKILL has not ended it within the limit
        text = f"process {model.life.pid} cannot be ended"
        _handle_exit(fleet, model, Ending(text=text, said=text, is_given_up=True), now)
    else:
        fleet.trigger(model, Due(), now)


def look_after(fleet: Fleet, model: Model, now: float) -> None:
    """Act on what the process's signs of life mean, and look again when they are due."""
    life, watch = model.life, model.process.watch
    if watch is None or life.state not in WATCHED:
        return
    step_timeout_s = model.step_timeout_s
    match watch.judge(now, step_timeout_s, model.batch.rows):
        case Alarm.LOOK:
            fleet.outbox.add(LookAtWorker(model=model.name, generation=life.generation))
        case Alarm.STUCK:
            fleet.fault(model, StopCause.STALL, watch.describe(now), now)
        case Alarm.STOPPED:
            detail = "another program stopped its process (SIGSTOP)"
            fleet.fault(model, StopCause.SUSPENDED, detail, now)
        case Alarm.BROKEN:
            fleet.fault(model, StopCause.BROKEN, watch.describe(now), now)
        case Alarm.NONE:
            pass
    fleet.outbox.deadlines.set(SignsOf(model.name), watch.deadline(step_timeout_s))


def measured(fleet: Fleet, event: Sampled) -> None:
    """Note what the processes were measured at, and act on what that says."""
    fleet.machine_bytes = event.machine_bytes
    for model in fleet:
        pid = model.life.pid
        model.life.footprint_bytes = event.footprint_bytes.get(pid, 0) if pid else 0
        if model.process.watch is not None:
            model.process.watch.measured(model.life.footprint_bytes)
            if model.process.watch.grows_silently(event.now):
                look_after(fleet, model, event.now)
        model.process.rates.append((event.now, model.totals.tokens))
        if model.may_have_been_restored(event.now):
            fleet.look_at_files(model)
        model.was_measured(event.now)
    fleet.memory_changed()
    fleet.squeeze(event.reading, event.now)
    if fleet.warm_pool.measured(event.footprint_bytes, fleet.settings):
        fleet.look_at_all()


def _files_seen(fleet: Fleet, model: Model, change: str, now: float) -> None:
    """Note what has changed in the files of a model since it has loaded them: empty if nothing
    has. If it is going away, that is of no interest."""
    before, model.life.files = model.life.files.change, Files(seen_at=now, change=change)
    fleet.touch(model)
    fleet.memory_changed()
    if model.life.state is not State.READY or bool(change) == bool(before):
        return
    note = "can be swapped out again, because its files are unchanged since the load"
    if change:
        note = f"cannot be swapped out while it has open answers: {change}"
    fleet.announce(model, note)


# ---------------------------------------------------------------- the cause of its end

_BY_EXIT = {
    ExitCode.BAD_LAUNCH: DeathCause.UNKNOWN,  # its sentence says all; lines before it mislead
    ExitCode.OUT_OF_MEMORY: DeathCause.OUT_OF_MEMORY,
    ExitCode.GPU_FAULT_ELSEWHERE: DeathCause.GPU_FAULT_ELSEWHERE,
    ExitCode.NO_DEVICE: DeathCause.NO_DEVICE,
    ExitCode.MODEL_MISSING: DeathCause.MODEL_MISSING,
    ExitCode.BAD_MODEL: DeathCause.BAD_MODEL,
    ExitCode.RANK_LOST: DeathCause.RANK_LOST,
}

_BY_LINE: tuple[tuple[DeathCause, re.Pattern[str]], ...] = tuple(
    (cause, re.compile(pattern, re.IGNORECASE))
    for cause, pattern in (
        (DeathCause.STREAM_ERROR, r"there is no stream\("),
        (DeathCause.GPU_TIMEOUT, r"gpu (timeout|time-out|hang)|CallbackErrorTimeout|LaunchTimeout"),
        (DeathCause.GPU_FAULT_ELSEWHERE, r"innocent ?victim"),
        (
            DeathCause.OUT_OF_MEMORY,
            r"out ?of ?memory|insufficient memory|memoryerror|bad_alloc|cannot allocate memory"
            r"|unable to allocate|attempting to allocate|MemoryAllocation",
        ),
        (DeathCause.MODEL_MISSING, r"FileNotFoundError|no such file or directory"),
        (DeathCause.RANK_LOST, r'ranks\.py", line \d+ in join\b'),  # its time was up there
    )
)
"""Patterns of the causes: Metal, CUDA, the C++ library and Python each use their own words."""


def classify(
    exit_code: int | None, lines: Sequence[str], *, is_over_memory: bool = False
) -> DeathCause:
    """Return the cause of a death.

    Args:
        exit_code: None if a signal ended it.
        is_over_memory: whether it was killed while it held more memory than its limit.
    """
    for code, cause in _BY_EXIT.items():
        if exit_code == code:
            return cause
    for line in reversed(lines):
        for cause, pattern in _BY_LINE:
            if pattern.search(line):
                return cause
    return DeathCause.OUT_OF_MEMORY if is_over_memory else DeathCause.UNKNOWN


CLASSIFIED_LINES = 50
"""The last lines of its output that may name the class of a death's cause."""


def _seen_exit(event: Exited, dying: str, *, is_over_memory: bool) -> Ending:
    """Return the exit of a process as the shell has seen it.

    Args:
        dying: what it said about its end over the link; empty if it said nothing.
        is_over_memory: whether it last held more memory than its limit.
    """
    is_over_memory = is_over_memory and event.signal_name == "SIGKILL"
    lines = [*event.last_lines[-CLASSIFIED_LINES:], dying]
    cause = classify(event.exit_code, lines, is_over_memory=is_over_memory)
    text = event.signal_name or f"exit code {event.exit_code}"
    if cause is not DeathCause.UNKNOWN:
        text += f", {cause}"
    words = last_words(event.last_lines)
    said = dying or words
    return Ending(
        text=f"{text}: {said}" if said else text,
        said=said,
        announced=dying,
        last_words=words,
        exit_code=event.exit_code,
        signal_name=event.signal_name,
        cause=cause,
        is_over_memory=is_over_memory,
        at=event.at,
    )


# ---------------------------------------------------------------- what its end means

ACCUSING_SIGNALS = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP"})
"""Signals that a process causes itself; SIGKILL, SIGTERM and SIGSTOP come from outside."""

ACCUSING_EXITS = frozenset({ExitCode.STEP_ERROR, ExitCode.STUCK_PROMPT, ExitCode.LINK_BROKEN})
"""Exits that a request may have brought about."""

CAUSED_ELSEWHERE = frozenset(
    {DeathCause.OUT_OF_MEMORY, DeathCause.GPU_FAULT_ELSEWHERE, DeathCause.GPU_TIMEOUT}
)
"""Causes that other processes contribute to: the next attempt may well succeed."""

OF_STOPPED = {
    StopCause.ASKED: (ExitReason.ASKED, Evidence.ASKED),
    StopCause.SWAP: (ExitReason.ASKED, Evidence.ASKED),
    StopCause.VERSION: (ExitReason.VERSION, Evidence.ASKED),
    StopCause.TOO_LARGE: (ExitReason.LOAD_ERROR, Evidence.ASKED),
    StopCause.INTERNAL: (ExitReason.INTERNAL, Evidence.ASKED),
    StopCause.STALL: (ExitReason.STALL, Evidence.ACCUSES),
    StopCause.SUSPENDED: (ExitReason.STALL, Evidence.NONE),
    StopCause.BROKEN: (ExitReason.CRASH, Evidence.NONE),
}
"""The verdict on a process that was being ended, and on its requests; a stalled load says nothing
about them."""

TERMINATED_EXIT = 128 + signal.SIGTERM

NUMBER = re.compile(r"0x[0-9a-f]+|\b(?=[a-f]*[0-9])[0-9a-f]{6,}\b|[0-9]+", re.IGNORECASE)
"""Addresses, sizes and times, which differ between two reports of the same error."""


def judge(life: Life, seen: Ending) -> Died:
    """Return what the end of a process means, before it is applied to its life; the requests that
    it held are judged by `Blame`."""
    if isinstance(life.phase, Abandoned):
        return Died(seen=seen, reason=ExitReason.ASKED, evidence=Evidence.ASKED)
    stopping = _ending_of(life, seen)
    if stopping is not None:
        reason, evidence = OF_STOPPED[stopping.cause]
        if stopping.cause is StopCause.TOO_LARGE and stopping.is_restart:
            reason = ExitReason.ASKED  # another entry may have come since then
        if life.ready_at is None and evidence is Evidence.ACCUSES:
            evidence = Evidence.NONE
        return Died(seen=seen, reason=reason, stopping=stopping, evidence=evidence)
    if seen.is_spawn_error:
        return Died(seen=seen, reason=ExitReason.SPAWN_ERROR)
    if life.ready_at is None:
        is_permanent = seen.exit_code in PERMANENT_EXITS
        reason = ExitReason.LOAD_ERROR if is_permanent else ExitReason.CRASH
        return Died(seen=seen, reason=reason, load_error=_load_error(seen))
    evidence = Evidence.NONE
    if seen.exit_code == ExitCode.OUT_OF_MEMORY or seen.is_over_memory:
        evidence = Evidence.OUT_OF_MEMORY
    elif seen.exit_code in ACCUSING_EXITS or seen.signal_name in ACCUSING_SIGNALS:
        evidence = Evidence.ACCUSES
    return Died(seen=seen, reason=ExitReason.CRASH, evidence=evidence)


def _ending_of(life: Life, seen: Ending) -> Stopping | None:
    """Return how the process was being ended; None if it ended by itself.

    A broken or suspended process is killed at once. If that signal did not end it, it had been
    about to die: its connection ends before its exit can be seen, and the kernel may take long to
    free its memory. So its own exit says what happened, unless its end was asked for, too.
    """
    phase = life.phase
    if not isinstance(phase, Stopping):
        return None
    is_killed_at_once = phase.cause in (StopCause.BROKEN, StopCause.SUSPENDED)
    is_by_itself = is_killed_at_once and seen.signal_name != "SIGKILL"
    return None if is_by_itself and not phase.is_restart else phase


def _load_error(seen: Ending) -> str | None:
    """Return what a load that crashed by itself has in common with another that failed the same
    way; None: it did not say why, or others contribute to the cause."""
    if not seen.announced or seen.cause in CAUSED_ELSEWHERE or seen.exit_code == TERMINATED_EXIT:
        return None
    return f"{seen.exit_code}: {NUMBER.sub('#', seen.announced)}"


# ---------------------------------------------------------------- what follows from its end


def _handle_exit(fleet: Fleet, model: Model, seen: Ending, now: float) -> None:
    """Judge what the end of a process says about its requests, and apply it; the story, the
    journal and the watchers get what was decided and why (F10)."""
    model.life.stream_tokens = model.longest_stream
    if seen.exit_code == ExitCode.OUT_OF_MEMORY:
        fleet.raise_need(model, now)
    died = judge(model.life, seen)
    moments = _last_moments(model, died, fleet.machine_bytes, now)
    running = list(model.batch.running.values())
    verdict = model.blame.judge(died.evidence, model.batch.held, now)
    if verdict.story:
        model.life.story.append(f"{now:.3f} {seen.text}: {verdict.story}")
    died = replace(died, verdict=verdict)
    fleet.trigger(model, died, now)
    outcomes = {one.number: one.outcome for one in fleet.outbox if isinstance(one, RequestEnded)}
    rows = [
        LostRow(
            id=request.id,
            number=request.key,
            tokens=request.tokens_sent,
            fate=outcomes.get(request.key, PAUSED if request.key in model.paused else CONTINUES),
            is_suspect=model.blame.is_suspect(request.digest),
        )
        for request in running
    ]
    entry = _worker_died(model, died, moments, rows, now)
    if entry is not None:
        fleet.outbox.record(entry)
    # One that must run through, or was cancelled, is open no longer.
    if verdict.is_tried_again and any(fleet.ledger.get(one.key) for one in running):
        fleet.ran_out = model.name
    if verdict.story and model.name in fleet.by_name:
        fleet.announce(model, verdict.story)


MOST_ROWS = 32
"""The entry of a death names at most this many requests, and counts the others."""


def _last_moments(model: Model, died: Died, machine_bytes: int, now: float) -> dict[str, Any]:
    """Return the fields of `WorkerDied` that are forgotten once the end of a process is handled."""
    life, beat = model.life, model.process.heartbeat
    if isinstance(life.phase, Loading):
        doing = f"{life.phase.load_phase} {life.phase.progress:.0%}"
    else:
        doing = model.process.doing.phase.value if model.process.doing else ""
    return {
        "model": life.name,
        "generation": life.generation,
        "pid": life.pid,
        "ended_by": died.stopping.cause.value if died.stopping else "",
        "doing": doing,
        "steps": model.process.steps,
        "footprint_bytes": life.footprint_bytes,
        "active_bytes": beat.active_bytes if beat else 0,
        "cache_bytes": beat.cache_bytes if beat else 0,
        "limit_bytes": life.launch.memory_limit_bytes or 0,
        "machine_bytes": machine_bytes,
        "ready_s": life.ready_for_s(now),
    }


def _worker_died(
    model: Model,
    died: Died,
    moments: dict[str, Any],
    rows: list[LostRow],
    now: float,
) -> WorkerDied | None:
    """Return how a process ended, and what became of what it ran, once that has been decided.

    Args:
        moments: `_last_moments` of it.
        rows: what it ran.

    Returns:
        None if its end was asked for and hit no request.
    """
    life, seen = model.life, died.seen
    phase, restarts = life.phase, life.settings.restart
    last = None if seen.is_given_up else life.last_exit
    reason = GIVEN_UP if last is None else last.reason.value
    if reason == ExitReason.ASKED and not rows:
        return None
    return WorkerDied(
        **moments,
        reason=reason,
        code=seen.exit_code,
        signal=seen.signal_name,
        cause=seen.cause.value,
        detail=seen.text if last is None else last.detail,
        evidence=died.verdict.evidence.value,
        verdict=died.verdict.story,
        rows=rows[:MOST_ROWS],
        more_rows=max(0, len(rows) - MOST_ROWS),
        after=life.state.value,
        retry_in_s=max(0.0, phase.due_at - now) if isinstance(phase, Backoff) else None,
        failure=life.failure,
        crashes=life.restarts.crashes,
        most_crashes=restarts.max_restarts,
        window_s=restarts.window_s,
    )
