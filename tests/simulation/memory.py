"""The oracle's own books of memory: what is held, who may be evicted, who must be refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import pressure, room
from .books import Book, Life, UpFor, Wanted
from .estimates import need_of, raised
from .violation import check

if TYPE_CHECKING:
    from .record import Record

EPSILON_S = 1e-6
SLACK_S = 0.1
RESIDENCY_LOADS = 3.0
OUTCOMES = {"loaded", "downloads", "fits", "evicts", "swaps", "waits"}


def measured(record: Record, book: Book, life: Life) -> None:
    """What its process was measured at counts, if it is more than what was reserved; less than
    before, if it was asked to give some back, and never less than it was started with."""
    if room.has_budget(life):
        book.held = room.reserved_for(record, book, life)
        return
    reported = 0 if life.is_abandoned else life.reported
    may_shrink = life.serves and record.now < life.asked_back_at + pressure.ASKED_AGAIN_S
    least = life.granted if may_shrink else book.held
    book.held = max(least, life.footprint, reported)


def held_by_others(record: Record, book: Book) -> int:
    """What all other processes hold, and what is kept for pinned models without one."""
    return sum(held_by(record, other) for other in record.books.values() if other is not book)


def held_by_all(record: Record) -> int:
    """What all processes hold, and what is kept for pinned models."""
    return sum(held_by(record, book) for book in record.books.values())


def may_be_kept(record: Record) -> int:
    """What may be kept besides, for models without a process that crashed: what they need, with
    whatever it was raised by."""
    back = [book for book in record.books.values() if _may_return(book) and book.held]
    return sum(max(book.held, need_of(record, book)) for book in back)


def _may_return(book: Book) -> bool:
    """Whether its memory may be kept although it has no process, because it crashed."""
    return book.life is None and book.wanted is Wanted.UP and not book.entry.pinned


def held_by(record: Record, book: Book) -> int:
    """What its process holds, or what is kept for it if it is pinned."""
    least = need_of(record, book) if book.entry.pinned else 0
    return max(book.held if book.life is not None else 0, least)


def least_by(record: Record, book: Book) -> int:
    """What must stay reserved for a model once it has given back what it does not need."""
    return room.least_of(record, book, held_by(record, book))


def waits(book: Book) -> bool:
    """Whether a model is wanted and has no process, not even one to come after a delay, and lacks
    no files."""
    is_at_rest = bool(book.failed) or book.retry_at is not None
    is_wanted = book.wanted is Wanted.UP and book.life is None and not is_at_rest
    return is_wanted and book.entry.download is None


def is_wanted_by_somebody(book: Book) -> bool:
    """Whether anybody waits for its load."""
    return bool(book.queue or book.callers)


# ---------------------------------------------------------------- before a load


def check_spawn(record: Record, book: Book) -> None:
    """A model is being loaded: with it, everybody must be within the budget."""
    budget = record.plan.budget_bytes
    if budget is not None:
        total = held_by_others(record, book) + need_of(record, book)
        check("over the budget", total <= budget, f"{book.name}: {total} of {budget}")
        most = record.shortage.room
        check("over the room", total <= most, f"{book.name}: {total} of {most}")


def refuse(record: Record) -> None:
    """Who waits for what can never fit, whatever goes, must be answered in this event."""
    budget = record.plan.budget_bytes
    if budget is None or record.is_shutting_down:
        return
    for book in record.books.values():
        if not waits(book) or not is_wanted_by_somebody(book):
            continue
        fixed = sum(
            _kept_by(record, other)
            for other in record.books.values()
            if other is not book and _is_fixed(other)
        )
        if fixed + need_of(record, book) <= budget:
            continue
        for ask in book.waiting:
            record.must.setdefault(ask, set()).add("insufficient_memory")
        book.callers.clear()
        record.count("refused for memory")
        if not book.entry.preload or book.up_for is not UpFor.FILE:
            book.wanted, book.is_by_user, book.is_restarting = Wanted.DOWN, False, False


def _kept_by(record: Record, book: Book) -> int:
    """What a model keeps whatever is asked for, and whoever ends: all that it holds if its process
    cannot be ended, or serves rows that have no budget; otherwise what a pinned one needs, or what
    is left of it when it has just given back and does nothing."""
    life = book.life
    if life is not None and life.is_abandoned:
        return held_by(record, book)
    if life is None or not book.serves or book.drain_until is not None:
        return need_of(record, book)
    if not record.plan.layers_of(life.launch):
        return held_by(record, book)
    is_idle = not (book.waiting or life.given)
    has_given_back = life.gave_back_at > book.busy_at and room.needs_what_it_holds(record, life)
    return least_by(record, book) if is_idle and has_given_back else need_of(record, book)


def could_be_loaded(record: Record, book: Book, needed_bytes: int) -> bool:
    """Whether a model that needs so much fits next to what never goes, if nothing was raised."""
    fixed = 0
    for other in record.books.values():
        if other is not book and _is_fixed(other):
            is_stuck = other.life is not None and other.life.is_abandoned
            raised_bytes = 0 if is_stuck else raised(record, other)
            fixed += _kept_by(record, other) - raised_bytes
    budget = record.plan.budget_bytes
    return budget is None or fixed + needed_bytes <= budget


def forget(record: Record) -> None:
    """Who has made room is not wanted any longer once nobody waits for it."""
    for book in record.books.values():
        is_next = waits(book) and book.up_for is UpFor.NEXT_TURN
        if is_next and not (is_wanted_by_somebody(book) or book.paused):
            book.wanted, book.is_by_user, book.is_restarting = Wanted.DOWN, False, False
            record.count("stopped after a swap")


def _is_fixed(book: Book) -> bool:
    if book.life is not None and book.life.is_abandoned:
        return True
    return book.entry.pinned and book.wanted is not Wanted.GONE


def may_wait(record: Record, book: Book) -> bool:
    """Whether a model that is wanted may be without a process although nothing else loads."""
    budget = record.plan.budget_bytes
    if budget is None:
        return False
    others = [other for other in record.books.values() if other is not book]
    if not pressure.is_whole(record):
        return True
    if record.spares.is_one_ending() or any(_is_leaving(other) for other in others):
        return True  # what is being freed may be for another
    if any(other.life and room.is_lowering(other.life) for other in others):
        return True
    taken = sum(least_by(record, other) for other in others) + need_of(record, book)
    taken += sum(room.raise_of(record, other) for other in others)
    for other in others:
        may_load = other.wanted is Wanted.UP and other.entry.download is None
        if other.life is None and may_load and not other.failed:
            taken += need_of(record, other)
    if is_wanted_by_somebody(book):
        ripe = [other for other in others if is_ripe(record, other, -SLACK_S)]
        taken -= sum(least_by(record, other) for other in ripe)
    return taken > budget


def _is_leaving(book: Book) -> bool:
    life = book.life
    if life is None or life.is_abandoned:
        return False
    is_going = book.drain_until is not None or book.swaps_until is not None
    return life.cause is not None or is_going


# ---------------------------------------------------------------- making room


def check_eviction(record: Record, book: Book, life: Life) -> None:
    """An idle model is evicted although nobody asked for it to go."""
    budget = record.plan.budget_bytes
    assert budget is not None
    check("pinned and evicted", not book.entry.pinned, book.name)
    others = [other for other in record.books.values() if other is not book and waits(other)]
    held = sum(one.held for one in record.books.values() if one.life or one.wanted is Wanted.UP)
    most = max(held, held_by_others(record, book) + book.held)
    is_over = most + sum(room.raise_of(record, one) for one in record.books.values()) > budget
    is_over = is_over or record.shortage.since is not None
    is_commanded = any(other.callers for other in others)
    is_asked = any(other.queue for other in others) and is_ripe(record, book, EPSILON_S)
    detail = f"{book.name}, ready at {life.ready_at}, busy at {book.busy_at}"
    check("evicted for nobody", is_over or is_commanded or is_asked, detail)
    if not (is_commanded or is_asked):
        pressure.check_patience(record)
    record.count("evicted")


def is_ripe(record: Record, book: Book, slack_s: float) -> bool:
    """Whether it is idle, and a request for another model may evict it."""
    life = book.life
    if not book.serves or life is None or life.ready_at is None:
        return False
    if book.waiting or life.given or book.entry.pinned:
        return False
    load_s = life.ready_at - life.spawned_at
    residency_s = max(record.plan.settings.min_residency_s, RESIDENCY_LOADS * load_s)
    ripe_at = min(book.busy_at + load_s, life.ready_at + residency_s)
    return record.now + slack_s >= ripe_at


# ---------------------------------------------------------------- what it says of itself


def check_row(record: Record, book: Book, row: dict[str, object]) -> None:
    """The status says what a process holds, and what running out of memory has raised."""
    if not book.entry.launch.memory_limit_bytes:
        check("status: raised", row["raised_bytes"] == raised(record, book), row)
    if record.plan.budget_bytes is not None and book.life is not None:
        held, said = held_by(record, book), row["reserved_bytes"]
        assert isinstance(said, int)
        most = held + room.raise_of(record, book)
        check("status: reserved", held <= said <= most, row)


def check_forecast(record: Record, book: Book, value: dict[str, object]) -> None:
    """A dry run says what a load would do, and whether there is anything to do."""
    life = book.life
    is_going = book.drain_until is not None or book.swaps_until is not None
    is_up = life is not None and life.cause is None and not is_going
    check("dry run: loaded", (value["outcome"] == "loaded") == is_up, f"{book.name}: {value}")
    lacks_files = book.entry.download is not None
    foreseen = ("loaded", "downloads", "waits") if lacks_files else OUTCOMES - {"downloads"}
    check("dry run: downloads", value["outcome"] in foreseen, f"{book.name}: {value}")
    budget = record.plan.budget_bytes
    if value["outcome"] == "fits" and budget is not None:
        others = [other for other in record.books.values() if other is not book]
        total = sum(least_by(record, other) for other in others) + need_of(record, book)
        check("dry run: fits", total <= budget, f"{book.name}: {value}")
    names = value["evicts"]
    assert isinstance(names, list)
    for name in names:
        other = record.books[name]
        is_idle = other.serves and not other.waiting and other.life and not other.life.given
        check("dry run: evicts", bool(is_idle), f"{name}: {value}")
    record.count("dry run")
