"""Models that take turns: who may be asked to make room, when, and what must follow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlxsup.protocol.states import Priority, State, Why

from . import giving_way, memory, pressure
from .books import Book, Cause, Life, UpFor, Wanted
from .violation import check

if TYPE_CHECKING:
    from .record import Record

EPSILON_S = 1e-6
SLACK_S = 0.05
LOWEST = len(Priority)


def begins(record: Record, book: Book, life: Life) -> None:
    """A model that is busy has to go, though nobody asked for that: a swap must be due."""
    settings, now = record.plan.settings, record.now
    name = book.name
    check("swapped without a budget", record.plan.budget_bytes is not None, name)
    check("pinned and swapped", not book.entry.pinned, name)
    check("swapped unready", book.serves, name)
    assert life.ready_at is not None
    given = [ask for ask in life.given.values() if ask.is_open]
    check("swapped though it must run through", all(ask.may_resume for ask in given), name)
    has_spoken = life.spoke_at is not None or not life.was_given
    check("a turn without a token", has_spoken or not given, name)  # or all have ended
    began_at = life.ready_at if life.spoke_at is None else life.spoke_at
    load_s = life.ready_at - life.spawned_at
    least_s = max(settings.min_residency_s, memory.RESIDENCY_LOADS * load_s)
    check("a turn too short", now >= began_at + least_s - EPSILON_S, f"{name}: since {began_at}")
    record.folders.check_swap(record, book, life)
    highest = min((ask.rank for ask in given), default=LOWEST)
    others = [
        other
        for other in record.books.values()
        if other is not book and _waits_long_enough(record, other)
    ]
    if any(_class(other) <= highest for other in others):
        record.count("swapped for another")
    elif pressure.is_over(record):
        pressure.swapped(record, book)
        giving_way.before_a_swap(record)
    else:
        check("swapped for nobody", bool(others), name)
        check("swapped for a lower class", False, name)
    book.swaps_until = now + settings.drain_timeout_s
    book.swaps += 1
    book.up_for = UpFor.NEXT_TURN
    record.count("swapped out")


def may_have_begun(record: Record, book: Book) -> bool:
    """A swap that nobody can see yet: all rows had ended or been asked to leave before."""
    life = book.life
    assert life is not None
    leaves = [not ask.is_open or ask.is_yielding or ask.is_pausing for ask in life.given.values()]
    if not (leaves and all(leaves)):
        return False
    others = (other for other in record.books.values() if other is not book)
    return any(_waits_long_enough(record, other) for other in others)


def exits(record: Record, book: Book, life: Life) -> None:
    """Its rows have left, or their time is up: it is asked to exit."""
    assert book.swaps_until is not None
    is_late = record.now >= book.swaps_until - EPSILON_S
    still_runs = [ask for ask in life.given.values() if ask.is_open]
    check("swapped out with its rows", not still_runs or is_late, book.name)
    book.swaps_until = None
    record.stops(life, Cause.SWAP)


def announced(record: Record, change: dict[str, Any]) -> None:
    """Watchers are notified of a change: a swap may be called off before any row returns, and begin
    again while rows are still leaving."""
    book, edge = record.books.get(change["model"]), (change["from"], change["to"])
    if book is None or book.life is None:
        return
    if edge == (State.DRAINING, State.READY) and book.swaps_until is not None:
        is_called_off(record, book)
    elif edge == (State.READY, State.DRAINING) and change["why"] == Why.SWAP:
        begins(record, book, book.life)


def is_called_off(record: Record, book: Book) -> None:
    """It serves on."""
    book.swaps_until, book.up_for = None, UpFor.SOMEBODY
    record.count("swap called off")


def look(record: Record) -> None:
    """After an event: who waits for memory since when, and which swaps are over."""
    for book in record.books.values():
        is_waiting = memory.waits(book) and memory.is_wanted_by_somebody(book)
        if not is_waiting:
            book.waits_since = None
        elif book.waits_since is None:
            book.waits_since = record.now
    for book in record.books.values():
        life = book.life
        if book.swaps_until is None:
            continue
        is_over = life is None or life.ready_at is None or life.cause is not None
        if is_over or book.wanted is not Wanted.UP:
            book.swaps_until = None
        elif not _may_be_for_somebody(record):
            is_called_off(record, book)
        else:
            check("swap late", record.now <= book.swaps_until + SLACK_S, book.name)
            assert life is not None
            rows = [ask for ask in life.given.values() if ask.is_open]
            leave = all(ask.is_yielding or ask.is_pausing for ask in rows)
            check("rows run on", leave, book.name)
            is_stuck = not life.given and bool(book.queue)
            check("swap does not end", not is_stuck, book.name)


def _may_be_for_somebody(record: Record) -> bool:
    waits = any(other.waits_since is not None for other in record.books.values())
    return waits or pressure.is_over(record)


def _waits_long_enough(record: Record, book: Book) -> bool:
    since = book.waits_since
    if since is None or not (memory.waits(book) and memory.is_wanted_by_somebody(book)):
        return False
    return record.now >= since + record.plan.settings.swap_after_s - EPSILON_S


def _class(book: Book) -> int:
    if book.callers:
        return 0
    return min((ask.rank for ask in book.queue), default=LOWEST)
