"""What pauses mean: who may be paused, and where a request goes whose row has left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxsup.protocol.request_messages import PauseRequest, ResumeRequest

from . import shares
from .asks import Ask, Place
from .books import Book, Life, Wanted
from .violation import check

if TYPE_CHECKING:
    from .record import Record


def commanded(record: Record, connection: bytes, message: PauseRequest | ResumeRequest) -> None:
    """Somebody pauses or resumes a request; `record.may`: whether that must succeed."""
    ask = shares.named(record, message.request)
    book = record.books.get(ask.model) if ask is not None else None
    is_pause = isinstance(message, PauseRequest)
    is_good = False
    if ask is not None and book is not None:
        is_good = _may_pause(book, ask) if is_pause else ask.is_pausing or ask in book.paused
        if is_good and is_pause:
            _pause(record, book, ask)
        elif is_good:
            _resume(record, book, ask)
    record.may[connection, message.id] = is_good
    record.count(f"{message.TYPE}{'' if is_good else ' refused'}")
    if message.request.startswith("#"):
        record.count("named by number")


def _may_pause(book: Book, ask: Ask) -> bool:
    is_new = not ask.is_pausing and ask.place is not Place.PAUSED
    launch = book.life.launch if book.life is not None else book.entry.launch
    may_leave = ask.may_resume and not launch.deterministic
    return is_new and may_leave and book.wanted is Wanted.UP


def _pause(record: Record, book: Book, ask: Ask) -> None:
    ask.is_by_hand, ask.is_for_class, ask.is_for_memory = True, False, False
    if ask.place is Place.LINE:
        book.queue.remove(ask)
        shares.has_waited(record, ask)
        puts_aside(record, book, ask)
        return
    life = book.life
    if not ask.is_yielding and life is not None and life.serves:
        record.to_leave.add(ask)
    ask.is_pausing, ask.is_yielding = True, False


def _resume(record: Record, book: Book, ask: Ask) -> None:
    if ask.is_pausing:
        ask.is_pausing, ask.is_yielding = False, True
    else:
        _returns(record, book, ask)


def puts_aside(record: Record, book: Book, ask: Ask) -> None:
    """A request waits outside the line until somebody resumes it."""
    _begins(record, ask)
    ask.paused_at = record.now if ask.paused_at is None else ask.paused_at
    ask.place, ask.is_pausing = Place.PAUSED, False
    book.paused.append(ask)


def _begins(record: Record, ask: Ask) -> None:
    if ask.has_begun:
        ask.is_paused, ask.queue_until = True, None
        ask.paused_at = record.now if ask.paused_at is None else ask.paused_at


def _returns(record: Record, book: Book, ask: Ask) -> None:
    book.paused.remove(ask)
    if not ask.has_begun:
        if ask.queue_until is not None and ask.paused_at is not None:
            ask.queue_until += record.now - ask.paused_at
        ask.ends_pause(record.now)
    shares.joins(record, book, ask)
    _queues(record, book, ask)


def _queues(record: Record, book: Book, ask: Ask) -> None:
    ask.place, ask.placed_at = Place.LINE, record.now
    ask.is_again = ask.acceptance is not None
    shares.waits(record, ask)
    book.queue.append(ask)


def row_left(record: Record, book: Book, ask: Ask, code: str) -> None:
    """A row has left the batch, but not for good; `code` ends what may not return."""
    was_pausing = ask.is_pausing
    ask.is_yielding = ask.is_pausing = False
    if book.wanted is not Wanted.UP and ask.acceptance is None:
        record.must.setdefault(ask, set()).add(code)
    elif was_pausing and book.wanted is Wanted.UP:
        puts_aside(record, book, ask)
    else:
        _begins(record, ask)
        _queues(record, book, ask)


def model_goes(record: Record, book: Book, code: str) -> None:
    """A model is no longer wanted: what waits ends, except answers that were paused, which a
    worker that lives may bring to their end."""
    life = book.life
    is_served = life is not None and not life.is_abandoned and _serves(life)
    for ask in book.waiting:
        if not (is_served and ask.is_paused):
            record.must.setdefault(ask, set()).add(code)
        elif ask.place is Place.PAUSED:
            _returns(record, book, ask)


def look(record: Record) -> None:
    """A worker keeps the state of those who return, and of nobody else."""
    for book in record.books.values():
        if book.life is not None and _serves(book.life):
            waiting = {ask.key for ask in book.waiting}
            check("kept for nobody", book.life.kept <= waiting, f"{book.name}: {book.life.kept}")


def _serves(life: Life) -> bool:
    return life.ready_at is not None and life.cause is None
