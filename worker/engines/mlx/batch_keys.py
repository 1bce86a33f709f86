"""Keys and values of a batch, and the mask that a pass over it needs.

A mask of true and false is dear on a GPU, and most passes need none: prompts that are read from
their beginning, or one row by itself, see all tokens before theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache, dynamic_roll

from .decode_attention import attention_in_use
from .shapes import padded_keys, round_up


class RowCounts:
    """Numbers of each row, of which all layers of a pass use the same array."""

    def __init__(self) -> None:
        self._padding: tuple[int, ...] | None = None
        self._places: tuple[int, tuple[int, ...]] | None = None

    def padding(self, each: tuple[int, ...]) -> mx.array:
        """Return the padding of each row (rows,)."""
        if self._padding != each:
            self._padding, self._padding_array = each, mx.array(each)
        return self._padding_array

    def places(self, end: int, padding: tuple[int, ...]) -> mx.array:
        """Return the place of each row's next token (rows,), which is `end` in the batch."""
        if self._places != (end, padding):
            self._places = (end, padding)
            self._places_array = mx.array([end - left for left in padding])
        return self._places_array


class BatchKeys(BatchKVCache):  # type: ignore[misc]
    """Keys and values of a batch, as mlx-lm's class has them, and the cheapest mask that is right
    for a pass.

    A mask of true and false is dear on a GPU: an 8B model on an H200 reads 2,048 tokens behind
    30,720 in 1,000 ms with one, in 145 ms with a mask that is added to the scores, and in 95 ms if
    it is only told that attention is causal. One row decodes in 8 ms without a mask, in 13 to 17
    with it.

    Where each row begins is known here, and not only to the device: mlx-lm's class asks the device
    in every layer when a row joins or leaves, and moves an offset in every layer with each token.

    Attributes:
        padding: how many places are empty on the left of each row.
        pads: whether a pass of several tokens looks at as many keys as `padded_keys` says.

    Args:
        padding: see the attribute.
        pads: likewise.
        counts: shared by the layers of a batch; None: its own.
    """

    keys: Any
    values: Any
    _idx: int

    def __init__(
        self, padding: Sequence[int], *, pads: bool = False, counts: RowCounts | None = None
    ) -> None:
        self.keys = None
        self.values = None
        self._idx = 0
        self.padding = tuple(padding)
        self.pads = pads
        self._counts = counts or RowCounts()
        self._right_padding: Sequence[int] | None = None  # of each row, until `finalize`

    def take_over(self, cache: BatchKVCache) -> None:
        """Take the arrays of a cache that has the same rows."""
        self.keys, self.values, _, _, self._idx = cache.state

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchKeys:
        """Return a batch of these rows."""
        held = [cache.size() for cache in caches]
        merged = cls([max(held) - count for count in held])
        merged.take_over(BatchKVCache.merge(caches))
        return merged

    @property
    def is_even(self) -> bool:
        """True if no row is padded on the left, so a mask would hide nothing but the future."""
        return not any(self.padding)

    @property
    def offset(self) -> mx.array:
        """Return the place of each row's next token (rows,); not to be written to."""
        return self._counts.places(self._idx, self.padding)

    @offset.setter
    def offset(self, value: mx.array) -> None:
        """Do nothing: models of mlx-vlm, which set it, set the padding as well."""

    @property
    def left_padding(self) -> mx.array:
        """Return `padding` (rows,); not to be written to."""
        return self._counts.padding(self.padding)

    @left_padding.setter
    def left_padding(self, value: mx.array) -> None:
        self.padding = tuple(value.tolist())  # type: ignore[arg-type]

    @property
    def state(self) -> tuple[Any, Any]:
        """Return its arrays."""
        return self.keys, self.values

    def trim(self, n: int) -> int:
        """Take the last tokens of each row off; return how many."""
        n = min(self._idx, n)
        self._idx -= n
        return n

    def prepare(
        self, *, lengths: Sequence[int] | None = None, right_padding: Sequence[int]
    ) -> None:
        """Note the padding at the end of each row, which `finalize` moves to its beginning."""
        self._right_padding = right_padding

    def finalize(self) -> None:
        """Move the padding that `prepare` was told of."""
        right, self._right_padding = self._right_padding or (), None
        if any(right):
            shifts = mx.array(list(right))[:, None]
            self.keys = dynamic_roll(self.keys, shifts, axis=2)
            self.values = dynamic_roll(self.values, shifts, axis=2)
            self.padding = tuple(map(sum, zip(self.padding, right, strict=True)))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add the keys and values of a pass; return all that it looks at."""
        begin, end = self._idx, self._idx + keys.shape[2]
        seen = padded_keys(end) if self.pads and keys.shape[2] > 1 else end
        if self.keys is None or seen > self.keys.shape[2]:
            room = round_up(seen, self.step)
            self.keys = _grown(self.keys, keys, room)
            self.values = _grown(self.values, values, room)
        self.keys[..., begin:end, :] = keys
        self.values[..., begin:end, :] = values
        self._idx = end
        seen_keys, seen_values = self.keys[..., :seen, :], self.values[..., :seen, :]
        if (attention := attention_in_use()) is not None:
            attention.fetched(seen_keys, seen_values, self.keys, self.values)
        return seen_keys, seen_values

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> Any:
        """Return the mask of a pass of that many tokens: (rows, 1, tokens, keys), "causal" or
        None, as `mx.fast.scaled_dot_product_attention` takes it."""
        keys = self._idx + N
        room = padded_keys(keys) if self.pads and N > 1 else keys
        is_plain = not return_array and kwargs.get("window_size") is None
        if is_plain and self.is_even and room == keys:
            if N > 1:
                return "causal"
            if len(self.padding) == 1:  # several rows decode no faster without one
                return None
        mask: mx.array = super().make_mask(N, return_array, **kwargs)
        if is_plain and N == 1 and (attention := attention_in_use()) is not None:
            attention.hides(mask, self.left_padding)
        if room > keys:
            mask = mx.pad(mask, [*[(0, 0)] * (mask.ndim - 1), (0, room - keys)])
        if is_plain and self.pads and N > 1 and self.keys is not None:
            # Not infinity: of a row without any key, what is not a number would spread.
            hidden = mx.array(mx.finfo(self.keys.dtype).min, self.keys.dtype)
            mask = mx.where(mask, mx.array(0, self.keys.dtype), hidden)
        return mask

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keep these rows, at least one, in this order, without padding that none of them needs."""
        padding = [self.padding[place] for place in batch_indices]
        least = min(padding)
        self.padding = tuple(left - least for left in padding)
        self._idx -= least
        if self.keys is not None:
            runs = list(_runs(batch_indices))
            self.keys = _joined(self.keys[a:b, :, least:] for a, b in runs)
            self.values = _joined(self.values[a:b, :, least:] for a, b in runs)

    def extend(self, other: BatchKeys) -> None:
        """Add the rows of another batch; all of them end at the same place."""
        held = max(self._idx, other._idx)
        if self.keys is not None or other.keys is not None:
            room = round_up(held + 1, self.step)
            self.keys = _joined(_aligned(self, other, "keys", held, room))
            self.values = _joined(_aligned(self, other, "values", held, room))
        self.padding = tuple(
            left + held - side._idx for side in (self, other) for left in side.padding
        )
        self._idx = held

    def extract(self, idx: int) -> KVCache:
        """Return the cache of one row, in arrays of its own."""
        taken, left = KVCache(), self.padding[idx]
        taken.keys = mx.contiguous(self.keys[idx : idx + 1, :, left : self._idx])
        taken.values = mx.contiguous(self.values[idx : idx + 1, :, left : self._idx])
        taken.offset = self._idx - left
        return taken


