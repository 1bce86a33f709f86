"""The memory that one model needs, in bytes, and how far its figures can be trusted.

Of a model one row of 4,096 tokens is reserved and not the whole context, which few requests come
near: reserving that would refuse combinations of models that serve well. A need is more than it was
appraised at if processes of the model run out of memory. That never keeps out a model that fits as
it was appraised: it is cut to what the budget has next to the pinned models.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from mlxsup.protocol.cache_cost import GROWTH_TOKENS, cache_bytes, tokens_within
from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.tasks import Task
from mlxsup.protocol.text import listed, size_text

if TYPE_CHECKING:
    from mlxsup.protocol.worker_messages import Ready


class Source(StrEnum):
    """The source of a figure."""

    MEASURED = "measured"
    """By a worker that had this model loaded."""
    ESTIMATED = "estimated"
    """From the files of the model, or a first guess."""
    GIVEN = "given"
    """By the configuration, or by convention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A size, and how far it can be trusted.

    Attributes:
        source: where it comes from.
    """

    size_bytes: int
    source: Source


SPARE_SHARE = 4
"""A process that was measured may take a quarter more the next time; one that was only guessed at
may take twice as much. A size that a hint names allows for both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The memory that one model needs. A row is a request that runs; a batch pads its rows to the
    longest.

    Attributes:
        weights: the model's arrays.
        own: what its process takes besides: interpreter, libraries, the device's context.
        layers: what its layers keep for each row.
        layers_source: where that comes from.
        remark: why the caches may differ from the estimate, a sentence; empty if nothing is known.
        context_tokens: a row has at most this many tokens.
        least_tokens: memory is reserved for a row of at least this many tokens.
        max_rows: rows that run at the same time, at most.
        task: what it is for, as its files say.
        takes_pictures: true if its files say that it does.
        given_bytes: what the entry's `memory` allows it; None: what it needs is up to the planner.
        raised_bytes: how much more is reserved for it, because its processes ran out of memory.
        most_bytes: being raised takes it no further than that; None: nothing limits it.
    """

    weights: Figure
    own: Figure
    layers: tuple[CacheLayers, ...]
    layers_source: Source
    context_tokens: int
    least_tokens: int
    max_rows: int
    task: Task = Task.GENERATE
    takes_pictures: bool = False
    remark: str = ""
    given_bytes: int | None = None
    raised_bytes: int = 0
    most_bytes: int | None = None

    @property
    def fixed_bytes(self) -> int:
        """Return what it takes before any request runs."""
        return self.weights.size_bytes + self.own.size_bytes

    @property
    def needed_bytes(self) -> int:
        """Return what must be free before it is loaded: one row of `least_tokens`, or what is
        given."""
        return self.needed_for(0)

    @property
    def unraised_bytes(self) -> int:
        """Return what it would need if no process of it had ever run out of memory."""
        return self.needed_bytes - self.raise_for(0)

    def needed_for(self, stream_tokens: int) -> int:
        """Return what must be free before it is loaded if an answer that has begun is that long."""
        if self.given_bytes is not None:
            return self.given_bytes
        return self._unraised_for(stream_tokens) + self.raise_for(stream_tokens)

    def raise_for(self, stream_tokens: int) -> int:
        """Return how much of `needed_for` is there because its processes ran out of memory."""
        if self.given_bytes is not None:
            return 0
        if self.most_bytes is None:
            return self.raised_bytes
        room_bytes = self.most_bytes - self._unraised_for(stream_tokens)
        return max(0, min(self.raised_bytes, room_bytes))

    @property
    def wanted_bytes(self) -> int:
        """Return what it takes at most: all of its rows, each of the whole context."""
        longest = self.context_tokens
        size_bytes = self.bytes_for(rows=self.max_rows, longest=longest)
        return self._limited(size_bytes + self.raise_for(longest))

    @property
    def is_measured(self) -> bool:
        """True if nothing that `needed_bytes` rests on is an estimate."""
        if self.given_bytes is not None:
            return True
        sources = (self.weights.source, self.own.source, self.layers_source)
        return Source.ESTIMATED not in sources

    def bytes_for(self, *, rows: int, longest: int) -> int:
        """Return what it takes with that many rows, the longest of them of that many tokens."""
        return self.fixed_bytes + cache_bytes(self.layers, rows=rows, longest=longest)

    def tokens_in(self, size_bytes: int, *, rows: int = 1) -> int:
        """Return the longest context that rows can have in so much memory, weights and all; 0:
        none."""
        room = size_bytes - self.fixed_bytes
        return tokens_within(room, self.layers, rows=rows, most=self.context_tokens)

    def rows_in(self, size_bytes: int, *, longest: int) -> int:
        """Return how many rows of that length it has memory for, at most `max_rows`; 0: none."""
        room = size_bytes - self.fixed_bytes - self.raise_for(longest)
        if longest == 0 or room < 0:
            return 0
        one = cache_bytes(self.layers, rows=1, longest=longest)
        return self.max_rows if one == 0 else min(self.max_rows, room // one)

    def loaded_problem(self, ready: Ready) -> str:
        """Return what is wrong with the `memory` of the entry now that a worker has loaded it, a
        clause; empty if it is enough, or if the entry gives none.

        Args:
            ready: what the worker has measured; its process counts as there if it cannot measure
                that.
        """
        own = replace(self.own, source=Source.GIVEN)
        if ready.own_bytes is not None:
            own = Figure(size_bytes=ready.own_bytes, source=Source.MEASURED)
        weights = Figure(size_bytes=ready.active_bytes, source=Source.MEASURED)
        layers = tuple(ready.cache_layers)
        return replace(self, weights=weights, own=own, layers=layers, remark="").known_problem()

    def known_problem(self, *, is_measured_again: bool = False) -> str:
        """Return the same as `loaded_problem`, before a load. An estimate of the process may be too high, so it refuses
        nothing, but a hint allows for it.

        Args:
            is_measured_again: leaves out what was measured of its process, which differs a little
                from one load to the next.
        """
        if self.given_bytes is None:
            return ""
        longest = min(GROWTH_TOKENS, self.context_tokens)
        row_bytes = cache_bytes(self.layers, rows=1, longest=longest)
        own_bytes, source = self.own.size_bytes, self.own.source
        left_out = {Source.ESTIMATED, Source.MEASURED} if is_measured_again else {Source.ESTIMATED}
        least_bytes = self.weights.size_bytes
        least_bytes += 0 if source in left_out else own_bytes
        least_bytes += 0 if self.remark else row_bytes
        if self.given_bytes >= least_bytes:
            return ""
        spare_bytes = {
            Source.GIVEN: 0,
            Source.MEASURED: own_bytes // SPARE_SHARE,
            Source.ESTIMATED: own_bytes,
        }[source]
        about = "about " if source is Source.ESTIMATED else ""
        parts = {
            "its weights": (self.weights.size_bytes, ""),
            "its process": (own_bytes, about),
            "a short request": (row_bytes, ""),
        }
        takes = [
            f"{word}{size_text(size)} for {what}" for what, (size, word) in parts.items() if size
        ]
        enough_bytes = sum(size for size, _ in parts.values()) + spare_bytes
        return (
            f"its memory is {size_text(self.given_bytes)}, but it needs at least "
            f'{" + ".join(takes)}; set memory to "{size_text(enough_bytes)}" or more, or to "auto"'
        )

    def _unraised_for(self, stream_tokens: int) -> int:
        longest = max(self.least_tokens, min(stream_tokens, self.context_tokens))
        return self.bytes_for(rows=1, longest=longest)

    def _limited(self, size_bytes: int) -> int:
        return size_bytes if self.given_bytes is None else self.given_bytes


LEAST_SHARE = 10
"""An estimate is raised by at least a tenth of what it says besides the weights: they are known,
and what a process held when it died was last measured up to a second before."""


def raised(need: Need, *, planned_bytes: int, held_bytes: int) -> Need:
    """Return the need of a model once a process of it has run out of memory.

    It is higher by what that process held beyond the plan, and at least by a fixed share. It stays
    the same if the entry gives the memory, and if it is all that there may be.

    Args:
        planned_bytes: what the process was to hold at most.
        held_bytes: what it was last measured at, without what it kept for reuse.
    """
    besides_bytes = need.needed_bytes - need.weights.size_bytes
    more_bytes = max(held_bytes - planned_bytes, besides_bytes // LEAST_SHARE)
    higher = replace(need, raised_bytes=need.raised_bytes + more_bytes)
    # What has no effect is not remembered, nor is anything forgotten that has none at the moment.
    return replace(need, raised_bytes=max(need.raised_bytes, higher.raise_for(0)))


def bounded(
    needs: Mapping[ModelName, Need], pinned: Collection[ModelName], budget_bytes: int
) -> dict[ModelName, Need]:
    """Return the needs, each raised no further than it fits into the budget next to the pinned
    models. A model that fits as it was appraised still fits after any of them was raised.

    Args:
        needs: of the models, in the order of the configuration.
        pinned: the models that always hold what they need.
        budget_bytes: what all models may take together.
    """
    found = {}
    fixed_bytes = sum(need.unraised_bytes for name, need in needs.items() if name in pinned)
    left_bytes = budget_bytes - fixed_bytes
    others = (need.unraised_bytes for name, need in needs.items() if name not in pinned)
    largest_bytes = max((size for size in others if size <= left_bytes), default=0)
    for name, need in needs.items():
        if name in pinned:
            more_bytes = max(0, left_bytes - largest_bytes)
            found[name] = replace(need, most_bytes=need.unraised_bytes + more_bytes)
            left_bytes -= found[name].raise_for(0)
    for name, need in needs.items():
        if name not in pinned:
            found[name] = replace(need, most_bytes=max(0, left_bytes))
    return {name: found[name] for name in needs}


def pins_problem(pinned: Mapping[ModelName, int], budget_bytes: int) -> str:
    """Return what is wrong with a configuration whose pinned models exceed the budget; empty if
    nothing.
    """
    total = sum(pinned.values())
    if total <= budget_bytes:
        return ""
    names = listed(f"{name} ({size_text(size)})" for name, size in pinned.items())
    return (
        f"the pinned models {names} need {size_text(total)} together, but the memory budget is "
        f"{size_text(budget_bytes)}; unpin one, or raise supervisor.memory_budget"
    )
