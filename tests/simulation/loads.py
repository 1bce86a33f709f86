"""The oracle's own account of loads: how many there may be at a time, and of which kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .books import Book, Life
from .violation import check

if TYPE_CHECKING:
    from .record import Record


def check_turn(record: Record, book: Book) -> None:
    """A model is being loaded: it may have to wait for others, but after a crash only for those
    that crashed, too."""
    check("loads side by side", has_turn(record, book), f"{book.name}: {_loading(record)}")
    if _loading(record):
        record.count("loaded side by side")


def has_turn(record: Record, book: Book) -> bool:
    """Whether a load of this model would not have to wait for others."""
    loading = _loading(record)
    after_crash = [life for life in loading if life.is_after_crash]
    in_the_way = after_crash if book.is_after_crash else loading
    return len(in_the_way) < record.plan.settings.parallel_loads


def is_loading(book: Book) -> bool:
    """Whether a process of this model is on its way up, or was ended on it and is still there."""
    life = book.life
    return life is not None and life.ready_at is None and not life.is_abandoned


def _loading(record: Record) -> list[Life]:
    return [book.life for book in record.books.values() if book.life and is_loading(book)]
