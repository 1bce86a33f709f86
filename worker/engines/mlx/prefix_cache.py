"""What earlier requests have computed of a prompt, kept for later ones with the same prefix.

Everything here belongs to the thread that owns the engine.

Copies share their arrays with the entry until one of both is written to. What mlx-lm extracts from
a batch of states is copied down before it is counted, because the view would keep the whole batch
alive.

Rows that were set aside are kept apart, for themselves alone: such a state goes when the supervisor
says so, when its row returns, or with the process. Text, grammar and draws are replayed from the
delivered ids, as after a crash.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import psutil
from mlx_lm.models.cache import make_prompt_cache

from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.launch import LaunchSpec

from ...engine import EngineFacts, Row
from .caches import can_cut, compact, cut, row_bytes, tokens_that_can_be_cut
from .checkpoints import plan_checkpoints
from .loader import iterate_arrays
from .prefix_index import BYTES_PER_TOKEN, Node, PrefixIndex, Tokens, as_tokens

FREE_SHARE = 10
"""Divides the free memory: the cache gets one part, if a row of the whole context needs no more."""

MOST_SHARE = 2
"""Divides the free memory: the cache never gets more than one part, whatever a row needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRoom:
    """What a prefix cache needs to know of a model and its machine.

    Attributes:
        max_bytes: the most to keep; 0: nothing.
        row_tokens: the longest row that is kept whole; at most the context.
        cuttable_tokens: up to this length a row's cache can be cut back; None: at any length.
    """

    max_bytes: int = 0
    row_tokens: int = 0
    cuttable_tokens: int | None = None


def find_room(
    model: Any, layers: Sequence[CacheLayers], spec: LaunchSpec, facts: EngineFacts
) -> PrefixRoom:
    """Return the room for prefixes of a model that is loaded and has run.

    Args:
        model: loaded.
        layers: what they keep.
        spec: the worker's launch spec.
        facts: of the load.
    """
    # Cached prefixes were computed in other chunks.
    if spec.deterministic or spec.prefix_cache_bytes == 0:
        return PrefixRoom()
    max_bytes = spec.prefix_cache_bytes
    if max_bytes is None:
        max_bytes = automatic_bytes(
            free_bytes=free_memory_bytes(facts.backend, spec.memory_limit_bytes),
            row_bytes=row_bytes(layers, facts.context_length),
        )
    return PrefixRoom(
        max_bytes=max_bytes,
        row_tokens=tokens_that_fit(max_bytes, layers, facts.context_length),
        cuttable_tokens=tokens_that_can_be_cut(make_prompt_cache(model)),
    )


