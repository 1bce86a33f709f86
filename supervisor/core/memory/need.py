"""What a model needs in memory: its weights, its process, and the caches of its rows.

One row of 4,096 tokens is reserved and not the whole context, which few requests come near:
reserving that would refuse combinations of models that serve well.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from mlxsup.protocol.cache_cost import cache_bytes, tokens_within
from mlxsup.protocol.cache_layers import CacheLayers


class Source(StrEnum):
    """Where a figure comes from."""

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
        size_bytes: the size.
        source: where it comes from.
    """

    size_bytes: int
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one model needs. A row is a request that runs; a batch pads its rows to the longest.

    Attributes:
        weights: the model's arrays.
        own: what its process takes besides: interpreter, libraries, the device's context.
        layers: what its layers keep for each row.
        layers_source: where that comes from.
        remark: why the caches may differ from the estimate, a sentence; empty if nothing is known.
        context_tokens: a row has at most this many tokens.
        least_tokens: memory is reserved for a row of at least this many tokens.
        max_rows: rows that run at the same time, at most.
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
    remark: str = ""
    given_bytes: int | None = None
    raised_bytes: int = 0
    most_bytes: int | None = None

    @property
    def fixed_bytes(self) -> int:
        """What it takes before any request runs."""
        return self.weights.size_bytes + self.own.size_bytes

    @property
    def needed_bytes(self) -> int:
        """What must be free before it is loaded: one row of `least_tokens`, or what is given."""
        return self.needed_for(0)

    @property
    def unraised_bytes(self) -> int:
        """What it would need if no process of it had ever run out of memory."""
        return self.needed_bytes - self.raise_for(0)

    def needed_for(self, stream_tokens: int) -> int:
        """What must be free before it is loaded if an answer that has begun is that long."""
        if self.given_bytes is not None:
            return self.given_bytes
        return self._unraised_for(stream_tokens) + self.raise_for(stream_tokens)

    def raise_for(self, stream_tokens: int) -> int:
        """How much of `needed_for` is there because its processes ran out of memory."""
        if self.given_bytes is not None:
            return 0
        if self.most_bytes is None:
            return self.raised_bytes
        room_bytes = self.most_bytes - self._unraised_for(stream_tokens)
        return max(0, min(self.raised_bytes, room_bytes))

    @property
    def whole_row_bytes(self) -> int:
        """What it takes with one row of the whole context, or what is given if that is less."""
        longest = self.context_tokens
        return self._limited(self.bytes_for(rows=1, longest=longest) + self.raise_for(longest))

    @property
    def wanted_bytes(self) -> int:
        """What it takes at most: all of its rows, each of the whole context."""
        longest = self.context_tokens
        size_bytes = self.bytes_for(rows=self.max_rows, longest=longest)
        return self._limited(size_bytes + self.raise_for(longest))

    @property
    def is_measured(self) -> bool:
        """Whether nothing that `needed_bytes` rests on is an estimate."""
        if self.given_bytes is not None:
            return True
        sources = (self.weights.source, self.own.source, self.layers_source)
        return Source.ESTIMATED not in sources

    def bytes_for(self, *, rows: int, longest: int) -> int:
        """What it takes with that many rows, the longest of them of that many tokens."""
        return self.fixed_bytes + cache_bytes(self.layers, rows=rows, longest=longest)

    def tokens_in(self, size_bytes: int, *, rows: int = 1) -> int:
        """The longest context that rows can have in so much memory, weights and all; 0: none."""
        room = size_bytes - self.fixed_bytes
        return tokens_within(room, self.layers, rows=rows, most=self.context_tokens)

    def rows_in(self, size_bytes: int, *, longest: int) -> int:
        """How many rows of that length it has memory for, at most `max_rows`; 0: none."""
        room = size_bytes - self.fixed_bytes - self.raise_for(longest)
        if longest == 0 or room < 0:
            return 0
        one = cache_bytes(self.layers, rows=1, longest=longest)
        return self.max_rows if one == 0 else min(self.max_rows, room // one)

    def _unraised_for(self, stream_tokens: int) -> int:
        longest = max(self.least_tokens, min(stream_tokens, self.context_tokens))
        return self.bytes_for(rows=1, longest=longest)

    def _limited(self, size_bytes: int) -> int:
        return size_bytes if self.given_bytes is None else self.given_bytes
