"""What earlier requests have computed is not computed again, and changes no answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

from mlxsup.protocol.ids import RequestKey
from mlxsup.worker.engines.mlx.engine import MlxEngine

from support.loop_driver import LoopDriver
from support.mlx_rows import loaded_engine, make_row, make_spec, run_rows, solo
from support.model_types.scenarios import chunks_of
from support.tiny_model import BYTES_PER_TOKEN, VOCABULARY_SIZE, make_tiny_model

pytestmark = pytest.mark.mlx

BYTES = 64 * 1024 * 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def engine(folder: Path) -> Iterator[MlxEngine]:
    with loaded_engine(folder, prefix_cache_bytes=BYTES) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[MlxEngine]:
    with loaded_engine(folder) as engine:
        yield engine


def tokens_of(seed: int, length: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(VOCABULARY_SIZE) for _ in range(length)]


def prefilled(engine: MlxEngine, tokens: list[int]) -> tuple[int, int]:
    """How many tokens of a prompt came from the cache, and how many were processed."""
    cached = engine.insert(make_row(1, tokens, max_tokens=1))
    seen = [cached]
    while engine.has_rows():
        seen += [progress.done for progress in engine.step().prefill]
    assert seen == sorted(seen)
    return cached, seen[-1] - cached


def test_the_second_turn_of_a_chat_prefills_the_new_tokens_only(
    engine: MlxEngine, plain: MlxEngine
) -> None:
    first = make_row(1, tokens_of(1, 200), max_tokens=20)
    answer = solo(engine, first)
    second = make_row(2, first.tokens + answer + tokens_of(2, 30), max_tokens=20)
    cached = engine.insert(second)
    assert cached == 220, "the prompt and the answer"
    done = [p for _ in range(3) for p in engine.step().prefill]
    assert (done[0].total, done[-1].done) == (250, 250)
    assert done[0].done > cached
    run_rows(engine)
    assert solo(engine, second) == solo(plain, second)
    assert answer == solo(plain, first)


def test_two_chats_pay_for_a_shared_system_prompt_once(engine: MlxEngine, plain: MlxEngine) -> None:
    system = tokens_of(1, 300)
    one, two = system + tokens_of(2, 20), system + tokens_of(3, 20)
    assert prefilled(engine, one) == (0, 320)
    cached, computed = prefilled(engine, two)
    assert 299 <= cached <= 300
    assert cached + computed == 320
    row = make_row(4, two, max_tokens=24, temperature=1.0, seed=3)
    assert solo(engine, row) == solo(plain, row)


@pytest.mark.bits
def test_the_same_prompt_again_computes_its_last_tokens(engine: MlxEngine) -> None:
    tokens = tokens_of(1, 100)
    prefilled(engine, tokens)
    cached, computed = prefilled(engine, tokens)
    assert cached >= 97
    assert computed >= 1
    assert cached + computed == 100


def test_short_prompts_are_not_kept(engine: MlxEngine) -> None:
    prefilled(engine, [5] * 8)
    assert prefilled(engine, [5] * 8) == (0, 8)


def test_bytes_are_bounded_and_given_back(folder: Path) -> None:
    limit = 500 * BYTES_PER_TOKEN
    with loaded_engine(folder, prefix_cache_bytes=limit) as engine:
        prefixes = engine.prefixes
        assert prefixes is not None
        for seed in range(8):
            prefilled(engine, tokens_of(seed, 150))
            assert prefixes.held_bytes <= limit
        assert len(prefixes) == 3
        assert engine.bytes_held().prefix == prefixes.held_bytes > 0
        assert prefilled(engine, tokens_of(7, 150))[0] > 140, "the latest is there"
        assert prefilled(engine, tokens_of(0, 150))[0] == 0, "the oldest has gone"
        prefilled(engine, tokens_of(9, 900))
        assert prefixes.held_bytes <= limit, "one that is too large alone is not kept"
        engine.give_back()
        assert (len(prefixes), prefixes.held_bytes) == (0, 0)
        assert (engine.bytes_held().cache, engine.bytes_held().prefix) == (0, 0)


def test_memory_comes_back_to_what_it_was(folder: Path) -> None:
    with loaded_engine(folder, prefix_cache_bytes=BYTES) as engine:
        mx.synchronize()
        before = engine.bytes_held().active
        for seed in range(5):
            run_rows(engine, [make_row(1, tokens_of(seed, 300), max_tokens=9)])
        assert engine.bytes_held().active > before
        engine.give_back()
        assert engine.bytes_held().active <= before + 64 * 1024


def test_a_cancelled_prompt_is_not_computed_twice_D3(engine: MlxEngine, plain: MlxEngine) -> None:
    tokens = tokens_of(1, 1000)
    engine.insert(make_row(1, tokens))
    with chunks_of(300):
        done = [p.done for _ in range(2) for p in engine.step().prefill][-1]
    assert done < 1000
    engine.remove(RequestKey(1))
    row = make_row(2, tokens, max_tokens=12)
    assert engine.insert(row) >= done - 2
    got = run_rows(engine)[2]
    assert [token.token for token in got] == solo(plain, row)


@pytest.mark.bits
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_removal_at_any_time_leaves_the_others_alone_D8(
    engine: MlxEngine, plain: MlxEngine, steps: int
) -> None:
    shared = tokens_of(1, 40)
    other = make_row(2, shared + tokens_of(2, 7), max_tokens=12)
    expected = solo(plain, other)
    solo(engine, other)
    engine.insert(make_row(1, shared + tokens_of(3, 50)))
    engine.insert(other)
    got: list[int | None] = []
    for _ in range(steps):
        got += [token.token for token in engine.step().tokens if token.key == 2]
    engine.remove(RequestKey(1))
    got += [token.token for token in run_rows(engine)[2]]
    assert got == expected


@pytest.mark.bits
@pytest.mark.parametrize("seed", range(3))
def test_answers_stay_what_they_are_under_sharing_and_churn_C10(
    engine: MlxEngine, plain: MlxEngine, seed: int
) -> None:
    """Prompts that share beginnings, in random company, with penalties that look at them."""
    numbers = random.Random(seed)
    stems = [tokens_of(stem, 60) for stem in range(3)]
    rows = {}
    for key in range(12):
        stem = numbers.choice(stems)[: numbers.randrange(10, 60)]
        parameters: dict[str, Any] = {"temperature": 1.0, "seed": key} if key % 2 else {}
        if key % 3 == 0:
            parameters |= {"presence_penalty": 1.0, "penalty_window": 50}
        tokens = stem + tokens_of(100 + key, numbers.randrange(1, 20))
        rows[key] = make_row(key, tokens, max_tokens=numbers.randrange(1, 25), **parameters)
    expected = {key: solo(plain, row) for key, row in rows.items()}
    waiting = [*rows, *rows]
    numbers.shuffle(waiting)
    got: dict[int, list[int]] = {}
    running: set[int] = set()
    while waiting or engine.has_rows():
        if waiting and len(running) < 8 and waiting[-1] not in running:
            key = waiting.pop()
            engine.insert(rows[key])
            running.add(key)
            got[key] = []
        if not engine.has_rows():
            continue
        for token in engine.step().tokens:
            key = int(token.key)
            assert token.token is not None
            got[key].append(token.token)
            if token.finish is not None:
                running.discard(key)
                assert got[key] == expected[key]


def test_a_deterministic_model_takes_nothing_from_a_cache(folder: Path) -> None:
    with loaded_engine(folder, prefix_cache_bytes=BYTES, deterministic=True) as engine:
        tokens = tokens_of(1, 100)
        assert prefilled(engine, tokens) == (0, 100)
        assert prefilled(engine, tokens) == (0, 100)


def test_the_loop_tells_of_cached_tokens_with_the_first_token(folder: Path) -> None:
    engine = MlxEngine(make_spec(folder, prefix_cache_bytes=BYTES))
    driver = LoopDriver(engine, engine.load(lambda phase, at: None))
    prompt = tokens_of(5, 80)
    driver.answer(prompt_tokens=prompt, max_tokens=4)
    second = driver.answer(prompt_tokens=[*prompt, 7, 8], max_tokens=4)
    assert [delta.cached_tokens for delta in second.deltas] == [80, 0, 0, 0]
    resumed = driver.answer(second.resume_after(2))
    assert resumed.deltas[0].cached_tokens <= 82, "of the prompt, not of the answer"
    assert resumed.tokens == second.tokens[2:]
    driver.close()
    engine.close()


# ---------------------------------------------------------------- facts of mlx-lm


def test_an_exact_hit_of_mlx_lms_cache_leaves_nothing_to_compute(plain: MlxEngine) -> None:
    """Hence our look-up without the last token."""
    cache = LRUPromptCache()
    model: Any = plain.model
    layers = make_prompt_cache(model)
    with mx.stream(plain.stream):
        model(mx.array([[1, 2, 3]]), cache=layers)
        mx.eval([layer.state for layer in layers])
    cache.insert_cache("m", [1, 2, 3], layers)
    found, rest = cache.fetch_nearest_cache("m", [1, 2, 3])
    assert (found is not None, rest) == (True, [])
    found, rest = cache.fetch_nearest_cache("m", [1, 2, 9, 9])
    assert rest == [9, 9]
    assert found[0].offset == 2
    assert layers[0].offset == 3, "the kept one is not touched"
