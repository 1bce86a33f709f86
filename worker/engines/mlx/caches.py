"""What the worker knows about mlx-lm's cache classes: sizes, copies, cutting back.

A copy (`copy.deepcopy`) shares its arrays' memory with the original until one of them is written
to; MLX then writes to separate memory. Sharing the array objects themselves would not work:
assigning to a slice of one changes it for everybody who holds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    can_trim_prompt_cache,
    make_prompt_cache,
    trim_prompt_cache,
)

from mlxsup.protocol.cache_layers import CacheLayers

GROWTH_TOKENS = (512, 1024)
"""Lengths of the rows that show how a cache of an unknown class grows."""


class RopePositions:
    """The last layer of a row's cache, or of a batch's, where positions have three directions
    (M-RoPE): where the next token of each row stands.

    Attributes:
        read: how many tokens of each row were read.
        deltas: how much further than that the next token stands.
    """

    def __init__(self, read: Sequence[int] = (0,), deltas: Sequence[int] = (0,)) -> None:
        self.read = list(read)
        self.deltas = list(deltas)
        self._padding: Sequence[int] = ()  # at the end of each row, of the tokens read

    def advance(self, tokens: int) -> mx.array:
        """Return the positions (3, rows, tokens) of each row's next tokens, which are read now."""
        begins = [sum(pair) for pair in zip(self.read, self.deltas, strict=True)]
        self.read = [count + tokens for count in self.read]
        each = np.array(begins, dtype=np.int32)[:, None] + np.arange(tokens, dtype=np.int32)
        return mx.array(np.broadcast_to(each, (3, *each.shape)))

    @property
    def state(self) -> list[Any]:
        """Return its arrays: none."""
        return []

    @property
    def nbytes(self) -> int:
        """Return the size of its arrays."""
        return 0

    def empty(self) -> bool:
        """Return True: it keeps nothing of the tokens."""
        return True

    def is_trimmable(self) -> bool:
        """Return True: it can be cut back."""
        return True

    def trim(self, tokens: int) -> int:
        """Take the last tokens off."""
        self.read = [count - tokens for count in self.read]
        return tokens

    def prepare(
        self, *, lengths: Sequence[int] | None = None, right_padding: Sequence[int]
    ) -> None:
        """Note the padding at the end of each row, which `finalize` takes off."""
        self._padding = right_padding

    def finalize(self) -> None:
        """Take the padding off that `prepare` was told of."""
        self.read = [count - n for count, n in zip(self.read, self._padding, strict=True)]
        self._padding = ()

    @classmethod
    def merge(cls, rows: Sequence[RopePositions]) -> RopePositions:
        """Return the layer of a batch of these rows."""
        return cls([n for row in rows for n in row.read], [n for row in rows for n in row.deltas])

    def filter(self, places: Sequence[int]) -> None:
        """Keep these rows."""
        self.read = [self.read[place] for place in places]
        self.deltas = [self.deltas[place] for place in places]

    def extend(self, other: RopePositions) -> None:
        """Add the rows of another batch."""
        self.read += other.read
        self.deltas += other.deltas

    def extract(self, place: int) -> RopePositions:
        """Return the layer of one row."""
        return RopePositions([self.read[place]], [self.deltas[place]])


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class _Kept:
    """What one layer keeps; as in `CacheLayers`, with 0 for no window."""

    token_bytes: int = 0
    row_bytes: int = 0
    window: int = 0


def layers_of(cache: Sequence[Any]) -> Iterator[Any]:
    """Every cache of a row, those inside a CacheList one by one."""
    for layer in cache:
        if isinstance(layer, CacheList):
            yield from layers_of(layer.caches)
        else:
            yield layer


def row_after(model: Any, tokens: int) -> list[Any]:
    """Return the caches of a row that has read so many tokens, on the current stream.

    Nothing is computed: their shapes are known without that.
    """
    cache: list[Any] = make_prompt_cache(model)
    model(mx.array([[0] * tokens]), cache=cache)
    return cache


def measure_layers(model: Any) -> tuple[CacheLayers, ...]:
    """Return the layers of a model by what they keep, in groups; those that keep nothing are left
    out.

    Args:
        model: loaded, or built lazily; nothing is computed.
    """
    kept = [_known(layer) for layer in layers_of(row_after(model, 1))]
    if None in kept:
        short, long = (list(layers_of(row_after(model, count))) for count in GROWTH_TOKENS)
        kept = [one or _growing(*pair) for one, *pair in zip(kept, short, long, strict=True)]
    groups = groupby(sorted(one for one in kept if one is not None and one != _Kept()))
    return tuple(
        CacheLayers(
            layers=len(list(equal)),
            token_bytes=one.token_bytes,
            row_bytes=one.row_bytes,
            window=one.window or None,
        )
        for one, equal in groups
    )


