"""The oracle's own account of what rows may take: budgets, and who left because there was no room.

It rests on what workers were told and have said, and on lengths that were said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxsup.protocol.cache_cost import GROWTH_TOKENS, cache_bytes, joining_bytes

from .asks import Ask
from .books import Book, Life
from .violation import check

if TYPE_CHECKING:
    from .record import Record

SPARE_SHARE = 10
"""A tenth must stay free if a row returns while others run."""
GIVES_AGAIN_AFTER_S = 10.0
"""Sooner, it is not asked to give back what it holds for speed alone."""


def fixed_of(record: Record, book: Book) -> int:
    """What a process takes without rows."""
    return record.plan.needs[book.name] - record.plan.row_bytes


def reserved_for(record: Record, book: Book, life: Life) -> int:
    """What is reserved for a process that was told a budget."""
    reported = max(life.footprint, life.reported)
    least = record.plan.needs[book.name] if book.entry.pinned else 0
    return max(fixed_of(record, book) + life.most_bytes, reported, least)


def raise_of(record: Record, book: Book) -> int:
    """How much more than that may be reserved, because processes of the model ran out of memory: it
    gives way to rows, which nobody can see from outside."""
    life = book.life
    if life is None or not has_budget(life):
        return 0
    return life.granted - record.plan.needs[book.name]


def has_budget(life: Life) -> bool:
    """Whether its worker keeps to a budget, and anybody listens to it."""
    return bool(life.budgets) and not life.is_abandoned


# ---------------------------------------------------------------- budgets


def beat(record: Record, book: Book, life: Life, number: int) -> None:
    """A worker says which budget it keeps to; earlier ones no longer count."""
    if not life.budgets or number != life.budgets[-1].number:
        return
    is_news = len(life.budgets) > 1 or life.is_giving_back
    life.says_it_gave_back |= life.is_giving_back
    life.budgets, life.is_giving_back = life.budgets[-1:], False
    if is_news:
        book.held = reserved_for(record, book, life)


def is_lowering(life: Life) -> bool:
    """Whether its worker was told to take less, and has not said yet that it does."""
    return has_budget(life) and (len(life.budgets) > 1 or life.is_giving_back)


def measured(record: Record, life: Life) -> None:
    """What it holds now is what it holds after it gave back, if it has said that it did."""
    if life.says_it_gave_back:
        life.says_it_gave_back, life.gave_back_at = False, record.now


def needs_what_it_holds(record: Record, life: Life) -> bool:
    """Whether it has only just given back whatever it does not need."""
    is_asked = life.is_giving_back or life.says_it_gave_back
    return not is_asked and record.now < life.gave_back_at + GIVES_AGAIN_AFTER_S


def least_of(record: Record, book: Book, held: int) -> int:
    """What is left of what is reserved for a process once it has given back what its rows do not
    need, each with a step of growth, if that gives back nothing that is measured; without a budget,
    that is all of it."""
    life = book.life
    if life is None or not has_budget(life) or not life.serves:
        return held
    return min(held, max(needed_of(record, book, life), life.footprint, life.reported))


def needed_of(record: Record, book: Book, life: Life) -> int:
    """What a process and its rows need, each row with a step of growth."""
    asks = staying(life)
    longest = max(map(length, asks), default=0) + GROWTH_TOKENS
    rows = cache_bytes(record.plan.layers, rows=len(asks), longest=longest)
    return fixed_of(record, book) + max(rows, record.plan.row_bytes)


def held_now(book: Book, life: Life) -> int:
    """What it holds of the machine's memory, as far as that is measured."""
    if not has_budget(life):
        return book.held
    is_measured = life.footprint > 0 and life.cause is None
    return max(life.footprint, life.reported) if is_measured else book.held


# ---------------------------------------------------------------- rows


def length(ask: Ask) -> int:
    """Tokens of its prompt, if that is known, and of its answer."""
    prompt = len(ask.acceptance.prompt_tokens) // 4 if ask.acceptance else 0
    return prompt + ask.tokens


def taken_bytes(record: Record, asks: list[Ask]) -> int:
    """What rows take, as far as their lengths are known."""
    longest = max(map(length, asks), default=0)
    return cache_bytes(record.plan.layers, rows=len(asks), longest=longest)


def left(record: Record, ask: Ask) -> None:
    """The row of an open request has left because there was no room for it."""
    record.left_short.append(ask)
    if not (ask.is_yielding or ask.is_pausing):
        ask.is_for_memory, ask.is_for_class, ask.is_by_hand = True, False, False
    record.count("left for want of memory")


def note_left(record: Record, life: Life) -> None:
    """Of this step everything is known: who has left waits for rows that end after it."""
    for ask in record.left_short:
        ask.short_at = life.rows_ended
    record.left_short.clear()


def may_return(record: Record, life: Life, ask: Ask) -> bool:
    """Whether one whose row has left for want of memory may have one again."""
    if ask.short_at is None or not life.budgets:
        return True
    others = running(life)
    if not others or life.rows_ended > ask.short_at:
        return True
    return fits_beside(record, life, ask, others)


def fits_beside(record: Record, life: Life, ask: Ask, others: list[Ask]) -> bool:
    """Whether there is room for a row next to these with some to spare, or for it alone."""
    size = life.budgets[-1].rows_bytes
    lengths = [length(ask), *map(length, others)]
    spare = size // SPARE_SHARE if others else 0
    return joining_bytes(record.plan.layers, lengths) <= size - spare


def returns(record: Record, book: Book, life: Life, ask: Ask) -> None:
    """A request is dispatched."""
    if ask.short_at is not None:
        check("returns without room", may_return(record, life, ask), f"{ask} of {book.name}")
        record.count("returned to memory")
    ask.short_at, ask.is_for_room = None, False


def forget(book: Book) -> None:
    """The process is gone, and whatever was short there."""
    for ask in book.waiting:
        ask.short_at, ask.is_for_room = None, False


def staying(life: Life) -> list[Ask]:
    """Those that have not been asked to leave for want of memory."""
    return [ask for ask in running(life) if not (ask.is_yielding and ask.is_for_memory)]


def running(life: Life) -> list[Ask]:
    """Its rows that nobody has taken out."""
    return [ask for ask in life.given.values() if ask.is_open]
