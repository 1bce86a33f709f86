"""What rows may take, as workers hear of it: never more than there is, nor less than is held."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxsup.protocol.worker_messages import SetBudget

from . import memory, pressure, room
from .books import Book, Life
from .violation import check

if TYPE_CHECKING:
    from .record import Record


def told(record: Record, book: Book, life: Life, message: SetBudget) -> None:
    """A worker hears what its rows may take."""
    before = life.budgets[-1] if life.budgets else None
    number = 1 if before is None else before.number + 1
    check("budgets are counted", message.number == number, f"{book.name}: {message}")
    check("a budget of no row", message.rows_bytes >= record.plan.row_bytes, message)
    life.budgets.append(message)
    if before is None or message.rows_bytes > before.rows_bytes:
        _raised(record, book, life)
        return
    if message.rows_bytes < before.rows_bytes:
        taken = room.taken_bytes(record, room.staying(life))
        is_enough = message.rows_bytes >= taken
        check("less than rows hold", is_enough, f"{book.name}: {message}, {taken}")
        record.count("a budget is lowered")
    if message.gives_back:
        is_for_others = any(memory.waits(other) for other in record.books.values())
        is_needed = is_for_others or pressure.is_over(record)
        check("gives back for nothing", is_needed, f"{book.name}: {message}")
        life.is_giving_back, life.says_it_gave_back = True, False
        record.count("rows give back")


def _raised(record: Record, book: Book, life: Life) -> None:
    before, book.held = book.held, room.reserved_for(record, book, life)
    if book.held <= before:
        return
    budget = record.plan.budget_bytes
    assert budget is not None
    total = memory.held_by_all(record) + record.spares.held(record)
    check("rows over the budget", total <= budget, f"{book.name}: {total} of {budget}")
    most = record.shortage.room
    check("rows over the room", total <= max(most, 0), f"{book.name}: {total} of {most}")
    record.count("a budget is raised")
