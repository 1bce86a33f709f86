"""Rows of the lowest class that make room for a request of the highest one: a row is free for that,
and there is no memory for it. Whose, when, and that no more leave than it needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from . import room, shares
from .asks import Ask
from .books import Book, Life
from .ripe import TICK_S, ripe, run_s
from .violation import check

if TYPE_CHECKING:
    from .record import Record

EPSILON_S = 1e-6


@dataclass(slots=True, kw_only=True)
class Making:
    """Rows of a model that were asked to leave in one event.

    Attributes:
        first: the request of the highest class that they make room for.
        next: the first in line, which waits for memory.
        is_sure: whether that one was it already a moment ago.
        asks: those that were asked.
    """

    first: Ask
    next: Ask
    is_sure: bool
    asks: list[Ask] = field(default_factory=list)


def asked(record: Record, book: Book, ask: Ask) -> None:
    """A row is asked to leave although another one is free."""
    ask.is_for_room = True
    making = record.makes_room.get(book.name)
    if making is None:  # in what follows of this event, its client may reach its limit elsewhere
        waiting = shares.startable(record, book)
        urgent = _urgent(waiting)
        check("makes room for nobody", bool(urgent), book.name)
        is_sure = not any(shares.has_just_aged(record, one) for one in waiting)
        making = Making(first=urgent[0], next=waiting[0], is_sure=is_sure)
        record.makes_room[book.name] = making
    making.asks.append(ask)


def look(record: Record) -> None:
    """After an event: which rows were asked to leave."""
    for name, making in record.makes_room.items():
        book = record.books[name]
        assert book.life is not None
        check("makes room without a budget", room.has_budget(book.life), name)
        _judge(record, book.life, making)
        record.count("made room")
    record.makes_room.clear()


def _judge(record: Record, life: Life, making: Making) -> None:
    first, asks, others = making.first, making.asks, _staying(life)
    is_short = not making.is_sure or _is_short(record, life, making.next)
    check("makes room beside room", is_short, making.next)
    is_there = room.fits_beside(record, life, first, [*others, *asks])
    if first is making.next:
        check("makes room that is there", not is_there, first)
    else:
        record.count("made room behind others")
        is_alone = len(others) + len(asks) == len(life.given)
        check("makes room beside rows that leave", is_alone or not is_there, first)
    check("makes room and finds none", room.fits_beside(record, life, first, others), first)
    for ask in asks:
        check("makes room too early", run_s(record, life, ask, keeps=False) >= -EPSILON_S, ask)
        is_needed = not room.fits_beside(record, life, first, [*others, ask])
        check("makes more room than it takes", is_needed or len(asks) == 1, ask)
        for later in ripe(record, life, EPSILON_S, keeps=False):
            if _place(later) > _place(ask):
                instead = [ask, *(one for one in others if one is not later)]
                would_do = room.fits_beside(record, life, first, instead)
                check("another than the latest makes room", not would_do, f"{ask}: {later}")


def missed(record: Record, book: Book, life: Life) -> None:
    """A row is free: nobody of the highest class, being first, waits for memory that rows of the
    lowest one could make."""
    if not room.has_budget(life):
        return
    waiting = shares.startable(record, book)
    if not waiting or any(shares.has_just_aged(record, ask) for ask in waiting):
        return
    urgent = _urgent(waiting)
    if not urgent or not _is_short(record, life, waiting[0]):
        return
    first, staying = urgent[0], _staying(life)
    if len(staying) < len(life.given):
        return  # when those have left who are on their way, one sees what is still missing
    if first is waiting[0] and room.fits_beside(record, life, first, staying):
        return
    could = ripe(record, life, -TICK_S, keeps=False)
    others = [ask for ask in staying if ask not in could]
    is_enough = bool(could) and room.fits_beside(record, life, first, others)
    check("no room is made", not is_enough, f"{first}: {[str(ask) for ask in could]}")


def _urgent(waiting: list[Ask]) -> list[Ask]:
    return [ask for ask in waiting if ask.rank == shares.HIGHEST]


def _is_short(record: Record, life: Life, ask: Ask) -> bool:
    """Whether a request waits for memory."""
    if ask.short_at is None:
        return False
    alone = room.fits_beside(record, life, ask, [])
    return not (alone and room.may_return(record, life, ask))


def _staying(life: Life) -> list[Ask]:
    return [ask for ask in room.running(life) if not (ask.is_yielding or ask.is_pausing)]


def _place(ask: Ask) -> tuple[float, int]:
    return ask.given_at, ask.key or 0
