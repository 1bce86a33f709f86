"""The stories of models say how their latest process has ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from mlxsup.supervisor.core.events import Exited, SpawnFailed

from .books import Book
from .violation import check

if TYPE_CHECKING:
    from .record import Record

LONGEST = 200
"""Lines that are kept of a story."""


def ended(record: Record, event: Exited | SpawnFailed) -> None:
    """A process has ended, or could not be started: the one that the story ends with."""
    book = record.books.get(event.model)
    if book is None or book.life is None or book.life.generation != event.generation:
        return
    if isinstance(event, SpawnFailed):
        book.last_exit = event.detail
    else:
        book.last_exit = event.signal_name or f"exit code {event.exit_code}"


def check_all(record: Record, stories: Mapping[str, Iterable[str]]) -> None:
    """What the supervisor tells of each model, oldest first."""
    check("stories of all", set(stories) == set(record.books), sorted(stories))
    for book in record.books.values():
        _check(book, list(stories[book.name]))


def _check(book: Book, lines: list[str]) -> None:
    if not book.last_exit or len(lines) >= LONGEST:
        return
    deaths = [line for line in lines if " died (" in line]
    is_told = bool(deaths) and book.last_exit in deaths[-1]
    check("story: death", is_told, f"{book.name}: {book.last_exit} and not {deaths[-1:]}")
