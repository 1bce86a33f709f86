"""The kept caches against a naive list, and none of them harmed by who used it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from mlxsup.worker.engines.mlx import prefix_cache as mlx_prefix_cache
from mlxsup.worker.engines.mlx.caches import can_cut
from mlxsup.worker.engines.mlx.load import iterate_arrays
from mlxsup.worker.engines.mlx.prefix_cache import LEAST_TOKENS, Found, PrefixCache
from mlxsup.worker.engines.mlx.prefix_index import Node
from mlxsup.worker.engines.mlx.prefix_size import PrefixRoom

from support.mlx_rows import make_row

pytestmark = pytest.mark.mlx

Sequence = tuple[int, ...]
WINDOW = 40
TOKEN_BYTES = 8 + 4
"""Keys and values of one float32 each, and the id."""


def read(cache: list[Any], tokens: Sequence) -> None:
    """Feeds tokens to caches, as a model with one feature would."""
    for layer in cache:
        if isinstance(layer, CacheList):
            read(list(layer.caches), tokens)
        elif isinstance(layer, ArraysCache):
            before = layer[0] if layer[0] is not None else mx.zeros((1, 1), dtype=mx.int32)
            layer[0] = before * 0
            for token in tokens:
                before = before * 31 + token
            layer[0] = before
        elif tokens:
            new = mx.array(tokens, dtype=mx.float32).reshape(1, 1, -1, 1)
            layer.update_and_fetch(new, -new)


def ring(layer: RotatingKVCache) -> list[float]:
    """The numbers of a ring, oldest first."""
    keys, _, offset, keep, _, place = layer.state
    numbers: list[float] = keys[0, 0, :, 0].tolist()
    if place == len(numbers) or place >= offset:
        return numbers[:place]
    return [*numbers[:keep], *numbers[place:], *numbers[keep:place]]


def content(cache: list[Any]) -> list[Any]:
    """What caches hold, oldest first."""
    result: list[Any] = []
    for layer in cache:
        if isinstance(layer, CacheList):
            result.append(content(list(layer.caches)))
        elif isinstance(layer, ArraysCache):
            result.append(None if layer[0] is None else layer[0].tolist())
        elif isinstance(layer, RotatingKVCache):
            result.append((layer.offset, ring(layer)[-layer.size() :]))
        else:
            result.append(layer.keys[0, 0, : layer.offset, 0].tolist())
    return result


MAKERS: dict[str, Callable[[], list[Any]]] = {
    "KVCache": lambda: [KVCache(), KVCache()],
    "RotatingKVCache": lambda: [KVCache(), RotatingKVCache(max_size=WINDOW)],
    "ArraysCache": lambda: [ArraysCache(size=1), KVCache()],
    "CacheList": lambda: [CacheList(KVCache(), KVCache())],
    "CacheList with ArraysCache": lambda: [CacheList(ArraysCache(size=1), KVCache())],
}


def filled(kind: str, tokens: Sequence) -> list[Any]:
    cache = MAKERS[kind]()
    read(cache, tokens)
    return cache


def sequence_of(node: Node[Any]) -> Sequence:
    above = sequence_of(node.parent) if node.parent is not None else ()
    return (*above, *map(int, node.run))


def shared_of(one: Sequence, other: Sequence) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


class CacheMachine(RuleBasedStateMachine):
    """The cache beside a list in order of use; long tokens stand for many, so lengths are few."""

    kept: list[Sequence]

    @initialize(kind=st.sampled_from(sorted(MAKERS)), entries=st.integers(2, 6))
    def begin(self, kind: str, entries: int) -> None:
        self.kind = kind
        layers = sum(1 for _ in iterate_arrays(filled(kind, (1,)))) // 2 or 1
        self.limit = entries * 60 * TOKEN_BYTES * layers
        self.cache = PrefixCache(PrefixRoom(max_bytes=self.limit))
        self.kept = []

    def order(self) -> list[Sequence]:
        return [sequence_of(node) for node in self.cache.entries()]

    def is_cuttable(self, sequence: Sequence) -> bool:
        return can_cut(filled(self.kind, sequence))

    def served(self, sequence: Sequence, known: Sequence) -> int:
        """How many tokens a kept sequence gives to another one."""
        shared = shared_of(known, sequence)
        return shared if shared == len(known) or self.is_cuttable(known) else 0

    @staticmethod
    def sequences() -> st.SearchStrategy[Sequence]:
        pieces = st.lists(st.integers(0, 2), min_size=1, max_size=6)
        return pieces.map(lambda ps: tuple(t for p in ps for t in (p, *range(100, 111))))

    @rule(sequence=sequences())
    def keep(self, sequence: Sequence) -> None:
        self.cache.keep(list(sequence), filled(self.kind, sequence))
        new = self.order()
        if len(sequence) < LEAST_TOKENS:
            assert new == self.kept
        elif any(self.served(sequence, known) == len(sequence) for known in self.kept):
            assert sorted(new) == sorted(self.kept), "nothing new"
            assert self.served(sequence, new[-1]) == len(sequence), "used just now"
        else:
            assert new[-1] == sequence
            left = self.kept
            if self.is_cuttable(sequence):
                left = [known for known in left if shared_of(known, sequence) < len(known)]
            # What went went for memory: the ones used the longest time ago.
            assert new[:-1] == left[len(left) - (len(new) - 1) :]
        self.kept = new

    @rule(sequence=sequences())
    def find(self, sequence: Sequence) -> None:
        found = self.cache.find(list(sequence))
        known = sequence[:-1]
        best = max((self.served(known, one) for one in self.kept), default=0)
        if len(sequence) <= LEAST_TOKENS or best < LEAST_TOKENS:
            best = 0
        assert found.count == best
        assert (found.cache is None) == (best == 0)
        if self.kept and len(sequence) > LEAST_TOKENS:
            assert found.shared == max(shared_of(known, one) for one in self.kept)
        if found.cache is None:
            assert self.order() == self.kept
            return
        assert content(found.cache) == content(filled(self.kind, known[:best]))
        new = self.order()
        assert self.served(known, new[-1]) == best
        assert [one for one in self.kept if one != new[-1]] == new[:-1], "used last, goes last"
        self.kept = new
        # A row does as it likes with its copy.
        rest = sequence[best:]
        read(found.cache, rest[:5])
        for token in rest[5:]:
            read(found.cache, (token,))
        assert content(found.cache) == content(filled(self.kind, sequence))

    @rule()
    def give_back(self) -> None:
        self.cache.clear()
        self.kept = []
        assert self.cache.held_bytes == 0

    @invariant()
    def what_is_kept_is_whole_and_bounded(self) -> None:
        if not hasattr(self, "kind"):
            return
        assert self.cache.held_bytes <= self.limit
        arrays = 0
        for node in self.cache.entries():
            assert node.value is not None
            expected = filled(self.kind, sequence_of(node))
            assert content(node.value.cache) == content(expected)
            arrays += sum(array.nbytes for array in iterate_arrays(node.value.cache))
        ids = {one[:n] for one in self.order() for n in range(1, len(one) + 1)}
        assert self.cache.held_bytes == arrays + 4 * len(ids)


CacheMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestCache = CacheMachine.TestCase


def numbered(seed: int, length: int) -> Sequence:
    return tuple((seed * 7919 + n * 31) % 1000 for n in range(length))


def test_the_least_recently_used_entry_goes_first() -> None:
    one, two, three = (numbered(seed, 100) for seed in (1, 2, 3))
    cache = PrefixCache(PrefixRoom(max_bytes=2 * 100 * (TOKEN_BYTES + 8)))
    for sequence in (one, two):
        cache.keep(sequence, filled("KVCache", sequence))
    assert cache.find((*one, 5)).count == 100
    cache.keep(three, filled("KVCache", three))
    counts = [cache.find((*sequence, 5)).count for sequence in (one, two, three)]
    assert counts == [100, 0, 100]


def test_nothing_is_known_of_a_short_prompt_or_to_an_empty_cache() -> None:
    cache = PrefixCache(PrefixRoom(max_bytes=2**20))
    assert cache.find(numbered(1, 100)) == Found(cache=None, count=0, shared=0)
    cache.keep(numbered(1, 100), filled("KVCache", numbered(1, 100)))
    short = cache.find(numbered(1, LEAST_TOKENS))
    assert (short.cache, short.count, short.shared) == (None, 0, 0)
    assert cache.find(numbered(1, LEAST_TOKENS + 1)).count == LEAST_TOKENS == 16


@pytest.mark.parametrize("kind", ["KVCache", "CacheList", "RotatingKVCache"])
def test_what_is_too_large_is_cut_back_to_what_fits(kind: str) -> None:
    sequence = numbered(1, WINDOW - 1)
    cache = PrefixCache(PrefixRoom(max_bytes=20 * (TOKEN_BYTES + 8)))
    cache.keep(sequence, filled(kind, sequence))
    assert cache.held_bytes == 20 * (TOKEN_BYTES + 8)
    found = cache.find(sequence)
    assert found.count == 20
    assert found.cache is not None
    assert content(found.cache) == content(filled(kind, sequence[:20]))


def test_what_is_too_large_and_cannot_be_cut_is_not_kept() -> None:
    sequence = numbered(1, 300)
    for kind in ("ArraysCache", "RotatingKVCache"):
        cache = PrefixCache(PrefixRoom(max_bytes=200 * TOKEN_BYTES))
        cache.keep(sequence, filled(kind, sequence))
        assert (len(cache), cache.held_bytes) == (0, 0)


def test_entries_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx_prefix_cache, "MAX_ENTRIES", 5)
    cache = PrefixCache(PrefixRoom(max_bytes=2**30))
    for seed in range(20):
        cache.keep(numbered(seed, 20), filled("KVCache", numbered(seed, 20)))
        assert len(cache) == min(seed + 1, 5)


def test_a_row_of_a_batch_does_not_hold_the_batch() -> None:
    """A slice of an array is a view of all of it: 8 rows would be held for one."""
    rows = 8
    batch = ArraysCache(size=1)
    batch[0] = mx.ones((rows, 1024, 256))
    mx.eval(batch[0])
    mx.synchronize()
    cache = PrefixCache(PrefixRoom(max_bytes=2**30))
    before = mx.get_active_memory()
    cache.keep(numbered(1, 20), [batch.extract(3)])
    mx.synchronize()
    del batch
    mx.clear_cache()
    assert mx.get_active_memory() <= before - (rows - 1) * 1024 * 256 * 4 + 2**14


def test_a_window_that_a_long_chunk_filled_is_kept_without_the_chunk() -> None:
    sequence = numbered(1, 500)
    layers: list[Any] = [RotatingKVCache(max_size=WINDOW)]
    read(layers, sequence)
    whole: list[Any] = [RotatingKVCache(max_size=WINDOW)]
    read(whole, sequence)
    cache = PrefixCache(PrefixRoom(max_bytes=2**20))
    cache.keep(sequence, layers)
    assert cache.held_bytes == WINDOW * 8 + len(sequence) * 4
    found = cache.find((*sequence, 1))
    assert found.cache is not None
    assert content(found.cache) == content(whole)
    for token in (5, 6, 7):
        read(whole, (token,))
        read(found.cache, (token,))
        assert content(found.cache) == content(whole), "an answer continues after it"


@pytest.mark.parametrize("count", [WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW - 7])
def test_a_window_that_was_filled_token_by_token_is_kept_in_its_order(count: int) -> None:
    sequence = numbered(1, count)
    layers: list[Any] = [RotatingKVCache(max_size=WINDOW)]
    for token in sequence:
        read(layers, (token,))
    cache = PrefixCache(PrefixRoom(max_bytes=2**20))
    cache.keep(sequence, layers)
    found = cache.find((*sequence, 1))
    assert found.cache is not None
    for rest in ((5,), (6, 7, 8), (9,)):
        sequence = (*sequence, *rest)
        read(found.cache, rest)
    whole: list[Any] = [RotatingKVCache(max_size=WINDOW)]
    read(whole, sequence)
    assert content(found.cache) == content(whole)


def test_a_prompt_beside_an_entry_of_100000_tokens_is_found_at_once() -> None:
    """Expected: 0.1 ms, and 3 ms where all of it is found; the square of it was 15 s."""
    giant = numbered(1, 100_000)
    cache = PrefixCache(PrefixRoom(max_bytes=2**30))
    cache.keep(giant, filled("KVCache", giant))
    for seed in range(2, 400):
        cache.keep(numbered(seed, 40), filled("KVCache", numbered(seed, 40)))
    began_s = time.thread_time()
    assert cache.find([*giant[:3], *[1] * 200]).count == 0
    assert cache.find([*giant[:300], *[1] * 200]).count == 300
    assert cache.find(giant).count == 99_999
    assert time.thread_time() - began_s < 0.1


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_what_is_known_already_takes_no_room_again(kind: str) -> None:
    tokens = numbered(1, 60)
    cache = PrefixCache(PrefixRoom(max_bytes=2**20))
    cache.keep(tokens, filled(kind, tokens))
    held = cache.held_bytes
    cache.keep(tokens, filled(kind, tokens))
    assert (len(cache), cache.held_bytes) == (1, held)


def test_what_was_cut_back_to_fit_gives_its_memory_back() -> None:
    kept = PrefixCache(PrefixRoom(max_bytes=2**20))
    before = mx.get_active_memory()
    layer = KVCache()
    new = mx.zeros((1, 1, 8000, 256))
    layer.update_and_fetch(new, new + 1)
    kept.keep(range(8000), [layer])
    del layer, new
    mx.synchronize()
    assert 2**19 < kept.held_bytes <= 2**20
    assert mx.get_active_memory() - before <= 2**20


def test_checkpoints_are_for_rows_that_outgrow_what_can_be_cut_back() -> None:
    row = make_row(1, list(numbered(1, 300)), max_tokens=50, checkpoints=(100, 200))

    def planned(max_bytes: int, cuttable: int | None, known: int = 0) -> tuple[int, ...]:
        room = PrefixRoom(max_bytes=max_bytes, cuttable_tokens=cuttable)
        return PrefixCache(room).plan_checkpoints(row, Found(count=known))

    places = (100, 200, 299)
    assert planned(2**20, 0) == planned(2**20, 349) == planned(2**20, 350) == places
    assert planned(2**20, 351) == planned(2**20, None) == planned(0, 0) == ()
    assert planned(2**20, 0, known=150) == (200, 299)
