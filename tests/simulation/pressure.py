"""What must give way while memory is short, what must not, and that the budget comes back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxsup.protocol.ids import ModelName
from mlxsup.supervisor.core.events import Sampled

from . import room
from .books import Book, Life, Wanted
from .estimates import need_of
from .violation import check

if TYPE_CHECKING:
    from .record import Record

GIVES_WAY_S = 1.5
"""Memory that has been short for so long has found something that gives way, if anything can."""

ASKED_S = 0.9
"""For so long nobody is evicted because memory is short: a worker may be giving some back."""

ASKED_AGAIN_S = 10.0
COMES_BACK_S = 23.0
"""The budget is whole after so long with more room than that."""

CALM_FACTOR = 1.1


@dataclass(slots=True)
class Shortage:
    """What the measurements of a run said.

    Attributes:
        since: since when memory has been short; None: it is not.
        calm_since: since when there has been room for the whole budget and more.
        room: what models may hold by the latest measurement, at most.
        is_known: whether it is measured at all.
    """

    since: float | None = None
    calm_since: float | None = 0.0
    room: float = math.inf
    is_known: bool = False


def sampled(record: Record, event: Sampled) -> None:
    """The memory of the machine was measured, and what processes hold was entered."""
    reading, shortage, whole = event.reading, record.shortage, record.plan.budget_bytes
    if reading is None or whole is None:
        return
    held = sum(room.held_now(book, book.life) for book in record.books.values() if book.life)
    shortage.is_known = True
    shortage.room = held + reading.free_bytes
    if reading.free_bytes >= 0:
        shortage.since = None
    elif shortage.since is None:
        shortage.since = record.now
        record.count("memory short")
    if shortage.room < CALM_FACTOR * whole:
        shortage.calm_since = None
    elif shortage.calm_since is None:
        shortage.calm_since = record.now


def is_whole(record: Record) -> bool:
    """Whether nothing may be left of a shortage."""
    shortage = record.shortage
    if not shortage.is_known or record.plan.budget_bytes is None:
        return True
    since = shortage.calm_since
    return since is not None and record.now >= since + COMES_BACK_S


def is_over(record: Record) -> bool:
    """Whether models must give back memory: others lack it, or more is held than the budget."""
    budget = record.plan.budget_bytes
    if budget is None:
        return False
    held = [max(one.held if _keeps(one) else 0, _least(record, one)) for one in _books(record)]
    raised = [room.raise_of(record, one) for one in _books(record)]
    return record.shortage.since is not None or sum(held) + sum(raised) > budget


def asked(record: Record, life: Life) -> None:
    """A worker is asked to give back what it keeps for reuse."""
    is_for_another = record.tried_again is not None
    check("gives back for nothing", is_for_another or is_over(record), life.model)
    check("gives back unready", life.serves, life.model)
    is_again = record.now < life.asked_back_at + ASKED_AGAIN_S
    check("gives back again", is_for_another or not is_again, life.model)
    life.asked_back_at = record.now
    record.count("asked to give back")


def check_patience(record: Record) -> None:
    """A model is evicted only because memory is short: no worker may still be giving some back."""
    is_too_early = record.shortage.is_known and is_anybody_giving_back(record)
    check("evicted too early", not is_too_early, record.now)


def is_anybody_giving_back(record: Record) -> bool:
    """Whether a worker may still be giving back what it was asked for."""
    lives = [book.life for book in _books(record) if book.life]
    return any(record.now < life.asked_back_at + ASKED_S for life in lives)


def check_idle(record: Record, name: ModelName) -> None:
    """Something that is busy has to go because memory is short: nobody else is idle."""
    idle = [one.name for one in _books(record) if one.name != name and _may_go(one)]
    check("busy before idle", not idle, f"{name}, {idle}")


def is_anybody_leaving(record: Record) -> bool:
    """Whether the process of any model is on its way out."""
    return any(_leaves(book) or book.swaps_until is not None for book in _books(record))


def check_others(record: Record) -> None:
    """If a request is tried again that ran out of memory alone, all others were asked at once."""
    ask = record.tried_again
    if ask is None or not ask.is_open:
        return
    for book in _books(record):
        if book.serves and book.name != ask.model:
            assert book.life is not None
            check("did not give back", book.life.asked_back_at == record.now, book.name)


def swapped(record: Record, book: Book) -> None:
    """A busy model has to go only because memory is short."""
    settings = record.plan.settings
    check("swapped though that is off", settings.swap, book.name)
    check_patience(record)
    stay = [one for one in _books(record) if one is not book]
    check("nobody serves", any(one.serves for one in stay), book.name)
    check_idle(record, book.name)
    record.count("swapped for a shortage")


def look(record: Record) -> None:
    """After each event: if memory has been short for a while, and nobody is just giving some back,
    nobody is idle who may go."""
    since = record.shortage.since
    if since is None or record.now < since + GIVES_WAY_S or not isinstance(record.event, Sampled):
        return
    if record.is_shutting_down or any(_leaves(book) for book in _books(record)):
        return
    if is_anybody_giving_back(record):
        return
    for book in _books(record):
        check("nothing gives way", not _may_go(book), f"{book.name}: short since {since}")


def compare(record: Record, memory: dict[str, object]) -> None:
    """The status says what is left of the budget."""
    budget, left = record.plan.budget_bytes, memory["effective_budget_bytes"]
    if budget is None:
        return
    assert isinstance(left, int)
    check("status: budget", memory["budget_bytes"] == budget, memory)
    check("status: left", 0 <= left <= min(budget, max(record.shortage.room, 0)), memory)
    check("status: comes back", left == budget or not is_whole(record), memory)
    check("status: shortage", bool(memory["shortage"]) == (left < budget), memory)


# ---------------------------------------------------------------- inside


def _books(record: Record) -> list[Book]:
    return list(record.books.values())


def _least(record: Record, book: Book) -> int:
    return need_of(record, book) if book.entry.pinned else 0


def _keeps(book: Book) -> bool:
    return book.life is not None or book.wanted is Wanted.UP


def _leaves(book: Book) -> bool:
    life = book.life
    if life is None or life.is_abandoned:
        return False
    return life.cause is not None or book.drain_until is not None


def _may_go(book: Book) -> bool:
    life = book.life
    is_busy = life is None or bool(book.waiting or life.given)
    return book.serves and not is_busy and not book.entry.pinned