def with_cheap_masks(caches: Sequence[Any], held: Sequence[int], *, pads: bool) -> list[Any]:
    """Return the layers of a batch, the plain ones of which choose their masks.

    Args:
        caches: a layer each, as mlx-lm merges them.
        held: how many tokens they hold of each row.
        pads: see `BatchKeys`.
    """
    padding = [max(held) - count for count in held]
    counts = RowCounts()
    layers = []
    for layer in caches:
        layers.append(layer)
        if type(layer) is BatchKVCache:
            layers[-1] = BatchKeys(padding, pads=pads, counts=counts)
            layers[-1].take_over(layer)
    return layers


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the beginning and the end of each run of consecutive rows: to copy slices is quicker
    than to gather rows."""
    begin = places[0]
    for before, after in pairwise(places):
        if after != before + 1:
            yield begin, before + 1
            begin = after
    yield begin, places[-1] + 1


def _joined(parts: Iterable[Any]) -> Any:
    arrays = list(parts)
    return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays, axis=0)


def _aligned(
    first: BatchKeys, second: BatchKeys, name: str, held: int, room: int
) -> Iterator[mx.array]:
    """Yield the arrays of two batches with so much room, each moved so that `held` places are
    taken."""
    arrays = [getattr(side, name) for side in (first, second)]
    like = arrays[1] if arrays[0] is None else arrays[0]
    for side, array in zip((first, second), arrays, strict=True):
        if array is None:
            yield _zeros(like, room, rows=len(side.padding))
            continue
        left = held - side._idx
        right = room - left - array.shape[2]
        taken = array[..., :right, :] if right < 0 else array
        pad = [(0, 0), (0, 0), (left, max(right, 0)), (0, 0)]
        yield mx.pad(taken, pad) if left or right > 0 else taken


def _grown(array: Any, like: mx.array, room: int) -> mx.array:
    """Return an array with so many places, or a new one with the rows and heads of `like`."""
    if array is None:
        return _zeros(like, room)
    return mx.concatenate([array, _zeros(array, room - array.shape[2])], axis=2)


def _zeros(like: mx.array, tokens: int, *, rows: int | None = None) -> mx.array:
    own_rows, heads, _, width = like.shape
    return mx.zeros((own_rows if rows is None else rows, heads, tokens, width), like.dtype)
