"""What earlier requests have computed is not computed again, and changes no answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
)

from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.ids import RequestKey
from mlxsup.worker.engines.mlx import prefix_cache as mlx_prefix_cache
from mlxsup.worker.engines.mlx import prefix_cache as mlx_prefix_size
from mlxsup.worker.engines.mlx.caches import can_cut, measure_layers, row_bytes
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.loader import iterate_arrays
from mlxsup.worker.engines.mlx.prefix_cache import (
    LEAST_TOKENS,
    Found,
    KeptRows,
    PrefixCache,
    PrefixRoom,
    automatic_bytes,
    free_memory_bytes,
    tokens_that_fit,
)
from mlxsup.worker.engines.mlx.prefix_index import Node

from support.model_types.build import make_model
from support.model_types.scenarios import chunks_of
from support.models.tiny_model import (
    BYTES_PER_TOKEN,
    CONTEXT_LENGTH,
    VOCABULARY_SIZE,
)
from support.worker.loop_driver import LoopDriver
from support.worker.mlx_rows import loaded_engine, make_row, run_rows, solo

pytestmark = pytest.mark.mlx


BYTES = 64 * 1024 * 1024


@pytest.fixture(scope="module")
def shared(tiny: Path) -> Iterator[MlxEngine]:
    with loaded_engine(tiny, prefix_cache_bytes=BYTES) as engine:
        yield engine


@pytest.fixture
def engine(shared: MlxEngine) -> MlxEngine:
    """One that knows nothing."""
    shared.give_back()
    return shared


@pytest.fixture(scope="module")
def plain(tiny: Path) -> Iterator[MlxEngine]:
    with loaded_engine(tiny) as engine:
        yield engine


def tokens_of(seed: int, length: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(VOCABULARY_SIZE) for _ in range(length)]


def prefilled(engine: MlxEngine, tokens: list[int]) -> tuple[int, int]:
    """Return how many tokens of a prompt came from the cache, and how many were processed."""
    cached = engine.insert(make_row(1, tokens, max_tokens=1))
    seen = [cached]
    while engine.row_count():
        seen += [progress.done for progress in engine.step().prefill]
    assert seen == sorted(seen)
    return cached, seen[-1] - cached


def test_the_second_turn_of_a_chat_prefills_the_new_tokens_only(
    engine: MlxEngine, plain: MlxEngine
) -> None:
    first = make_row(1, tokens_of(1, 200), max_tokens=20)
    answer = solo(engine, first)
    assert answer == solo(plain, first)
    second = make_row(2, first.tokens + answer + tokens_of(2, 30), max_tokens=20)
    assert engine.insert(second) == 220, "the prompt and the answer"
    done = [p for _ in range(3) for p in engine.step().prefill]
    assert (done[0].total, done[-1].done) == (250, 250)
    assert done[0].done > 220
    run_rows(engine)
    assert solo(engine, second) == solo(plain, second)


def test_a_kept_row_returns_with_its_own_tokens_and_one_to_read() -> None:
    key, kept = RequestKey(1), KeptRows()
    for tokens, count in (([5, 6, 7], 2), ([5, 6], None), ([5], None), ([5, 8, 7], None)):
        kept.keep(key, [], [5, 6])
        found = kept.take(key, tokens)
        assert (None if found is None else found.count) == count
        assert len(kept) == 0


def test_bytes_are_bounded_and_given_back(tiny: Path) -> None:
    limit = 500 * BYTES_PER_TOKEN
    with loaded_engine(tiny, prefix_cache_bytes=limit, max_concurrency=1) as engine:
        prefixes = engine.prefixes
        assert prefixes is not None
        for seed in range(5):
            prefilled(engine, tokens_of(seed, 150))
            assert prefixes.held_bytes <= limit
        assert len(prefixes) == 3
        assert engine.bytes_held().prefix == prefixes.held_bytes > 0
        assert prefilled(engine, tokens_of(4, 150))[0] > 140, "the latest is there"
        assert prefilled(engine, tokens_of(0, 150))[0] == 0, "the oldest has gone"
        prefilled(engine, tokens_of(9, 900))
        assert prefixes.held_bytes <= limit, "one that is too large alone is not kept"
        engine.give_back()
        assert (len(prefixes), prefixes.held_bytes) == (0, 0)
        assert (engine.bytes_held().cache, engine.bytes_held().prefix) == (0, 0)


def test_a_cancelled_prompt_is_not_computed_twice_D3(engine: MlxEngine, plain: MlxEngine) -> None:
    tokens = tokens_of(1, 500)
    engine.insert(make_row(1, tokens))
    with chunks_of(150):
        done = [p.done for _ in range(2) for p in engine.step().prefill][-1]
    assert done < 500
    engine.remove(RequestKey(1))
    row = make_row(2, tokens, max_tokens=12)
    assert engine.insert(row) >= done - 2
    assert [token.token for token in run_rows(engine)[2]] == solo(plain, row)


@pytest.mark.bits
def test_answers_stay_the_same_under_sharing_and_churn_C10(
    engine: MlxEngine, plain: MlxEngine
) -> None:
    """Prompts that share beginnings, in random company, with penalties that look at them."""
    numbers = random.Random(0)
    stems = [tokens_of(stem, 60) for stem in range(3)]
    rows = {}
    for key in range(10):
        stem = numbers.choice(stems)[: numbers.randrange(10, 60)]
        parameters: dict[str, Any] = {"temperature": 1.0, "seed": key} if key % 2 else {}
        if key % 3 == 0:
            parameters |= {"presence_penalty": 1.0, "penalty_window": 50}
        tokens = stem + tokens_of(100 + key, numbers.randrange(1, 20))
        rows[key] = make_row(key, tokens, max_tokens=numbers.randrange(1, 16), **parameters)
    expected = {key: solo(plain, row) for key, row in rows.items()}
    waiting = [*rows, *rows]
    numbers.shuffle(waiting)
    got: dict[int, list[int]] = {}
    running: set[int] = set()
    while waiting or engine.row_count():
        if waiting and len(running) < 6 and waiting[-1] not in running:
            key = waiting.pop()
            engine.insert(rows[key])
            running.add(key)
            got[key] = []
        for token in engine.step().tokens:
            key = int(token.key)
            assert token.token is not None
            got[key].append(token.token)
            if token.finish is not None:
                running.discard(key)
                assert got[key] == expected[key]


def test_a_deterministic_model_takes_nothing_from_a_cache(tiny: Path) -> None:
    with loaded_engine(tiny, prefix_cache_bytes=BYTES, deterministic=True) as engine:
        assert (engine.facts.prefix_cache_bytes, engine.facts.prefix_cache_tokens) == (0, 0)
        tokens = tokens_of(1, 100)
        assert [prefilled(engine, tokens) for _ in range(2)] == [(0, 100), (0, 100)]


def test_the_loop_tells_of_cached_tokens_with_the_first_token(engine: MlxEngine) -> None:
    driver = LoopDriver(engine, engine.facts)
    prompt = tokens_of(5, 80)
    driver.answer(prompt_tokens=prompt, max_tokens=4)
    second = driver.answer(prompt_tokens=[*prompt, 7, 8], max_tokens=4)
    assert [delta.cached_tokens for delta in second.deltas] == [80, 0, 0, 0]
    resumed = driver.answer(second.resume_after(2))
    assert resumed.deltas[0].cached_tokens <= 82, "of the prompt, not of the answer"
    assert resumed.tokens == second.tokens[2:]
    driver.close()


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

    @rule(data=st.data())
    def find_again(self, data: st.DataObject) -> None:
        """The same prompt: all but its last token is known."""
        if self.kept:
            self.find(data.draw(st.sampled_from(self.kept)))

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


CacheMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)

TestCache = CacheMachine.TestCase


def numbered(seed: int, length: int) -> Sequence:
    return tuple((seed * 7919 + n * 31) % 1000 for n in range(length))


def test_a_chunked_window_serves_only_what_continues_it() -> None:
    """A chunked window has dropped the keys that a shorter prefix needs."""
    layers = [KVCache(), ChunkedKVCache(chunk_size=WINDOW)]
    tokens = numbered(1, 2 * WINDOW)
    read(layers, tokens)
    cache = PrefixCache(PrefixRoom(max_bytes=2**20))
    cache.keep(list(tokens), layers)
    shorter = cache.find([*tokens[:-1], 1, 2])
    assert (shorter.cache, shorter.count, shorter.shared) == (None, 0, 2 * WINDOW - 1)
    assert cache.find([*tokens, 1]).count == 2 * WINDOW


@pytest.mark.parametrize("kind", ["KVCache", "CacheList", "RotatingKVCache"])
def test_an_entry_is_cut_back_to_fit(kind: str) -> None:
    sequence = numbered(1, WINDOW - 1)
    cache = PrefixCache(PrefixRoom(max_bytes=20 * (TOKEN_BYTES + 8)))
    cache.keep(sequence, filled(kind, sequence))
    assert cache.held_bytes == 20 * (TOKEN_BYTES + 8)
    found = cache.find(sequence)
    assert found.count == 20
    assert found.cache is not None
    assert content(found.cache) == content(filled(kind, sequence[:20]))


@pytest.mark.parametrize("kind", ["KVCache", "ArraysCache"])
def test_a_sequence_is_kept_once(kind: str) -> None:
    sequence, cache = numbered(1, 20), PrefixCache(PrefixRoom(max_bytes=2**30))
    held = []
    for _ in range(2):
        cache.keep(sequence, filled(kind, sequence))
        held.append((len(cache), cache.held_bytes))
    assert held[0] == held[1]


def test_a_short_entry_hides_no_longer_one() -> None:
    cache, long = PrefixCache(PrefixRoom(max_bytes=2**30)), numbered(1, 100)
    for sequence in (long, numbered(2, 20)):
        cache.keep(sequence, filled("KVCache", sequence))
    assert cache.find(long[:50]).count == 49


def test_entries_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx_prefix_cache, "MAX_ENTRIES", 5)
    cache = PrefixCache(PrefixRoom(max_bytes=2**30))
    for seed in range(20):
        cache.keep(numbered(seed, 20), filled("KVCache", numbered(seed, 20)))
        assert len(cache) == min(seed + 1, 5)


@pytest.mark.parametrize("use", ["find", "keep again"])
def test_the_entry_that_was_used_longest_ago_goes_first(
    use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlx_prefix_cache, "MAX_ENTRIES", 3)
    cache, made = PrefixCache(PrefixRoom(max_bytes=2**30)), [numbered(n, 20) for n in range(4)]
    for sequence in made[:3]:
        cache.keep(sequence, filled("KVCache", sequence))
    if use == "find":
        cache.find(made[0])
    else:
        cache.keep(made[0], filled("KVCache", made[0]))
    cache.keep(made[3], filled("KVCache", made[3]))
    assert [cache.find(sequence).count > 0 for sequence in made] == [True, False, True, True]


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


def test_checkpoints_are_for_rows_that_outgrow_what_can_be_cut_back() -> None:
    row = make_row(1, list(numbered(1, 300)), max_tokens=50, checkpoints=(100, 200))

    def planned(max_bytes: int, cuttable: int | None, known: int = 0) -> tuple[int, ...]:
        room = PrefixRoom(max_bytes=max_bytes, cuttable_tokens=cuttable)
        return PrefixCache(room).plan_checkpoints(row, Found(count=known))

    places = (100, 200, 299)
    assert planned(2**20, 0) == planned(2**20, 349) == planned(2**20, 350) == places
    assert planned(2**20, 351) == planned(2**20, None) == planned(0, 0) == ()
    assert planned(2**20, 0, known=150) == (200, 299)


GIB = 2**30


@pytest.mark.parametrize(
    ("free", "row", "expected"),
    [
        (50 * GIB, 2 * GIB, 5 * GIB),
        (50 * GIB, 16 * GIB, 16 * GIB),
        (50 * GIB, 100 * GIB, 25 * GIB),
        (0, GIB, 0),
    ],
)
def test_a_tenth_of_the_free_memory_or_a_row_but_not_most_of_it(
    free: int, row: int, expected: int
) -> None:
    assert automatic_bytes(free_bytes=free, row_bytes=row) == expected


def test_free_memory_is_below_the_limit_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert free_memory_bytes("cpu", None) > GIB // 4
    limit = mx.get_active_memory() + 1000
    assert 0 <= free_memory_bytes("cpu", limit) <= 1000
    assert free_memory_bytes("cpu", 0) == 0
    told = {"free_memory": 7 * GIB, "total_memory": 8 * GIB}
    monkeypatch.setattr(mx, "device_info", lambda: told)
    assert free_memory_bytes("cuda", None) == 7 * GIB, "of the device, not of the machine"
    del told["free_memory"]
    assert free_memory_bytes("cuda", None) == 8 * GIB, "an older MLX tells only the whole"
    told.clear()
    assert free_memory_bytes("cuda", None) == 0


@pytest.mark.parametrize("model_type", ["gemma3_text", "mamba"])
def test_row_bytes_are_known_from_one_token(tmp_path: Path, model_type: str) -> None:
    """Nothing is computed for it, and it is what a real row of that length is kept with."""
    folder = make_model(tmp_path, model_type)
    with loaded_engine(folder, prefix_cache_bytes=2**26, max_concurrency=1) as engine:
        prefixes = engine.prefixes
        assert prefixes is not None
        with mx.stream(engine.stream):
            layers = measure_layers(engine.model)
        run_rows(engine, [make_row(1, list(range(200)), max_tokens=1)])
        longest = max(prefixes.entries(), key=lambda node: node.end)
        assert longest.value is not None
        # The state-space layers and the windows do not grow.
        assert longest.value.array_bytes == row_bytes(layers, longest.end)
        is_bounded = model_type == "mamba"
        assert (row_bytes(layers, 4000) == row_bytes(layers, 8000)) == is_bounded


def test_how_many_tokens_fit_beside_what_does_not_grow() -> None:
    layers = [
        CacheLayers(layers=2, row_bytes=200),
        CacheLayers(layers=1, token_bytes=8, window=8),
        CacheLayers(layers=1, token_bytes=8),
    ]
    assert row_bytes(layers, 20) == 400 + 8 * 8 + 20 * 8
    limits = (0, 400, 416, 400 + 64 + 159, 400 + 64 + 160, 10**6)
    assert [tokens_that_fit(limit, layers, 50) for limit in limits] == [0, 0, 1, 19, 20, 50]


def test_the_engine_says_what_it_keeps(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx_prefix_size, "free_memory_bytes", lambda backend, limit: 6 * 2**20)

    def facts_of(**changes: Any) -> tuple[int, int]:
        with loaded_engine(tiny, max_concurrency=1, **changes) as engine:
            return engine.facts.prefix_cache_bytes, engine.facts.prefix_cache_tokens

    row = BYTES_PER_TOKEN * CONTEXT_LENGTH
    assert row == 4 * 2**20
    assert facts_of(prefix_cache_bytes=None) == (3 * 2**20, 3 * 2**20 // BYTES_PER_TOKEN)
    assert facts_of(prefix_cache_bytes=None, context_length=1024) == (row // 4, 1024)
    assert facts_of(prefix_cache_bytes=2**20) == (2**20, 2**20 // BYTES_PER_TOKEN)
    assert facts_of(prefix_cache_bytes=0) == (0, 0)
