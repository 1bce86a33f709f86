"""Rows of the lowest class that leave because other programs need memory: whose, when, and that
they leave before a busy model does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxsup.protocol.cache_cost import GROWTH_TOKENS, cache_bytes
from mlxsup.supervisor.core.events import Sampled

from . import memory, pressure, room
from .asks import Ask
from .books import Book, Life
from .violation import check

if TYPE_CHECKING:
    from .record import Record

LOWEST = 2


def before_a_swap(record: Record) -> None:
    """A busy model goes because other programs need memory: no row is left that could have."""
    if record.shortage.since is None:
        return
    for book in record.books.values():
        rows = [str(ask) for ask in _could_free(record, book)]
        check("a model before rows", not rows, f"{book.name}: {rows}")
        life = book.life
        is_on_its_way = life is not None and any(map(is_leaving, life.given.values()))
        check("a model beside rows", not is_on_its_way, book.name)


def is_leaving(ask: Ask) -> bool:
    """Whether its row was asked to leave for want of memory, and has not left yet."""
    return ask.is_open and ask.is_yielding and ask.is_for_memory


def asked(record: Record, book: Book, ask: Ask) -> None:
    """A row is asked to leave without its state, though no turn or swap is on."""
    ask.is_for_memory = True
    record.dropped.setdefault(book.name, []).append(ask)


def _judge(record: Record, book: Book, asks: list[Ask]) -> None:
    """These rows of a model were asked to leave in one event."""
    name, life = book.name, book.life
    assert life is not None
    check("no row stays", bool(staying(life)), name)
    check("a row leaves for nothing", record.shortage.since is not None, name)
    check("a row leaves unready", book.serves and life.unlinked_at is None, name)
    check("a row leaves that is fixed", not life.launch.deterministic, name)
    pressure.check_patience(record)
    pressure.check_idle(record, name)
    for ask in asks:
        check("a row leaves that must stay", ask.may_resume and ask.rank == LOWEST, ask)
        frees = _rows_bytes(record, [*staying(life), ask]) > _rows_bytes(record, staying(life))
        check("a row leaves that frees nothing", frees, ask)
    record.count("rows gave way")


def look(record: Record) -> None:
    """After an event: which rows were asked to leave. If memory has been short for a while, no row
    stays that could help."""
    for name, asks in record.dropped.items():
        _judge(record, record.books[name], asks)
    record.dropped.clear()
    since = record.shortage.since
    if since is None or not isinstance(record.event, Sampled) or record.is_shutting_down:
        return
    if record.now < since + pressure.GIVES_WAY_S or pressure.is_anybody_leaving(record):
        return
    books = list(record.books.values())
    if any(book.life and room.is_lowering(book.life) for book in books):
        return
    given = [ask for book in books if book.life for ask in book.life.given.values()]
    if pressure.is_anybody_giving_back(record) or any(map(is_leaving, given)):
        return
    if sum(memory.least_by(record, book) for book in books) <= record.shortage.room:
        return
    for book in books:
        check("no row gives way", not _could_free(record, book), f"{book.name}: since {since}")


def staying(life: Life) -> list[Ask]:
    """Rows that nobody has asked to leave."""
    given = [ask for ask in life.given.values() if ask.is_open]
    return [ask for ask in given if not (ask.is_yielding or ask.is_pausing)]


# ---------------------------------------------------------------- inside


def _could_free(record: Record, book: Book) -> list[Ask]:
    """Rows that could leave and would free something, as far as their lengths were said."""
    life = book.life
    if life is None or not book.serves or life.unlinked_at is not None:
        return []
    if not room.has_budget(life) or life.launch.deterministic or book.swaps_until is not None:
        return []
    rows, could = staying(life), _could_leave(life)
    if len(could) == len(rows):
        could = sorted(could, key=_key)[1:]
    others = [ask for ask in rows if ask not in could]
    reserved = room.fixed_of(record, book) + _rows_bytes(record, others)
    is_less = _rows_bytes(record, others) < _rows_bytes(record, rows)
    return could if is_less and reserved < memory.least_by(record, book) else []


def _could_leave(life: Life) -> list[Ask]:
    return [ask for ask in staying(life) if ask.may_resume and ask.rank == LOWEST]


def _key(ask: Ask) -> tuple[float, int]:
    return ask.given_at, ask.key or 0


def _rows_bytes(record: Record, asks: list[Ask]) -> int:
    """What rows need, each with a step of growth; there is always room for one."""
    longest = max(map(room.length, asks), default=0) + GROWTH_TOKENS
    rows = cache_bytes(record.plan.layers, rows=len(asks), longest=longest)
    return max(rows, record.plan.row_bytes)
