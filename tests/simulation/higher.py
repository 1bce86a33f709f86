"""Rows that are freed for a higher class: whose, when, for whom, and what waiting people hear."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlxsup.protocol.states import NoticeKind, RowState

from . import making_room, shares
from .asks import Ask, Place
from .books import Book, Life
from .ripe import LOWEST, TICK_S, ripe, run_s
from .violation import check

if TYPE_CHECKING:
    from .record import Record

EPSILON_S = 1e-6
SHORTEST_S = 0.1


# ---------------------------------------------------------------- whose, and when


def asked_to_leave(record: Record, book: Book, life: Life, ask: Ask) -> None:
    """A row is asked to leave that nobody has paused by hand."""
    check("freed in a turn", not _is_turn_due(record, book, life), ask)
    check("freed of a deterministic model", not life.launch.deterministic, ask)
    may_leave = ask.may_resume and not (ask.is_yielding or ask.is_pausing)
    check("freed a row that must not leave", may_leave and ask.rank == LOWEST, ask)
    if len(life.given) < book.rows:
        making_room.asked(record, book, ask)
        ask.is_yielding, ask.is_by_hand, ask.is_for_class = True, False, True
        return
    check("freed too early", run_s(record, life, ask) >= -EPSILON_S, ask)
    latest = max(ripe(record, life, EPSILON_S), key=lambda one: (one.given_at, one.key or 0))
    check("freed another than the latest", latest is ask, f"{ask}: {latest}")
    ask.is_yielding, ask.is_by_hand, ask.is_for_class = True, False, True
    check("freed too many", _leaving(life) <= _wanting(record, book), ask)
    record.count("paused for a class")


def look(record: Record) -> None:
    """Nobody of the highest class waits for a row, or for memory, while rows could be freed."""
    making_room.look(record)
    for book in record.books.values():
        life = book.life
        if not book.serves or life is None or life.unlinked_at is not None:
            continue
        if book.suspicion.turns_are_taken or life.launch.deterministic:
            continue
        if len(life.given) < book.rows:
            making_room.missed(record, book, life)
        elif ripe(record, life, -TICK_S):
            is_fair = _wanting(record, book) <= _leaving(life)
            check("no row is freed", is_fair, f"{book.name} {[str(a) for a in book.queue]}")


def _leaving(life: Life) -> int:
    """Rows that are on their way out."""
    rows = life.given.values()
    return sum(not ask.is_open or ask.is_yielding or ask.is_pausing for ask in rows)


def _wanting(record: Record, book: Book) -> int:
    """How many of the highest class could start if there were rows."""
    count = 0
    for account in {ask.account for ask in book.queue}:
        waiting = sum(ask.rank == shares.HIGHEST and ask.account == account for ask in book.queue)
        count += min(waiting, shares.may_run_more(record, account, waiting))
    return count


def _is_turn_due(record: Record, book: Book, life: Life) -> bool:
    """Whether somebody certainly has to run alone now."""
    startable = shares.startable(record, book)
    ones = [*life.held(), *((ask.prompt.number, ask.tokens) for ask in startable)]
    return any(book.suspicion.is_there(number, tokens) for number, tokens in ones)


# ---------------------------------------------------------------- there and gone


def left(book: Book, life: Life, ask: Ask, state: RowState) -> None:
    """A row has left the batch, but not for good."""
    if state is RowState.KEPT:
        life.keeps = True
    elif ask.is_for_class and ask.gains_since is not None:
        life.keeps = False
    book.freed += ask.is_for_class


# ---------------------------------------------------------------- what they hear


def notified(
    record: Record, book: Book, ask: Ask, kind: NoticeKind, detail: dict[str, Any]
) -> None:
    """What a notice says of times and reasons."""
    if kind is NoticeKind.PAUSED:
        since = ask.paused_at
        is_class = detail["reason"] == "class"
        check("paused for another reason", is_class == ask.is_for_class, f"{ask}: {detail}")
    else:
        since = ask.placed_at
        expected_s = None
        if detail["reason"] == "rows" and book.cost_s is not None:
            expected_s = detail["position"] * max(book.cost_s, SHORTEST_S)
        if ask.rank != shares.HIGHEST:
            said = detail.get("expected_s")
            check("another wait expected", _are_alike(said, expected_s), f"{ask}: {detail}")
    assert since is not None
    check("since when", _are_alike(detail["since_s"], record.now - since), f"{ask}: {detail}")
    check("told where it runs", ask.place in (Place.LINE, Place.PAUSED), ask)


def _are_alike(said: float | None, true: float | None) -> bool:
    if said is None or true is None:
        return said is true
    return abs(said - true) < EPSILON_S