def automatic_bytes(*, free_bytes: int, row_bytes: int) -> int:
    """Return a share of the free memory that holds at least one row, but not most of the memory."""
    return min(max(free_bytes // FREE_SHARE, row_bytes), free_bytes // MOST_SHARE)


def free_memory_bytes(backend: str, memory_limit_bytes: int | None) -> int:
    """Return the bytes that this process may still take, once the weights are loaded.

    Args:
        backend: `cpu`, `cuda` or `metal`; the latter's memory is the machine's.
        memory_limit_bytes: this process's limit; None: none.
    """
    if backend == "cuda":
        info = mx.device_info()
        free = int(info.get("free_memory", info.get("total_memory", 0)))
    else:
        free = psutil.virtual_memory().available
    if memory_limit_bytes is not None:
        free = min(free, memory_limit_bytes - mx.get_active_memory())
    return max(free, 0)


def tokens_that_fit(max_bytes: int, layers: Sequence[CacheLayers], context_length: int) -> int:
    """Return the tokens of the longest row that can be kept; at most the whole context."""
    fits, too_long = 0, context_length + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if row_bytes(layers, middle) <= max_bytes:
            fits = middle
        else:
            too_long = middle
    return fits


LEAST_TOKENS = 16
"""A shorter prefix is computed faster than it is looked up and copied."""

MAX_ENTRIES = 4096
"""The most entries: bytes are what counts, this bounds the bookkeeping of tiny entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the cache knows of a prompt.

    Attributes:
        cache: a copy for the row to continue with; None: nothing is known.
        count: how many tokens it holds.
        shared: how many of its first tokens are those of a kept sequence, whether or not a cache
            could be made of that one; at least `count`.
    """

    cache: list[Any] | None = None
    count: int = 0
    shared: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A kept cache.

    Attributes:
        cache: a layer each.
        array_bytes: of its arrays.
        is_cuttable: whether it can be cut back to any of its tokens.
    """

    cache: list[Any]
    array_bytes: int
    is_cuttable: bool


class PrefixCache:
    """The caches of ended rows by the tokens they hold; the least recently used one goes first.

    Attributes:
        room: how much memory it has for arrays and ids; none at first.
    """

    def __init__(self, room: PrefixRoom | None = None) -> None:
        self.room = room or PrefixRoom()
        self._index: PrefixIndex[Entry] = PrefixIndex()
        self._used: OrderedDict[Node[Entry], None] = OrderedDict()  # the last used one at the end
        self._array_bytes = 0
        self._longest_cuttable = 0

    @property
    def held_bytes(self) -> int:
        """Return the bytes of the arrays and ids that it keeps."""
        return self._array_bytes + self._index.held_bytes

    def entries(self) -> list[Node[Entry]]:
        """Return its entries, the least recently used first."""
        return list(self._used)

    def __len__(self) -> int:
        return len(self._used)

    def find(self, tokens: Sequence[int] | Tokens) -> Found:
        """Return a copy of the cache of the longest known prefix.

        Never of all tokens: the last one must be computed, because its logits are needed.
        """
        if not self._used or len(tokens) <= LEAST_TOKENS:
            return Found()
        path = self._index.path(as_tokens(tokens)[:-1])
        shared = path[-1][1]
        came_from: Node[Entry] | None = None
        for node, matched in reversed(path):
            if matched < LEAST_TOKENS:
                break
            source = self._source(node, matched, besides=came_from)
            if source is not None:
                return Found(cache=self._copy(source, matched), count=matched, shared=shared)
            came_from = node
        return Found(shared=shared)

    def _source(
        self, node: Node[Entry], matched: int, *, besides: Node[Entry] | None
    ) -> Node[Entry] | None:
        """Return an entry that holds that many tokens of the path, or can be cut back to them."""
        if node.value is not None and node.end == matched:
            return node
        below = self._index.below(node, besides=besides, longest=self._longest_cuttable)
        return next((n for n in below if n.value is not None and n.value.is_cuttable), None)

    def _copy(self, node: Node[Entry], count: int) -> list[Any]:
        assert node.value is not None
        self._used.move_to_end(node)
        # The arrays are not copied here, but by whoever writes to them first.
        cache = copy.deepcopy(node.value.cache)
        if count < node.end:
            cut(cache, node.end - count)
        return cache

    def plan_checkpoints(self, row: Row, found: Found) -> tuple[int, ...]:
        """Return the numbers of a row's tokens after which its cache must be kept, before its end.

        Return none if the cache at its end can be cut back to any of its tokens.
        """
        ends_at = len(row.tokens) + row.max_tokens
        cuttable = self.room.cuttable_tokens
        if not self.room.max_bytes or cuttable is None or ends_at < cuttable:
            return ()
        return plan_checkpoints(
            row.checkpoints,
            known=found.count,
            shared=found.shared,
            prompt_tokens=len(row.tokens),
        )

    def keep(self, tokens: Sequence[int], cache: list[Any]) -> None:
        """Takes over the cache of these tokens; nobody else may use it from now on.

        One that is larger than all that may be kept is cut back to what fits, if it can be.
        """
        if not self.room.max_bytes or len(tokens) < LEAST_TOKENS:
            return
        ids = as_tokens(tokens)
        is_cuttable = can_cut(cache)
        compact(cache)
        size = _bytes_of(cache)
        if size + BYTES_PER_TOKEN * len(ids) > self.room.max_bytes:
            fitting = self._fitting(size, len(ids)) if is_cuttable else 0
            if fitting < LEAST_TOKENS:
                return
            cut(cache, len(ids) - fitting)
            compact(cache)
            ids, size = ids[:fitting], _bytes_of(cache)
        if self._knows(ids):
            return
        _evaluate_soon(cache)
        self._add(ids, Entry(cache=cache, array_bytes=size, is_cuttable=is_cuttable))

    def _fitting(self, size: int, count: int) -> int:
        return self.room.max_bytes * count // (size + BYTES_PER_TOKEN * count)

    def _knows(self, ids: Tokens) -> bool:
        """True if an existing entry can do all that these tokens could; it then counts as used."""
        node, matched = self._index.path(ids)[-1]
        source = self._source(node, matched, besides=None) if matched == len(ids) else None
        if source is None:
            return False
        self._used.move_to_end(source)
        return True

    def _add(self, ids: Tokens, entry: Entry) -> None:
        if entry.is_cuttable:
            # What it begins with can be cut from it.
            for node, matched in self._index.path(ids):
                if node.value is not None and node.end == matched:
                    self._drop(node)
            self._longest_cuttable = max(self._longest_cuttable, len(ids))
        self._used[self._index.add(ids, entry)] = None
        self._array_bytes += entry.array_bytes
        while self.held_bytes > self.room.max_bytes or len(self._used) > MAX_ENTRIES:
            self._drop(next(iter(self._used)))

    def _drop(self, node: Node[Entry]) -> None:
        assert node.value is not None
        self._array_bytes -= node.value.array_bytes
        del self._used[node]
        self._index.remove(node)

    def clear(self) -> None:
        """Frees everything."""
        # One by one: the tree's nodes refer to each other, so that only a garbage collection would
        # find the caches of a tree that was let go as a whole.
        for node in self.entries():
            self._drop(node)
        self._longest_cuttable = 0


def own_arrays(cache: list[Any]) -> int:
    """Makes a row's cache hold its own arrays and nothing of its batch's; returns their bytes."""
    compact(cache)
    _evaluate_soon(cache)
    return _bytes_of(cache)


def _evaluate_soon(cache: list[Any]) -> None:
    """Without this the arrays would hold on to those of the whole batch."""
    evaluate_soon: Any = mx.async_eval
    evaluate_soon(list(iterate_arrays(cache)))


def _bytes_of(cache: list[Any]) -> int:
    return sum(int(array.nbytes) for array in iterate_arrays(cache))


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """What one row had computed.

    Attributes:
        cache: a layer each.
        tokens: those that it holds.
        size: bytes of both.
    """

    cache: list[Any]
    tokens: list[int]
    size: int


class KeptRows:
    """The caches of rows that will return, by their requests' keys.

    Unlike the prefix cache it forgets nothing by itself. Bounded by the supervisor, which says of
    each request that it returns or does not.
    """

    def __init__(self) -> None:
        self._states: dict[RequestKey, _State] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._states

    @property
    def held_bytes(self) -> int:
        """Return the bytes of the arrays and ids that it keeps."""
        return sum(state.size for state in self._states.values())

    def keep(self, key: RequestKey, cache: list[Any], tokens: list[int]) -> None:
        """Takes over the cache of a row; nobody else may use it from now on.

        Args:
            key: of the row's request.
            cache: of the row, on the current stream.
            tokens: what it holds.
        """
        size = own_arrays(cache) + BYTES_PER_TOKEN * len(tokens)
        self._states[key] = _State(cache=cache, tokens=tokens, size=size)

    def take(self, key: RequestKey, tokens: list[int]) -> Found | None:
        """Take the cache of a row that returns; None if none is kept, or not of these tokens.

        Args:
            key: of the row's request.
            tokens: the whole row's: at least one must be left to read.
        """
        state = self._states.pop(key, None)
        if state is None or len(state.tokens) >= len(tokens):
            return None
        count = len(state.tokens)
        if state.tokens != tokens[:count]:
            return None
        return Found(cache=state.cache, count=count, shared=count)

    def drop(self, *keys: RequestKey) -> None:
        """Frees what is kept of rows that do not return; unknown keys are ignored."""
        for key in keys:
            self._states.pop(key, None)

    def clear(self, *, spared: RequestKey | None = None) -> None:
        """Frees everything but the state of one request."""
        self.drop(*(key for key in list(self._states) if key != spared))