def _known(layer: Any) -> _Kept | None:
    """Return what a layer keeps by the class of its cache; None if the class is unknown.

    Args:
        layer: after the first token.
    """
    if layer.empty():
        return _Kept()
    match layer:
        case ArraysCache():
            return _Kept(row_bytes=int(layer.nbytes))
        case RotatingKVCache():
            return _Kept(token_bytes=_token_bytes(layer), window=int(layer.max_size))
        case ChunkedKVCache():
            return _Kept(token_bytes=_token_bytes(layer), window=int(layer.chunk_size))
        case KVCache() | QuantizedKVCache() | ConcatenateKVCache():
            return _Kept(token_bytes=_token_bytes(layer))
    return None


def _token_bytes(layer: Any) -> int:
    """Divide by the tokens that there is room for, which are more than those that were read."""
    keys = layer.keys[0] if isinstance(layer, QuantizedKVCache) else layer.keys
    return int(layer.nbytes) // int(keys.shape[2])


def _growing(short: Any, long: Any) -> _Kept:
    """Compare a cache after `GROWTH_TOKENS`: what grows is kept for each token, the rest once."""
    fewer, more = GROWTH_TOKENS
    token_bytes = max(0, int(long.nbytes) - int(short.nbytes)) // (more - fewer)
    return _Kept(token_bytes=token_bytes, row_bytes=int(short.nbytes) - fewer * token_bytes)


def can_cut(cache: Sequence[Any]) -> bool:
    """True if a row's cache can be cut back to any of its first tokens.

    A chunked window says that it can, but has dropped what a shorter prefix needs.
    """
    if any(isinstance(layer, ChunkedKVCache) for layer in layers_of(cache)):
        return False
    return bool(can_trim_prompt_cache(list(cache)))


def tokens_that_can_be_cut(fresh: Sequence[Any]) -> int | None:
    """Return the number of tokens that a row may have while its cache can be cut back; None: any
    number.

    Args:
        fresh: as `make_prompt_cache` gives it.
    """
    if not can_cut(fresh):
        return 0
    windows = [layer.max_size for layer in layers_of(fresh) if isinstance(layer, RotatingKVCache)]
    return min(windows, default=None)


def row_bytes(layers: Sequence[CacheLayers], tokens: int) -> int:
    """Return the bytes that a row of that many tokens takes, without room to grow."""
    return sum(
        part.layers * (part.row_bytes + part.token_bytes * min(tokens, part.window or tokens))
        for part in layers
    )


def cut(cache: list[Any], drop: int) -> None:
    """Takes the last tokens off a cache that `can_cut`, in place."""
    trim_prompt_cache(cache, drop)
    _drop_unused(cache)


def compact(cache: list[Any]) -> None:
    """Makes a cache hold no more memory than its arrays' sizes say, in place.

    What mlx-lm extracts from a batch of state-space rows is a view of the whole batch, and a
    sliding window that it extracts may be longer than the window by a chunk.
    """
    _drop_unused(cache)
    for layer in layers_of(cache):
        if isinstance(layer, ArraysCache):
            layer.cache = [None if a is None else mx.contiguous(a) for a in layer.cache]
        elif isinstance(layer, KVCache | RotatingKVCache) and layer.keys is not None:
            layer.keys, layer.values = mx.contiguous(layer.keys), mx.contiguous(layer.values)


MOST_PADDING = 16
"""Places before the longest row that caches may waste: taking them out copies the caches."""


def cut_back(cache: Sequence[Any], extra: Sequence[int], longest: int) -> None:
    """Cut the last tokens off a batch's cache, so many of each row.

    Args:
        cache: of layers that can be cut.
        extra: of each row.
        longest: how many tokens the longest row has left.
    """
    least = min(extra)
    padding = [count - least for count in extra]
    for layer in cache:
        layer.trim(least)
        if any(padding):
            layer.prepare(right_padding=padding)
            layer.finalize()
    if any(padding):
        mx.eval([layer.state for layer in cache])
    # A row that is cut back more than others has more padding before it: all have too much, if the
    # longest one is such a row again and again.
    if any(padding) and cache[0].size() - longest >= MOST_PADDING:
        for layer in cache:
            layer.filter(list(range(len(extra))))


def _drop_unused(cache: Sequence[Any]) -> None:
    for layer in layers_of(cache):
        if not isinstance(layer, KVCache | RotatingKVCache) or layer.keys is None:
            continue
        first, last = 0, layer.offset
        if isinstance(layer, RotatingKVCache):
            # Once it has begun to rotate, only it knows the order of its tokens.
            if layer.keep or layer._idx < min(layer.offset, layer.max_size):
                continue
            last = layer._idx
            first = max(0, last - layer.max_size)
            layer._idx = last - first
        if (first, last) != (0, layer.keys.shape[2]):
            layer.keys = layer.keys[..., first:last, :]
            layer.values = layer.values[..., first:last, :]
