"""The rule that a swap must happen: who has waited for memory long enough gets it from those whose
turns are over, if nothing forbids that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import estimates, loads, memory, pressure, shares, swaps
from .books import Book, Life
from .violation import check

if TYPE_CHECKING:
    from .record import Record

BEGINS_WITHIN_S = 1.0
"""Beside `swap_after_s`, from the moment at which nothing forbids a swap any more."""

LOOK_S = 1.0
"""So long a look at the model's files may take."""


def look(record: Record) -> None:
    """After an event: notes which turns have begun to count, and whether a swap is late."""
    if record.plan.budget_bytes is None:
        return
    for book in record.books.values():
        if book.life is not None and book.life.settled_at is None:
            _settles(record, book.life)
    limit_s = record.plan.settings.swap_after_s + BEGINS_WITHIN_S + LOOK_S
    for book in record.books.values():
        if not _must_get_a_turn(record, book):
            book.due_since = None
        elif book.due_since is None:
            book.due_since = record.now
            record.count("a swap is due")
        else:
            is_late = record.now > book.due_since + limit_s
            check("no turn", not is_late, f"{book.name}: due since {book.due_since}")


def _settles(record: Record, life: Life) -> None:
    """Every row that it was given at first has gained a token or ended: at the latest now."""
    rows = life.given.values()
    has_gained = all(ask.gains_since is not None for ask in rows if ask.is_open)
    if life.serves and life.spoke_at is not None and has_gained:
        life.settled_at = record.now


def _must_get_a_turn(record: Record, book: Book) -> bool:
    """Whether one model alone waits for memory, and all that holds some may be swapped out."""
    if book.waits_since is None or not book.queue or book.callers or not _is_calm(record):
        return False
    budget = record.plan.budget_bytes
    assert budget is not None
    others = [other for other in record.books.values() if other is not book]
    if any(memory.waits(other) for other in others):
        return False  # it may be another one's turn
    if not all(shares.may_run(record, ask.account) for ask in book.queue):
        return False
    fixed = [other for other in others if other.entry.pinned]
    left = [other for other in others if other.life is not None and other not in fixed]
    lowest = max(ask.rank for ask in book.queue)
    held = sum(max(other.held, estimates.need_of(record, other)) for other in fixed)
    if held + estimates.need_of(record, book) > budget or not left:
        return False
    return all(_may_go(record, other, lowest) for other in left)


def _is_calm(record: Record) -> bool:
    """Whether nothing is on its way in or out, and others lack no memory."""
    settings, books = record.plan.settings, record.books.values()
    if not settings.swap or record.is_shutting_down or record.shortage.since is not None:
        return False
    if not pressure.is_whole(record) or record.spares.is_one_ending():
        return False
    if any(other.life is None and other.held and other.is_resting for other in books):
        return False  # what a crashed model held may be kept for it
    if any(other.life is not None and other.life.is_giving_back for other in books):
        return False  # its worker answers at the end of its step, however long that takes
    return not any(loads.is_loading(other) or _leaves(record, other) for other in books)


def _leaves(record: Record, book: Book) -> bool:
    life = book.life
    if life is None:
        return False
    is_going = book.drain_until is not None or book.swaps_until is not None
    return life.is_abandoned or life.cause is not None or is_going


def _may_go(record: Record, book: Book, lowest: int) -> bool:
    """Whether a model that holds memory has had its turn, or is idle, and must go if asked."""
    life = book.life
    assert life is not None
    if not book.serves or life.ready_at is None:
        return False
    if not (book.waiting or life.given):
        return memory.is_ripe(record, book, -BEGINS_WITHIN_S)
    if life.settled_at is None or swaps.may_have_begun(record, book):
        return False
    if record.folders.have_differed(life.model, life.generation):
        return False
    given = [ask for ask in life.given.values() if ask.is_open]
    is_allowed = not life.launch.deterministic and all(ask.may_resume for ask in given)
    if not is_allowed or any(ask.rank < lowest for ask in given):
        return False
    cost_s = life.settled_at - life.spawned_at
    least_s = max(record.plan.settings.min_residency_s, memory.RESIDENCY_LOADS * cost_s)
    return record.now >= life.settled_at + least_s
