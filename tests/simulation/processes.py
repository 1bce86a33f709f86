"""Whether processes are started and signalled when they should be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.supervisor.core.actions import Spawn, WorkerSignal

from . import loads, memory
from .books import Cause, Wanted
from .violation import check

if TYPE_CHECKING:
    from .record import Record

EPSILON_S = 1e-6
DUMP_S = 0.5
STALLS = ("stall", "gil", "blocked", "mute", "waits_on", "load_stalls", "load_stops")
BREAKS = ("stop", "load_stops", "garbage", "link_drops", "row_lost")


def spawn(record: Record, spawn: Spawn) -> None:
    """A process is started."""
    book = record.books[spawn.model]
    check("two processes", book.life is None, spawn.model)
    check("spawned unwanted", book.wanted is Wanted.UP and not book.failed, spawn.model)
    check("spawned without its files", book.entry.download is None, spawn.model)
    check("old launch", spawn.launch == book.entry.launch, spawn.model)
    check("known batching", spawn.known_batching == book.batching, spawn.known_batching)
    memory.check_spawn(record, book)
    if book.retry is not None:
        earliest, _ = book.retry
        check("back-off too short", record.now >= earliest - EPSILON_S, f"{spawn.model}")
        check("earlier than announced", book.retry_at is None, f"{spawn.model}: {book.retry_at}")
        record.count("back-off")
    loads.check_turn(record, book)
    record.spares.check_spawn(record, spawn)


def signal(record: Record, model: ModelName, generation: Generation, signal: WorkerSignal) -> None:
    """A process is signalled: a false kill is found by the truth about it."""
    life = record.life_of(model, generation)
    check("signal to nobody", life is not None, f"{model} {generation}")
    assert life is not None
    fault = life.worker.fault.name if life.worker.fault else ""
    asked_at, term_at = life.was_told("exit"), life.was_told(WorkerSignal.TERM)
    dump_at, kill_at = life.was_told(WorkerSignal.DUMP), life.was_told(WorkerSignal.KILL)
    grace_s, now = record.plan.settings.exit_grace_s, record.now + EPSILON_S
    is_hurried = life.hurried_at == record.now
    life.told.append((signal, record.now))
    detail = f"{signal} to {model}: {life.cause}, {fault or 'no fault'}"
    match signal:
        case WorkerSignal.DUMP:
            check("false alarm", life.cause is None and fault in STALLS, detail)
            record.stops(life, Cause.STALL)
            record.count("stall found")
        case WorkerSignal.TERM if asked_at is not None:
            check("SIGTERM early", now >= asked_at + grace_s or is_hurried, detail)
        case WorkerSignal.TERM:
            check(
                "SIGTERM unasked",
                life.cause in (Cause.ASKED, Cause.VERSION, Cause.TOO_LARGE),
                detail,
            )
        case WorkerSignal.KILL if kill_at is not None:
            check("SIGKILL again", is_hurried or life.told[0][0] == signal, detail)
        case WorkerSignal.KILL if dump_at is not None:
            check("SIGKILL early", now >= dump_at + DUMP_S or is_hurried, detail)
        case WorkerSignal.KILL if term_at is not None:
            began_at = term_at  # for a process that had no pid yet, when SIGTERM was due
            if life.told[0][0] == WorkerSignal.TERM and life.stopped_serving_at is not None:
                began_at = life.stopped_serving_at
            check("SIGKILL early", now >= began_at + grace_s or is_hurried, detail)
        case WorkerSignal.KILL if asked_at is not None:
            check("SIGKILL before SIGTERM", is_hurried, detail)
        case WorkerSignal.KILL if life.cause is None:
            check("false kill", fault in BREAKS or not life.worker.is_alive, detail)
            is_stall = fault in ("load_stops", "load_stalls") and not life.has_greeted
            silent_s = record.now - life.progress_at
            is_limit = silent_s >= record.books[model].entry.load_stall_timeout_s - EPSILON_S
            record.stops(life, Cause.STALL if is_stall and is_limit else Cause.BROKEN)
            record.count("broken found")
