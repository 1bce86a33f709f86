"""Played spare workers, and the oracle's own account of them: who is started, used, ended, why."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxsup.supervisor.core.actions import EndSpare, Spawn, StartSpare
from mlxsup.supervisor.core.events import SpareEnded, SpareReady

from . import loads, memory, pressure, room
from .books import Book, Wanted
from .estimates import need_of
from .links import Timeline
from .violation import check

if TYPE_CHECKING:
    from .plan import Plan
    from .record import Record

ENGINE = "mlx"
MOST_DELAY_S = 60.0
"""Within this time one that has died is replaced."""
EPSILON_S = 1e-6


@dataclass(slots=True)
class PlayedSpare:
    """One process.

    Attributes:
        number: as the core counts them.
        is_ready: it has imported everything.
        is_told: it was told to end.
    """

    number: int
    is_ready: bool = False
    is_told: bool = False


class PlayedSpares:
    """Processes that become ready after a while, or die, until somebody takes them over.

    Args:
        plan: of the run.
        time: when things happen.
        handle: hands an event to the core.
    """

    def __init__(
        self, plan: Plan, time: Timeline, handle: Callable[[SpareReady | SpareEnded], None]
    ) -> None:
        self._dice = random.Random(f"lives of spares of {plan.seed}")
        self._time, self._handle = time, handle
        self._living: set[int] = set()

    def obey(self, action: StartSpare | EndSpare) -> None:
        """What the shell does about it."""
        number = action.number
        if isinstance(action, EndSpare):
            self._time.after(self._dice.choice((0.001, 0.2)), lambda: self._ends(number))
            return
        self._living.add(number)
        fate, delay_s = self._dice.random(), self._dice.choice((0.05, 0.3, 2.0))
        if fate < 0.1:
            self._time.after(delay_s, lambda: self._ends(number))
            return
        self._time.after(delay_s, lambda: self._is_ready(number))
        if fate < 0.25:
            self._time.after(delay_s + self._dice.uniform(0.0, 4.0), lambda: self._ends(number))

    def taken(self, number: int) -> None:
        """It is a model's worker now."""
        self._living.discard(number)

    def _is_ready(self, number: int) -> None:
        if number in self._living:
            self._handle(SpareReady(now=self._time.now, number=number, pid=100_000 + number))

    def _ends(self, number: int) -> None:
        if number in self._living:
            self._living.remove(number)
            self._handle(SpareEnded(now=self._time.now, number=number))


