"""The oracle's own account of loads that ask for something else than what is configured, and of
how long models stay while they are idle."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING

from mlxsup.protocol.client_messages import Load
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.supervisor.core.actions import AppraiseLaunch
from mlxsup.supervisor.core.events import LaunchAppraised
from mlxsup.supervisor.core.memory.need import Need

from . import memory, wishes
from .asks import Ask
from .books import Book, Wanted
from .violation import check

if TYPE_CHECKING:
    from .plan import Plan
    from .record import Record

FOR_EVER = -1.0
SAYING_SHARE = 0.3
"""Of runs, those in which requests say how long their model stays."""

SAYS_S = (0.0, 0.0, 0.3, 3.0, FOR_EVER)
SENSIBLE_S: tuple[float | None, ...] = (None, None, 0.3, 3.0, FOR_EVER)
SENSELESS_S: tuple[float | None, ...] = (0.0, -2.0, math.inf)
LENGTHS: tuple[int | None, ...] = (None, None, 0, 600, 1150)
TOO_LONG_SHARE = 0.3
"""Of runs with a memory budget, those in which the longest of these needs more than that."""

SENSELESS_LENGTHS: tuple[int | None, ...] = (-1, 10**12)

Key = tuple[bytes, str]


class Saying:
    """Requests say how long their model stays, in some runs.

    Args:
        seed: of the run.
    """

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(f"keep_alive in {seed}")
        self._share = 0.3 if self._dice.random() < SAYING_SHARE else 0.0

    def ask_for(self, ask: Ask) -> None:
        """Nearly all requests say nothing."""
        if self._dice.random() < self._share:
            ask.keep_alive_s = self._dice.choice(SAYS_S)


def need_with(plan: Plan, need: Need, launch: LaunchSettings) -> Need:
    """What a model needs with that launch, if it needs this as it is configured; nothing but the
    longest context makes a difference."""
    is_longest = launch.context_length == max(length or 0 for length in LENGTHS)
    dice = random.Random(f"too long in {plan.seed}")
    if need.given_bytes is not None or not is_longest or dice.random() >= TOO_LONG_SHARE:
        return need
    assert plan.budget_bytes is not None
    weights = replace(need.weights, size_bytes=need.weights.size_bytes + plan.budget_bytes)
    return replace(need, weights=weights)


def stays_s(book: Book) -> float | None:
    """How long a model stays once it is idle, as was said last; None: for ever."""
    if book.keep_alive_s is None:
        return book.entry.idle_unload_s or None
    return None if book.keep_alive_s == FOR_EVER else book.keep_alive_s


class LoadOptions:
    """Loads that have asked for another context, or for what makes no sense."""

    def __init__(self) -> None:
        self._refused: set[Key] = set()
        self._unappraised: dict[Key, LaunchSettings] = {}
        self._at_rest: set[ModelName] = set()

    def asked(self, record: Record, book: Book, message: Load, connection: bytes) -> bool:
        """Somebody loads a model; returns whether that is done as it is configured."""
        key = connection, message.id
        if not _is_sensible(message):
            self._refused.add(key)
            record.count("a load refused for its options")
            return False
        if message.dry_run:
            return False
        book.keep_alive_s = message.keep_alive
        book.busy_at = record.now
        if message.context_length is None:
            return True
        launch = replace(book.entry.launch, context_length=message.context_length)
        if launch == book.entry.launch:
            return True
        self._unappraised[key] = launch
        return False

    def appraises(self, action: AppraiseLaunch) -> None:
        """The supervisor wants to know what a model needs with another launch."""
        launch = self._unappraised.pop((bytes(action.caller.connection), action.caller.id), None)
        check("appraised unasked", launch == action.launch, f"{action}, {launch}")

    def appraised(self, record: Record, event: LaunchAppraised) -> None:
        """From now on it is as if the file said so, until that is read again; unless it could never
        be loaded so: then it is refused, and nothing changes."""
        book = record.books.get(event.model)
        if book is None or book.wanted is Wanted.GONE or record.is_shutting_down:
            return
        if event.need is not None:
            if not memory.could_be_loaded(record, book, event.need.unraised_bytes):
                self._refused.add((bytes(event.caller.connection), event.caller.id))
                record.count("another context refused")
                return
            record.appraised.add(event.model)
        record.count("another context")
        book.suspicion.lift()
        length = event.launch.context_length
        launch = replace(book.entry.launch, context_length=length)
        wishes.reconfigured(record, book, replace(book.entry, launch=launch))
        book.callers.add((bytes(event.caller.connection), event.caller.id))
        wishes.up(record, book, by_user=True)

    def check_answer(self, connection: bytes, id: str) -> None:
        """A load is answered as done."""
        check("loaded as nobody may", (connection, id) not in self._refused, id)

    def fails(self, connection: bytes, id: str) -> None:
        """A command fails."""
        self._refused.discard((connection, id))

    def look(self, record: Record) -> None:
        """After an event: nothing is left to be refused, or to be appraised; and nothing that was
        said outlives the end of those who had the model loaded."""
        check("options not refused", not self._refused, self._refused)
        check("context not asked for", not self._unappraised, self._unappraised)
        books = record.books.values()
        at_rest = [book for book in books if book.life is None and book.wanted is not Wanted.UP]
        for book in at_rest:
            if book.name not in self._at_rest:
                book.keep_alive_s = None
        self._at_rest = {book.name for book in at_rest}


def _is_sensible(message: Load) -> bool:
    length, keep_s = message.context_length, message.keep_alive
    if message.dry_run:
        return length is None and keep_s is None
    is_kept = keep_s is None or keep_s == FOR_EVER or 0.001 <= keep_s < math.inf
    return is_kept and (length is None or 0 <= length <= 10**9)
