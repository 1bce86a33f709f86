"""The memory of a played worker's rows: it keeps to budgets exactly as a worker does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from mlxsup.protocol.cache_cost import cache_bytes
from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import Priority
from mlxsup.protocol.worker_messages import SetBudget
from mlxsup.worker.engine import Engine, EngineBytes
from mlxsup.worker.row_memory import RowMemory

if TYPE_CHECKING:
    from .rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A row as the memory of a worker sees it."""

    key: RequestKey
    tokens: int
    priority: Priority
    may_leave: bool


class _KeepsNothing:
    """What is kept of paused rows takes nothing here."""

    def bytes_held(self) -> EngineBytes:
        """Memory as the engine counts it."""
        return EngineBytes()

    def give_back(self) -> None:
        """There is nothing to give back."""

    def bound_rows(self, rows_bytes: int) -> None:
        """It takes nothing besides."""

    def free_kept(self, spared: RequestKey | None = None) -> None:
        """There is nothing to free."""


class PlayedMemory:
    """Of one worker.

    Args:
        layers: what a row takes; empty: nothing, and there is no budget.
    """

    def __init__(self, layers: tuple[CacheLayers, ...]) -> None:
        self._layers = layers
        self._memory = RowMemory(cast(Engine, _KeepsNothing()), layers)

    @property
    def budget(self) -> int:
        """The number of the budget that the rows keep to."""
        return self._memory.budget

    def heard(self, message: SetBudget) -> None:
        """The supervisor has set another budget."""
        self._memory.heard(message)

    def leaving(self, rows: Iterable[Row]) -> list[RequestKey]:
        """Who must leave now."""
        return self._memory.leaving([_place(row) for row in rows])

    def has_room(self, row: Row, rows: Iterable[Row]) -> bool:
        """Whether a row may join the others."""
        return self._memory.has_room(_place(row), [_place(one) for one in rows])

    def taken_bytes(self, rows: Iterable[Row]) -> int:
        """What the rows take."""
        lengths = [_place(row).tokens for row in rows]
        return cache_bytes(self._layers, rows=len(lengths), longest=max(lengths, default=0))


def _place(row: Row) -> _Place:
    assert row.acceptance is not None
    tokens = len(row.acceptance.prompt_tokens) // 4 + row.count
    return _Place(key=row.key, tokens=tokens, priority=row.priority, may_leave=row.may_leave)
