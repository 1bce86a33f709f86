"""The oracle's own estimates: what a model needs, and that running out of memory raises it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxsup.protocol.cache_cost import cache_bytes
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.worker_messages import Ready
from mlxsup.supervisor.core.events import Exited

from . import room
from .books import Book, Life, Wanted
from .violation import check

if TYPE_CHECKING:
    from .record import Record

OUT_OF_MEMORY = 75
LEAST_SHARE = 10
SHORT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Owed:
    """What an exit must lead to, in this event.

    Attributes:
        least, most: how much more may be reserved for the model from now on.
    """

    least: int
    most: int


def need_of(record: Record, book: Book) -> int:
    """What a model needs: the limit of its entry, or what it was appraised at and raised by."""
    limit = book.entry.launch.memory_limit_bytes
    return limit or record.plan.needs[book.name] + raised(record, book)


def is_too_large(record: Record, book: Book, said: Ready) -> bool:
    """Whether a model that says READY leaves no room in its entry's limit for a short request. What
    a worker does not measure counts as appraised, and without a budget nothing is."""
    limit, plan = book.entry.launch.memory_limit_bytes, record.plan
    if limit is None or plan.budget_bytes is None:
        return False
    own = said.own_bytes
    if own is None:
        own = plan.needs[book.name] - plan.row_bytes - plan.weights(book.name)
    row = cache_bytes(said.cache_layers, rows=1, longest=SHORT_TOKENS)
    return limit < said.active_bytes + own + row


def raised(record: Record, book: Book) -> int:
    """As much of its raise as fits into the budget next to what is pinned."""
    if book.entry.launch.memory_limit_bytes:
        return 0
    known = record.raised.get(book.name, 0)
    return min(known, _room(record, book)) if known else 0


def died(record: Record, book: Book, life: Life, event: Exited) -> None:
    """A process has ended: if it ran out of memory, its model needs more from now on."""
    is_given = record.plan.budget_bytes is None or book.entry.launch.memory_limit_bytes
    if event.exit_code != OUT_OF_MEMORY or is_given or life.launch != book.entry.launch:
        return
    weights = record.plan.weights(book.name)
    least = (need_of(record, book) - weights) // LEAST_SHARE
    held = max(life.footprint, 0 if life.is_abandoned else life.reported)
    planned = life.granted
    if room.has_budget(life):
        planned = room.fixed_of(record, book) + life.most_bytes
    most = max(least, held - planned)
    left = max(0, _room(record, book) - record.raised.get(book.name, 0))
    record.owed[book.name] = Owed(min(least, left), min(most, left))
    record.count("ran out of memory")


def is_raised(record: Record, model: ModelName, raised_bytes: int) -> None:
    """The supervisor has the estimate remembered."""
    owed = record.owed.pop(model, None)
    more = raised_bytes - record.raised.get(model, 0)
    check("raised for nothing", owed is not None and more > 0, f"{model}: {more}")
    assert owed is not None
    check("raised wrongly", owed.least <= more <= owed.most, f"{model}: {more}, {owed}")
    record.raised[model] = raised_bytes
    record.count("estimate raised")


def look(record: Record) -> None:
    """After each event: nothing is owed."""
    for model, owed in record.owed.items():
        check("not raised", owed.least == 0, f"{model}: {owed}")
    record.owed.clear()


def _room(record: Record, book: Book) -> int:
    """How far it may be raised."""
    budget = record.plan.budget_bytes
    assert budget is not None, "nothing is raised without one"
    needs = record.plan.needs
    known = [other for other in record.books.values() if other.name in record.appraised]
    others = [other for other in known if other is not book]
    pinned = [other for other in others if _is_pinned(other)]
    assert len(pinned) <= 1, "two pinned models would share what is left"
    if not _is_pinned(book):
        taken = sum(need_of(record, other) for other in pinned)
        return max(0, budget - taken - needs[book.name])
    left = budget - needs[book.name]
    limits = {other.name: other.entry.launch.memory_limit_bytes for other in others}
    sizes = [limits[other.name] or needs[other.name] for other in others]
    return left - max((size for size in sizes if size <= left), default=0)


def _is_pinned(book: Book) -> bool:
    return book.entry.pinned and book.wanted is not Wanted.GONE
