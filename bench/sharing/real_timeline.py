"""Who was READY when, from the events of a daemon, and what the turns delivered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from mlxsup.client import AsyncClient
from mlxsup.client.async_streams import AsyncEventStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of a model's state, with the second at which it was heard of."""

    at_s: float
    model: str
    before: str
    after: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The time from READY until a swap, of one model.

    Attributes:
        model: that had it.
        ready_s: when it became READY.
        left_s: when it no longer was.
        tokens: how many of its tokens came meanwhile.
    """

    model: str
    ready_s: float
    left_s: float
    tokens: int = 0


def turns_of(changes: Sequence[Change], token_times: Mapping[str, Sequence[float]]) -> list[Turn]:
    """The turns that have ended, in the order of their ends.

    Args:
        changes: in order, of all models.
        token_times: when each token came, by model.
    """
    turns = []
    ready_s: dict[str, float] = {}
    for change in changes:
        if change.after == "READY":
            ready_s.setdefault(change.model, change.at_s)
        elif change.before == "READY" and change.model in ready_s:
            begin = ready_s.pop(change.model)
            times = token_times.get(change.model, ())
            tokens = sum(begin <= at <= change.at_s for at in times)
            turns.append(Turn(model=change.model, ready_s=begin, left_s=change.at_s, tokens=tokens))
    return turns


def whole_cycles(turns: Sequence[Turn]) -> list[Turn]:
    """The turns before the last one of the model that had the first: everybody had as many."""
    last = max(place for place, turn in enumerate(turns) if turn.model == turns[0].model)
    return list(turns[:last])


def imbalance(turns: Sequence[Turn], models: Sequence[str]) -> float:
    """How far a model's share of the READY seconds is from an equal one, at most, over that.

    Raises:
        ValueError: there was no turn.
    """
    if not turns:
        raise ValueError("there was no turn")
    ready = dict.fromkeys(models, 0.0)
    for turn in turns:
        ready[turn.model] += turn.left_s - turn.ready_s
    fair = sum(ready.values()) / len(ready)
    return max(abs(seconds - fair) for seconds in ready.values()) / fair


def idle_share(turns: Sequence[Turn]) -> float:
    """The part of the time, from the first READY to the last end, in which no model was READY."""
    begin, end = turns[0].ready_s, max(turn.left_s for turn in turns)
    idle_s, covered = 0.0, begin
    for turn in sorted(turns, key=lambda one: one.ready_s):
        idle_s += max(0.0, turn.ready_s - covered)
        covered = max(covered, turn.left_s)
    return idle_s / (end - begin)


def longest_gap_s(times: Sequence[float], begin_s: float, end_s: float) -> float:
    """The longest time without a token in a window, its edges included."""
    inside = sorted(at for at in times if begin_s <= at <= end_s)
    edges = [begin_s, *inside, end_s]
    return max(after - before for before, after in pairwise(edges))


@dataclass(slots=True)
class Timeline:
    """Hears of changes in the background; use as an asynchronous context manager.

    Attributes:
        changes: so far.
    """

    client: AsyncClient
    changes: list[Change] = field(default_factory=list)
    _stream: AsyncEventStream | None = None
    _hearing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Timeline:
        self._stream = self.client.events()
        self._hearing = asyncio.create_task(self._hear(self._stream))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._stream is not None
        assert self._hearing is not None
        self._stream.close()
        self._hearing.cancel()
        await asyncio.gather(self._hearing, return_exceptions=True)

    @property
    def swaps(self) -> int:
        """How many times a model had to go because another one wanted in."""
        return sum(c.before == "READY" and c.why == "swap" for c in self.changes)

    async def _hear(self, stream: AsyncEventStream) -> None:
        async for told in stream:
            self.changes.append(change_of(told, time.perf_counter()))


def change_of(told: Mapping[str, Any], at_s: float) -> Change:
    """What an event says."""
    return Change(
        at_s=at_s, model=told["model"], before=told["from"], after=told["to"], why=told["why"]
    )
