"""What follows the end of a process: who ends, who waits again, whether the model may return."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from mlxsup.protocol.download import Repository
from mlxsup.supervisor.core.events import Exited, SpawnFailed

from . import costs, estimates, pauses, room, shares, wishes
from .asks import Ask, Place
from .books import PERMANENT, Book, Cause, Life, Wanted
from .suspicion import Finding, Says

if TYPE_CHECKING:
    from .record import Record

MOST_DEATHS = 3
"""In a row, without a token and without evidence."""

MOST_SHORTAGES = 2
"""Of memory, while a process holds nobody else."""

MODEL_MISSING = 66
CAUSED_ELSEWHERE = (72, 75)
TERMINATED = 143
KILL_LIMIT_S = 10.0
KILL_LIMIT_S_PER_BYTE = 0.5e-9


def seen(record: Record, event: Exited | SpawnFailed) -> None:
    """The end of a process is seen, or it could not be started."""
    book = record.books.get(event.model)
    life = book.life if book else None
    if book is None or life is None or life.generation != event.generation:
        return
    if isinstance(event, Exited):
        estimates.died(record, book, life, event)
    if life.is_abandoned:
        book.life, book.failed = None, ""
        book.is_after_crash = False
        if book.wanted is Wanted.GONE:
            del record.books[book.name]
        return
    if isinstance(event, SpawnFailed):
        _ends(record, book, life, None, Finding(says=Says.NOTHING))
        return
    says = life.says(event, record.machine_bytes)
    record.count(f"death: {says}")
    if any(ask.is_open for ask in life.given.values()):
        record.count("death under requests")
    finding = book.suspicion.died(says, life.held(), record.now)
    if finding.culprit is not None:
        record.count("quarantine")
    if any(not ask.is_open for ask in life.given.values()):
        record.count("cancel met exit")
    _ends(record, book, life, event, finding)


def given_up(record: Record, book: Book) -> None:
    """SIGKILL has not ended a process within its limit: nobody waits for it any longer (P26)."""
    life = book.life
    assert life is not None
    says = Says.ASKED
    if life.cause is Cause.STALL:
        says = Says.ACCUSES if life.ready_at is not None else Says.NOTHING
    elif life.cause is Cause.BROKEN and not life.is_restart:
        says = Says.NOTHING
    finding = book.suspicion.died(says, life.held(), record.now)
    _requests_end(record, book, life, finding)
    code = "load_failed" if book.wanted is Wanted.UP else wishes.cut_off(record, book)
    for ask in book.waiting:
        record.must.setdefault(ask, set()).add(_worded(ask, code))
    life.is_abandoned = True
    life.given.clear()
    costs.rests(life)
    book.failed, book.drain_until = "it cannot be ended", None
    book.retry = book.retry_at = None
    record.count("given up")


def _ends(record: Record, book: Book, life: Life, exited: Exited | None, finding: Finding) -> None:
    ready_s = None
    if life.ready_at is not None:
        ready_s = (life.stopped_serving_at or record.now) - life.ready_at
    is_alike = _fails_alike(book, life, exited)
    is_swap = life.cause is Cause.SWAP
    if ready_s is not None and not is_swap and ready_s >= book.entry.restart.stable_s:
        book.in_a_row = 0
    was_draining = book.drain_until is not None
    code = exited.exit_code if exited is not None else None
    is_first_miss = code == MODEL_MISSING != book.last_code
    book.last_code = code
    _requests_end(record, book, life, finding)
    room.forget(book)
    book.held = min(book.held, estimates.need_of(record, book))
    book.life, book.drain_until = None, None
    book.retry, book.retry_at, book.is_after_crash = None, None, False
    if book.wanted is not Wanted.UP:
        for ask in book.waiting:
            record.must.setdefault(ask, set()).add(wishes.cut_off(record, book))
        if book.wanted is Wanted.GONE:
            del record.books[book.name]
        return
    cause = life.ended_by(exited)
    is_permanent = (
        cause is None
        and exited is not None
        and life.ready_at is None
        and exited.exit_code in PERMANENT
    )
    is_restart = life.is_restart if cause is not None else was_draining and life.cause is None
    is_lost = is_permanent and is_first_miss and bool(book.entry.repo)
    if cause is Cause.VERSION:
        fails(record, book, "version")
    elif cause is Cause.TOO_LARGE and not is_restart:
        fails(record, book, "too large")
    elif not is_lost and (is_permanent or (is_alike and cause is None)):
        fails(record, book, "load")
    elif finding.is_broken:
        fails(record, book, "engine")
    elif is_lost:
        lost = Repository(book.entry.repo, book.entry.revision)
        book.entry = replace(book.entry, download=lost)
        record.count("fetched again")
    elif is_restart:
        book.clean()
    elif cause in (Cause.ASKED, Cause.SWAP):
        pass
    elif finding.culprit is not None:
        book.is_after_crash = True
    else:
        _crashes(record, book)


def _crashes(record: Record, book: Book) -> None:
    delays = book.crashed(record.now)
    record.count("crash")
    if delays is None:
        fails(record, book, "too often")
        return
    book.is_after_crash = True
    if delays[1] > 0.0:
        book.retry = record.now + delays[0], record.now + delays[1]
        book.retry_at = book.retry[1]  # at the latest; what has been drawn is announced


def fails(record: Record, book: Book, why: str) -> None:
    """A model is FAILED: whatever waits for it ends."""
    book.failed = why
    record.count(f"FAILED: {why}")
    for ask in book.waiting:
        record.must.setdefault(ask, set()).add(_worded(ask, "load_failed"))


def _worded(ask: Ask, code: str) -> str:
    """An answer that had begun was not waiting for a load: its worker has crashed."""
    is_begun = ask.has_begun and code == "load_failed"
    return "worker_crashed" if is_begun else code


def _requests_end(record: Record, book: Book, life: Life, finding: Finding) -> None:
    record.flight.loses([ask for ask in life.given.values() if ask.is_open])
    for ask in life.given.values():
        if not ask.is_open:
            continue
        code = _loss(book, ask, finding)
        if code:
            record.must[ask] = {code}
            continue
        if finding.is_alone:
            record.tried_again = ask
            record.count("tried again for memory")
        if ask.acceptance is not None:
            ask.is_interrupted, ask.queue_until = True, None
            record.count("interrupted")
        ask.is_again, ask.is_yielding = True, False
        if ask.is_pausing:
            pauses.puts_aside(record, book, ask)
            continue
        ask.place, ask.placed_at = Place.LINE, record.now
        shares.waits(record, ask)
        book.queue.append(ask)
    for ask in book.waiting:
        if ask.has_begun and not ask.may_resume:
            record.must[ask] = {"worker_crashed"}
        elif finding.culprit is not None and ask.prompt.number == finding.culprit:
            record.must[ask] = {"quarantined"}


def _loss(book: Book, ask: Ask, finding: Finding) -> str:
    """Why a request does not outlive its process; empty if it does."""
    if finding.culprit == ask.prompt.number:
        return "quarantined"
    ask.shortages += finding.is_alone
    if finding.is_alone and ask.shortages == MOST_SHORTAGES:
        return "insufficient_memory"
    if ask.acceptance is not None and not ask.may_resume:
        return "worker_crashed"
    if finding.says is Says.NOTHING:
        ask.deaths += 1
        if ask.deaths >= MOST_DEATHS:
            return "worker_crashed"
    return ""


def _fails_alike(book: Book, life: Life, exited: Exited | None) -> bool:
    """Whether it failed to load with the error of the attempt right before."""
    error = ""
    code = exited.exit_code if exited else None
    is_own = life.ready_at is None and life.ended_by(exited) is None
    if is_own and life.announced and code not in (*CAUSED_ELSEWHERE, TERMINATED):
        error = f"{code} {re.sub(r'0x[0-9a-f]+|[0-9]+', '#', life.announced)}"
    before, book.last_load_error = book.last_load_error, error
    return error != "" and error == before