class Spares:
    """The oracle's own account.

    Attributes:
        living: by number, all whose exit has not been seen and which are nobody's.
    """

    def __init__(self) -> None:
        self.living: dict[int, PlayedSpare] = {}
        self._died_at = -MOST_DELAY_S

    def held(self, record: Record) -> int:
        """What they hold of the budget."""
        return len(self.living) * record.plan.settings.spare_bytes

    def is_one_ending(self) -> bool:
        """Whether memory of theirs is being freed."""
        return any(spare.is_told for spare in self.living.values())

    # ------------------------------------------------------------ events

    def seen(self, record: Record, event: SpareReady | SpareEnded) -> None:
        """What became of one."""
        if isinstance(event, SpareReady):
            self.living[event.number].is_ready = True
        elif not self.living.pop(event.number).is_told:
            self._died_at = record.now
            record.count("spare died")

    # ------------------------------------------------------------ actions

    def check_start(self, record: Record, action: StartSpare) -> None:
        """One is started: there is use and room for it, and nothing that it would hold up."""
        settings = record.plan.settings
        self.living[action.number] = PlayedSpare(action.number)
        staying = [spare for spare in self.living.values() if not spare.is_told]
        check("too many spares", len(staying) <= self._wanted(record), len(staying))
        loading = [book.name for book in record.books.values() if loads.is_loading(book)]
        check("spare next to a load", not loading, loading)
        waiting = [book.name for book in record.books.values() if _waits_for_somebody(book)]
        check("spare before a model", not waiting, waiting)
        self._check_budget(record, "spare over the budget")
        soon = record.now < self._died_at + 1.0 - EPSILON_S
        check("spare without delay", not soon, f"died at {self._died_at}")
        record.count("spare started" if settings.budget is None else "spare started within budget")

    def check_end(self, record: Record, action: EndSpare) -> None:
        """One is ended: it is too many, or its memory is needed."""
        spare = self.living[action.number]
        check("spare ended again", not spare.is_told, action.number)
        staying = [one for one in self.living.values() if not one.is_told]
        is_surplus = len(staying) > self._wanted(record)
        waits = any(memory.waits(book) for book in record.books.values())
        is_short = not pressure.is_whole(record)
        is_needed = waits or is_short or self._is_over(record)
        is_needed = is_needed and record.plan.budget_bytes is not None
        check("spare ended for nothing", is_surplus or is_needed, action.number)
        spare.is_told = True
        record.count("spare made room" if is_needed else "spare too many")

    def check_spawn(self, record: Record, spawn: Spawn) -> None:
        """A load takes over one that waits, if there is one."""
        is_theirs = spawn.launch.engine == ENGINE
        fit = [one.number for one in self.living.values() if one.is_ready and not one.is_told]
        if not is_theirs or not fit:
            check("spare out of nothing", spawn.spare is None, spawn)
        else:
            check("spare not used", spawn.spare in fit, spawn)
            assert spawn.spare is not None
            del self.living[spawn.spare]
            record.count("spare used")
        budget = record.plan.budget_bytes
        if budget is not None:
            book = record.books[spawn.model]
            models = memory.held_by_others(record, book) + need_of(record, book)
            total = models + self.held(record)
            check("over the budget", total <= budget, f"{spawn.model}: {total} of {budget}")

    def look(self, record: Record) -> None:
        """One that is missing is started, once nothing is in the way; at the end there is none."""
        if record.is_shutting_down:
            staying = [spare.number for spare in self.living.values() if not spare.is_told]
            check("spare outlives the end", not staying, staying)
        missing = self._wanted(record) - len(self.living)
        if missing <= 0 or not all(spare.is_ready for spare in self.living.values()):
            return
        if self.is_one_ending() or record.now < self._died_at + MOST_DELAY_S:
            return
        if not pressure.is_whole(record):
            return
        books = record.books.values()
        if any(loads.is_loading(book) or memory.waits(book) for book in books):
            return
        check("spare is missing", not self._has_room(record), f"{missing} at {record.now}")

    # ------------------------------------------------------------ inside

    def _wanted(self, record: Record) -> int:
        engines = {book.entry.launch.engine for book in record.books.values()}
        is_of_use = ENGINE in engines and not record.is_shutting_down
        return record.plan.settings.spare_workers if is_of_use else 0

    def _has_room(self, record: Record) -> bool:
        budget = record.plan.budget_bytes
        more = record.plan.settings.spare_bytes
        return budget is None or self._most_held(record) + more <= budget

    def _is_over(self, record: Record) -> bool:
        budget = record.plan.budget_bytes
        return budget is not None and self._most_held(record) > budget

    def _most_held(self, record: Record) -> int:
        """As much as may be reserved, for models and spares."""
        models = memory.held_by_all(record) + memory.may_be_kept(record)
        raised = sum(room.raise_of(record, book) for book in record.books.values())
        return models + raised + self.held(record)

    def _check_budget(self, record: Record, name: str) -> None:
        budget = record.plan.budget_bytes
        if budget is not None:
            total = memory.held_by_all(record) + self.held(record)
            check(name, total <= budget, f"{total} of {budget}")


def _waits_for_somebody(book: Book) -> bool:
    return memory.waits(book) and book.wanted is Wanted.UP and memory.is_wanted_by_somebody(book)
