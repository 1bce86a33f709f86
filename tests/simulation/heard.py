"""What was heard of processes: what they said, and what the shell saw of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxsup.protocol.rendering import Rendered
from mlxsup.protocol.version import VERSION
from mlxsup.protocol.worker_messages import (
    Accepted,
    Dying,
    Heartbeat,
    Hello,
    LoadProgress,
    Ready,
    Rejected,
    Step,
)
from mlxsup.supervisor.core.events import Sampled, Spawned, WorkerBroke, WorkerUnlinked

from . import costs, estimates, leases, memory, pieces, pressure, room
from .books import Book, Cause, Life, UpFor

if TYPE_CHECKING:
    from .record import Record


def process(record: Record, event: Spawned | WorkerBroke | WorkerUnlinked) -> None:
    """The shell has seen something of a process or of its connection."""
    life = record.life_of(event.model, event.generation)
    if life is None:
        return
    match event:
        case Spawned(pid=pid):
            life.pid = pid
        case WorkerUnlinked():
            life.unlinked_at = record.now
        case WorkerBroke(is_other_version=is_other_version):
            life.broke_at = record.now
            record.stops(life, Cause.VERSION if is_other_version else Cause.BROKEN)


def sampled(record: Record, event: Sampled) -> None:
    """The memory of all processes was measured."""
    record.machine_bytes = event.machine_bytes
    for book in record.books.values():
        if book.life is not None and book.life.pid is not None:
            book.life.footprint = event.footprint_bytes.get(book.life.pid, 0)
        if book.life is not None:
            room.measured(record, book.life)
            memory.measured(record, book, book.life)
    pressure.sampled(record, event)


def said(record: Record, book: Book, life: Life, message: object) -> None:
    """A process has said something."""
    match message:
        case Step():
            leases.stepped(record, life, message)
            costs.step(record, book, life, message)
            for row in message.rows:
                pieces.arrived(record, book, life, row)
                if row.tokens and life.spoke_at is None:
                    life.spoke_at = record.now
            room.note_left(record, life)
            costs.rests(life)
            book.busy_at = record.now
        case Accepted(key=key, acceptance=acceptance):
            ask = life.given.get(key)
            if ask is not None and ask.is_open and ask.acceptance is None:
                ask.acceptance = acceptance
            if life.given and life.works_since is None and not life.turn.only_waits:
                life.works_since = record.now
        case Rejected(key=key, error=error):
            ask = life.given.pop(key, None)
            life.rows_ended += 1
            if ask is not None and ask.is_open:
                record.must[ask] = {error["code"]}
            elif ask is not None:
                record.count("cancel met rejection")
            costs.rests(life)
            book.busy_at = record.now
        case Hello(version=version):
            life.has_greeted = True
            _progresses(record, life, ("import", 0.0))
            if version != VERSION:
                record.stops(life, Cause.VERSION)
        case LoadProgress(phase=phase, progress=progress):
            _progresses(record, life, (str(phase), progress))
        case Ready() if life.cause is None and estimates.is_too_large(record, book, message):
            record.stops(life, Cause.TOO_LARGE)
            record.count("memory below the need")
        case Ready() if life.cause is None:
            life.ready_at, book.is_restarting = record.now, False
            book.busy_at = record.now
            record.log_levels.is_ready(life)
            if book.up_for is UpFor.NEXT_TURN:
                book.up_for = UpFor.SOMEBODY
            if life.launch.max_concurrency > 1:
                book.batching = {
                    "fingerprint": message.fingerprint,
                    "batching": message.batching.value,
                    "reason": message.batching_reason,
                }
        case Rendered():
            record.joining.rendered(record, life, message)
        case Dying(message=words):
            life.announced = words
        case Heartbeat():
            life.reported = message.active_bytes + message.cache_bytes
            room.beat(record, book, life, message.budget)


def _progresses(record: Record, life: Life, progress: tuple[str, float]) -> None:
    if progress != life.progress:
        life.progress, life.progress_at = progress, record.now
