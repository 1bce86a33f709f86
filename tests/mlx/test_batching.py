"""Rows of model types that mlx-lm cannot batch answer in company as they do alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import Batching
from mlxsup.worker.engine import Row
from mlxsup.worker.engines.mlx.engine import MlxEngine

from support.mlx_rows import check_no_row_is_left, loaded_engine, make_row, run_rows, token_ids
from support.odd_models import CONFIGS, make_odd_model
from support.tiny_model import VOCABULARY_SIZE

pytestmark = [pytest.mark.mlx, pytest.mark.bits]

WAYS = {
    "mamba": Batching.SERIAL_PREFILL,
    "nemotron_h": Batching.SERIAL_PREFILL,
    "baichuan_m1": Batching.SERIAL_PREFILL,
    "recurrent_gemma": Batching.ONE_ROW,
    "lfm2": Batching.SERIAL_PREFILL,
    "afm7": Batching.ONE_ROW,
    "gpt_bigcode": Batching.ONE_ROW,
    "internlm2": Batching.ONE_ROW,
    "gemma2": Batching.ONE_ROW,
    "gemma3_text": Batching.TOGETHER,
    "qwen3": Batching.TOGETHER,
}
LENGTHS = (1, 7, 40, 100)


@pytest.fixture(scope="module", params=list(WAYS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlxEngine]:
    folder = make_odd_model(tmp_path_factory.mktemp(name), name)
    with loaded_engine(folder, max_concurrency=4) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(engine: MlxEngine) -> dict[int, list[int]]:
    got = {}
    for key in range(len(LENGTHS)):
        got[key] = token_ids(run_rows(engine, [make(key)])[key])
    assert len({tuple(tokens) for tokens in got.values()}) == len(LENGTHS)
    return got


def make(key: int, max_tokens: int = 24) -> Row:
    """Every other row is seeded, the rest are greedy."""
    numbers = random.Random(key)
    prompt = [numbers.randrange(VOCABULARY_SIZE) for _ in range(LENGTHS[key])]
    return make_row(key, prompt, max_tokens, temperature=key % 2, seed=key)


def test_the_way_and_its_reason(name: str, engine: MlxEngine) -> None:
    facts = engine.facts
    assert facts.batching is WAYS[name]
    assert (name in facts.batching_reason) == (WAYS[name] is not Batching.TOGETHER)
    assert sorted(WAYS) == sorted(CONFIGS)


def test_answers_in_a_batch_equal_those_alone_A8_C10(
    engine: MlxEngine, alone: dict[int, list[int]]
) -> None:
    """Two rounds of four requests, because the first may leave something behind; none raises."""
    for _ in range(2):
        together = run_rows(engine, [make(key) for key in alone])
        assert {key: token_ids(got) for key, got in together.items()} == alone
    check_no_row_is_left(engine)


def test_rows_that_join_late_and_stay_beside_cancelled_ones_C2_D8(
    engine: MlxEngine, alone: dict[int, list[int]]
) -> None:
    engine.insert(make(3))
    engine.insert(make(0))
    got: dict[int, list[int]] = {key: [] for key in alone}

    def step_until(key: int, count: int) -> None:
        while len(got[key]) < count:
            for token in engine.step().tokens:
                assert token.token is not None
                got[int(token.key)].append(token.token)

    step_until(0, 5)
    engine.insert(make(2))
    step_until(2, 3)
    engine.insert(make(1))
    engine.remove(RequestKey(0))
    step_until(1, 24)
    step_until(2, 24)
    step_until(3, 24)
    cancelled = got.pop(0)
    assert cancelled == alone[0][: len(cancelled)]
    assert got == {key: tokens for key, tokens in alone.items() if key}
    assert not engine.has_rows()


def test_an_answer_goes_on_in_a_batch_where_it_stopped_F10(
    engine: MlxEngine, alone: dict[int, list[int]]
) -> None:
    resumed = [replace(make(key), delivered=alone[key][: 5 + key]) for key in alone]
    rest = run_rows(engine, resumed)
    assert {key: alone[key][: 5 + key] + token_ids(got) for key, got in rest.items()} == alone
