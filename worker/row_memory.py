"""Which rows an engine has memory for: who joins the batch, and who leaves it.

What the rows take is computed, not measured: every row is padded to the longest, and a batch takes
the most while it grows (`protocol.cache_cost`). What does not fit leaves the batch, and its request
returns to the supervisor, which alone decides when it is dispatched again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from mlxsup.protocol.cache_cost import cache_bytes, joining_bytes, tokens_within
from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import Priority
from mlxsup.protocol.worker_messages import GiveBack, SetBudget

from .engine import Engine

CLASSES = tuple(Priority)

LONGEST = 1 << 30
"""No row has that many tokens."""


class Place(Protocol):
    """A row of the batch, or one that may join it."""

    @property
    def key(self) -> RequestKey:
        """Return the key of its request."""

    @property
    def tokens(self) -> int:
        """Return the number of tokens of its prompt, read or not, and of its answer so far."""

    @property
    def priority(self) -> Priority:
        """Return the class in which it was dispatched."""

    @property
    def may_leave(self) -> bool:
        """True if it may continue later; if not, it leaves last."""


def who_leaves(
    rows: Sequence[Place], layers: Sequence[CacheLayers], rows_bytes: int
) -> list[RequestKey]:
    """Return the rows that must leave for the others to fit, in this order.

    If one row is enough, it is one of the lowest class in which there is such a row; among equals
    the one that was served last. The last row of all leaves, too, if it does not fit alone.

    Args:
        rows: in the order in which they joined.
        layers: of the model.
        rows_bytes: what they may take.
    """
    staying, leaving = list(reversed(rows)), []
    while staying and _size(staying, layers) > rows_bytes:
        order = sorted(staying, key=_goes_last)
        enough = [
            one
            for one in order
            if _size([row for row in staying if row is not one], layers) <= rows_bytes
        ]
        one = (enough or order)[0]
        staying.remove(one)
        leaving.append(one.key)
    return leaving


def _goes_last(place: Place) -> tuple[bool, int]:
    return not place.may_leave, -CLASSES.index(place.priority)


def _size(rows: Sequence[Place], layers: Sequence[CacheLayers]) -> int:
    longest = max((row.tokens for row in rows), default=0)
    return cache_bytes(layers, rows=len(rows), longest=longest)


class RowMemory:
    """Keeps the rows of one engine to the budget that the supervisor sets.

    Attributes:
        budget: the number of the latest budget that the rows keep to; 0 before any was set.

    Args:
        engine: knows what is kept of paused rows, and frees it.
        layers: what the model's layers keep for each row.
    """

    def __init__(self, engine: Engine, layers: Sequence[CacheLayers]) -> None:
        self._engine = engine
        self._layers = layers
        self._latest: SetBudget | None = None
        self._known = (0, 0), 0  # ((rows, bytes), how long those rows may get)
        self._gives_back = False
        self.budget = 0

    def heard(self, message: SetBudget | GiveBack) -> None:
        """Take another budget from the supervisor, or its request for what is only kept for speed:
        `leaving` frees that, because rows that leave now may leave some behind."""
        if isinstance(message, GiveBack) or message.gives_back:
            self._gives_back = True
        if isinstance(message, SetBudget):
            self._latest = message
            self._engine.bound_rows(message.rows_bytes)

    def leaving(self, rows: Collection[Place]) -> list[RequestKey]:
        """Return the rows that have to leave now, each of which may have grown by a token since the
        last time; what is kept of paused rows goes before them.

        Args:
            rows: of the batch, in the order in which they joined; the caller makes those leave
                that are returned, so that the rows keep to the budget from now on.
        """
        if self._gives_back:
            self._gives_back = False
            self._engine.give_back()
        if self._latest is None:
            return []
        self.budget = self._latest.number
        if not rows or self._is_enough(rows, self._left_bytes()):
            return []
        self._engine.free_kept()
        return who_leaves(list(rows), self._layers, self._latest.rows_bytes)

    def has_room(self, place: Place, rows: Collection[Place]) -> bool:
        """True if a row may join; what is kept of other rows goes for it.

        Args:
            place: the row.
            rows: of the batch.
        """
        if self._latest is None:
            return True
        counts = [place.tokens, *(row.tokens for row in rows)]
        size = joining_bytes(self._layers, counts)
        if size <= self._left_bytes():
            return True
        if size > self._latest.rows_bytes:
            return False
        self._engine.free_kept(spared=place.key)  # its own becomes its row
        return True

    def _left_bytes(self) -> int:
        assert self._latest is not None
        return self._latest.rows_bytes - self._engine.bytes_held().kept

    def _is_enough(self, rows: Collection[Place], size_bytes: int) -> bool:
        longest = max([row.tokens for row in rows])
        case, most = self._known
        if case != (len(rows), size_bytes):  # it is the same from one step to the next
            case = len(rows), size_bytes
            most = tokens_within(size_bytes, self._layers, rows=len(rows), most=LONGEST)
            self._known = case, most
        return longest <= most
