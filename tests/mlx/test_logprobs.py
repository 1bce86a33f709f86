"""Log-probabilities are those of the logits in float32, whatever type a model computes in."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlxsup.protocol.states import Batching
from mlxsup.worker.engine import RowLogprobs
from mlxsup.worker.engines.mlx import batch, logprobs
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.logits import FloatLogits
from mlxsup.worker.engines.mlx.logprobs import LogprobReader

from support.model_types.build import make_model
from support.model_types.listed import model_types
from support.model_types.scenarios import chunks_of
from support.models.tiny_model import VOCABULARY_SIZE, as_4_bit, as_bfloat16, make_tiny_model
from support.worker.mlx_rows import known_as, loaded_engine, make_row, run_rows

pytestmark = pytest.mark.mlx


KINDS: dict[str, Any] = {
    "float32": lambda folder: folder,
    "bfloat16": as_bfloat16,
    "4 bits over bfloat16": lambda folder: as_4_bit(as_bfloat16(folder)),
}


@pytest.fixture(scope="module", params=KINDS)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MlxEngine]:
    folder: Path = make_tiny_model(tmp_path_factory.mktemp("tiny") / "m")
    with loaded_engine(KINDS[request.param](folder)) as engine:
        yield engine


def prompt(key: int) -> list[int]:
    return [(7 + 131 * key + 17 * place) % VOCABULARY_SIZE for place in range(5 + 20 * key)]


def expected_logprobs(engine: MlxEngine, tokens: list[int], answer: list[int]) -> list[list[float]]:
    """Of each token of the answer: a float32 log-softmax of the logits of a plain forward pass."""
    model: Any = engine.model
    result: list[list[float]] = []
    with mx.stream(engine.stream):
        cache = make_prompt_cache(model)
        # As the engine reads it: the prompt, and its last token by itself.
        if tokens[:-1]:
            model(mx.array([tokens[:-1]]), cache=cache)
        for token in [tokens[-1], *answer[:-1]]:
            logits = model(mx.array([[token]]), cache=cache)[0, -1].astype(mx.float32)
            values: Any = (logits - mx.logsumexp(logits)).tolist()
            result.append(values)
    return result


@pytest.mark.bits
def test_logprobs_are_a_float32_log_softmax_of_the_logits(engine: MlxEngine) -> None:
    # The hot ones draw unlikely tokens, whose numbers are large and rounded most.
    rows = [
        make_row(key, prompt(key), max_tokens=12, top_logprobs=20, temperature=5.0 * (key % 2))
        for key in range(4)
    ]
    for key, got in run_rows(engine, rows).items():
        answer = [token.token for token in got if token.token is not None]
        places = expected_logprobs(engine, prompt(key), answer)
        for token, expected in zip(got, places, strict=True):
            assert token.token is not None
            assert token.logprobs is not None
            told = [(token.token, token.logprobs.logprob), *token.logprobs.top]
            for number, logprob in told:
                assert logprob == pytest.approx(expected[number], abs=1e-3)
            assert key % 2 or token.logprobs.top[0] == told[0], "greedy takes the likeliest"
            least = token.logprobs.top[-1][1]
            assert sum(value > least + 1e-3 for value in expected) < 20


def test_no_probabilities_add_up_to_more_than_1(engine: MlxEngine) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 3},
        {"logit_bias": {5: 100.0}},
        {"logit_bias": {5: 30.0, 6: 29.5}, "repetition_penalty": 1.3},
    ]
    rows = [
        make_row(key, prompt(key), max_tokens=12, top_logprobs=20, **change)
        for key, change in enumerate(changes)
    ]
    for got in run_rows(engine, rows).values():
        for token in got:
            assert token.logprobs is not None
            assert sum(math.exp(value) for _, value in token.logprobs.top) <= 1 + 1e-6


@pytest.mark.bits
def test_company_changes_no_logprob(engine: MlxEngine) -> None:
    rows = [
        make_row(key, prompt(key), max_tokens=10, top_logprobs=5, temperature=key % 2, seed=key)
        for key in range(4)
    ]
    alone = {int(row.key): run_rows(engine, [row])[int(row.key)] for row in rows}
    assert run_rows(engine, rows) == alone


def read(logprobs: Any, token: int, count: int) -> Any:
    response = SimpleNamespace(uid=1, token=token, logprobs=mx.array(logprobs))
    return LogprobReader().read([response], {1: count})[0]


def test_a_large_offset_of_the_logits_costs_no_precision() -> None:
    """A logarithm of a sum of numbers near e**2000 is off by more than what may be left over."""
    logits = mx.array([2000.0, 1999.0, 1990.0])
    got = read(logits - mx.logsumexp(logits), 0, 3)
    total = sum(math.exp(float(value) - 2000) for value in (2000, 1999, 1990))
    assert got.logprob == pytest.approx(-math.log(total), abs=1e-6)
    assert sum(math.exp(value) for _, value in got.top) == pytest.approx(1.0, abs=1e-6)


def test_tokens_that_are_as_likely_stand_in_the_order_of_their_ids() -> None:
    half, eighth = math.log(0.5), math.log(0.125)
    got = read([eighth, eighth, half, eighth, eighth], 2, 5)
    assert [token for token, _ in got.top] == [2, 0, 1, 3, 4]
    alike = [math.log(1 / 64)] * 64
    for count in range(1, 65):
        ids = [token for token, _ in read(alike, 0, count).top]
        assert (ids, len(ids)) == (sorted(ids), count)


def test_numbers_that_are_none_are_shown_as_the_least() -> None:
    got = read([math.nan, 0.0, 0.0], 0, 2)
    assert got.logprob == -9999.0
    assert {logprob for _, logprob in got.top} == {-9999.0}


def test_probabilities_of_a_place_never_add_up_to_more_than_1() -> None:
    """Each is rounded to float32, here all of them upwards."""
    seen = 0.0
    for count in range(2, 100):
        logits = mx.random.normal([count], key=mx.random.key(count)) * 3
        got = read(logits - mx.logsumexp(logits), 0, count)
        total = math.fsum(math.exp(logprob) for _, logprob in got.top)
        seen = max(seen, total)
        assert total <= 1.0
        assert dict(got.top)[0] == got.logprob
    assert seen > 1 - 1e-6


PROMPT = [7, 301, 42, 1999, 640]


@pytest.fixture(scope="module")
def bf16_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return as_bfloat16(make_tiny_model(tmp_path_factory.mktemp("tiny") / "bf16"))


def test_logits_are_the_models_own_numbers_as_float32(bf16_folder: Path) -> None:
    model: Any = load_model(bf16_folder)[0]
    wrapped = FloatLogits(model)
    own = model(mx.array([PROMPT]), cache=make_prompt_cache(model))
    logits = wrapped(mx.array([PROMPT]), cache=make_prompt_cache(wrapped))
    assert (own.dtype, logits.dtype, wrapped.own_dtype) == (mx.bfloat16, mx.float32, mx.bfloat16)
    assert mx.array_equal(own.astype(mx.float32), logits)


def test_all_else_of_the_model_passes_through(bf16_folder: Path) -> None:
    model: Any = load_model(bf16_folder)[0]
    wrapped = FloatLogits(model)
    assert wrapped.layers is model.layers
    assert wrapped.args.vocab_size == 2048
    with pytest.raises(AttributeError):
        _ = wrapped.no_such_thing


TYPES = {
    "llama": 1e-4,
    "gemma3_text": 1e-3,
    "falcon_h1": 1e-3,
    "mamba2": 1e-3,
    "qwen3_next": 1e-3,
    "deepseek_v3": 1e-3,
}
"""Types with caches of every kind (plain, window, state, both, compressed), and how much rounding
may change."""


CASES = [
    *(("llama", way) for way in Batching),
    ("gemma3_text", None),
    *(pytest.param(name, None, marks=pytest.mark.slow) for name in [*TYPES][2:]),
]


@pytest.mark.bits
@pytest.mark.parametrize(("name", "way"), CASES)
def test_those_of_a_prompt_are_a_log_softmax_of_its_logits(
    tmp_path: Path, name: str, way: Batching | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of several lengths at once, in passes of a few tokens, beside a row that decodes."""
    (model_type,) = model_types([name])
    folder = make_model(tmp_path / name, model_type)
    known = None if way is None else known_as(folder, way)
    changes: dict[str, Any] = {"known_batching": known, "prefix_cache_bytes": 2**20}
    monkeypatch.setattr(batch, "MOST_TOLD", 64)
    with loaded_engine(folder, **changes) as engine, chunks_of(100):
        width = engine.facts.vocabulary_size
        monkeypatch.setattr(logprobs, "PASS_BYTES", 4 * width * 30)
        prompts = {
            key: [(7 + key + 13 * at) % width for at in range(length)]
            for key, length in enumerate((1, 51, 66, 151))  # a pass ends before the last but one
        }
        rows = [
            make_row(key, tokens, max_tokens=key % 2 * 3, prompt_logprobs=5)
            for key, tokens in prompts.items()
        ]
        for _ in range(2):  # once more with everything known
            engine.insert(make_row(9, prompts[1][:40], max_tokens=60))
            engine.step()
            told: dict[int, list[RowLogprobs]] = {key: [] for key in prompts}
            for row in rows:
                assert engine.insert(row) == 0
            while engine.row_count():
                for read in engine.step().prefill:
                    assert len(read.logprobs) <= batch.MOST_TOLD
                    told.get(int(read.key), []).extend(read.logprobs)
                engine.settle()
            for key, tokens in prompts.items():
                assert len(told[key]) == len(tokens) - 1
                check_told(engine, tokens, told[key], TYPES[name])


def check_told(
    engine: MlxEngine, tokens: list[int], told: list[RowLogprobs], distance: float
) -> None:
    model: Any = engine.model
    with mx.stream(engine.stream):
        logits = model(mx.array([tokens]), cache=make_prompt_cache(model))[0]
        values = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))[:-1]
    best = -np.sort(-values, axis=1)[:, :5]
    top = np.array([one.top for one in told]).reshape(-1, 5, 2)
    of_ids = np.take_along_axis(values, top[..., 0].astype(int), axis=1)
    chosen = values[np.arange(len(values)), tokens[1:]]
    assert np.allclose([one.logprob for one in told], chosen, rtol=0, atol=distance)
    for expected in (best, of_ids):
        assert np.allclose(top[..., 1], expected, rtol=0, atol=distance)
