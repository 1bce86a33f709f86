"""A prefix cache over real models of every kind of cache: known tokens, and the same answers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from mlxsup.protocol.states import Batching
from mlxsup.worker.engine import Row
from mlxsup.worker.engines.mlx.engine import MlxEngine

from support.model_types.build import make_model
from support.models.tiny_model import VOCABULARY_SIZE
from support.worker.mlx_rows import known_as, loaded_engine, make_row, run_rows, solo

pytestmark = [pytest.mark.mlx, pytest.mark.bits]

BYTES = 256 * 2**20
ROUNDING = 1e-3
ANSWER = 8
"""Tokens of an answer."""

TOGETHER, SERIAL, ONE_ROW = Batching.TOGETHER, Batching.SERIAL_PREFILL, Batching.ONE_ROW
NEVER_CUTTABLE = {"gemma3_text", "lfm2", "mamba", "qwen3_next", "falcon_h1"}
QUICK = [("llama", TOGETHER), ("gemma3_text", TOGETHER), ("falcon_h1", SERIAL)]
SLOW = [
    ("deepseek_v32", TOGETHER), ("mamba", SERIAL), ("qwen3_next", SERIAL),
    ("gemma3_text", SERIAL), ("gemma3_text", ONE_ROW),
    ("lfm2", SERIAL), ("lfm2", TOGETHER), ("lfm2", ONE_ROW),
]  # fmt: skip


def tokens_of(seed: int, length: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(VOCABULARY_SIZE - 4) for _ in range(length)]


def row_of(key: int, tokens: list[int], **changes: Any) -> Row:
    return make_row(key, tokens, max_tokens=ANSWER, top_logprobs=0, **changes)


class Pair:
    """An engine with a prefix cache beside one without."""

    def __init__(self, cached: MlxEngine, plain: MlxEngine) -> None:
        self.cached = cached
        self.plain = plain

    def known(self, row: Row) -> int:
        """Run a row in both; return what was known of it. The answers differ by rounding alone."""
        count = self.cached.insert(row)
        got = run_rows(self.cached)[int(row.key)]
        expected = run_rows(self.plain, [row])[int(row.key)]
        assert [token.token for token in got] == [token.token for token in expected]
        for one, other in zip(got, expected, strict=True):
            assert one.logprobs is not None
            assert other.logprobs is not None
            assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=ROUNDING)
        return count


@pytest.fixture(
    scope="module",
    params=[*QUICK, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)],
    ids="-".join,
)
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Pair]]:
    name, way = request.param
    folder = make_model(tmp_path_factory.mktemp("models") / name, name)
    known: dict[str, Any] = {"known_batching": known_as(folder, way)}
    with (
        loaded_engine(folder, prefix_cache_bytes=BYTES, **known) as cached,
        loaded_engine(folder, **known) as plain,
    ):
        yield name, Pair(cached, plain)


@pytest.fixture
def model_type(loaded: tuple[str, Pair]) -> str:
    return loaded[0]


@pytest.fixture
def pair(loaded: tuple[str, Pair]) -> Pair:
    loaded[1].cached.give_back()
    return loaded[1]


def test_the_same_prompt_again_computes_its_last_token_and_its_answer_is_gone_on_with(
    pair: Pair,
) -> None:
    tokens = tokens_of(1, 90)
    assert [pair.known(row_of(key, tokens)) for key in range(2)] == [0, 89]
    answer = solo(pair.plain, row_of(1, tokens))
    known = pair.known(row_of(2, [*tokens, *answer, *tokens_of(2, 20)]))
    assert known in (90 + ANSWER - 1, 90 + ANSWER)


def test_a_checkpoint_serves_every_prompt_that_continues_it(pair: Pair) -> None:
    system = tokens_of(1, 60)
    first = pair.known(row_of(1, system + tokens_of(2, 40), checkpoints=(60, 95)))
    other = pair.known(row_of(3, system + tokens_of(3, 50), checkpoints=(60,)))
    turn = pair.known(row_of(5, system + tokens_of(2, 40)[:35] + tokens_of(5, 30)))
    again = pair.known(row_of(6, system + tokens_of(3, 50)))
    assert (first, other, turn, again) == (0, 60, 95, 109)


def test_the_third_prompt_with_an_unnamed_beginning_finds_it(pair: Pair, model_type: str) -> None:
    prefixes = pair.cached.prefixes
    assert prefixes is not None
    assert (prefixes.room.cuttable_tokens is not None) == (model_type in NEVER_CUTTABLE)
    stem = tokens_of(1, 64)
    known = [pair.known(row_of(key, stem + tokens_of(10 + key, 30))) for key in range(3)]
    assert known == [0, 0 if model_type in NEVER_CUTTABLE else 64, 64]


def test_rows_side_by_side_keep_and_use_checkpoints(pair: Pair) -> None:
    """Prompts of different length, in pieces, together: what is kept is each row's own."""
    stems = [tokens_of(stem, 40 + 17 * stem) for stem in range(3)]
    rows = [
        row_of(key, stem + tokens_of(50 + key, 5 + 13 * key), checkpoints=(len(stem),))
        for key, stem in enumerate(stems * 2)
    ]
    alone = {int(row.key): solo(pair.plain, row) for row in rows}
    for half, known in ((rows[:3], [0, 0, 0]), (rows[3:], [len(stem) for stem in stems])):
        assert [pair.cached.insert(row) for row in half] == known
        for key, got in run_rows(pair.cached).items():
            assert [token.token for token in got] == alone[key]


def test_a_row_cancelled_at_any_step_leaves_right_caches(pair: Pair) -> None:
    tokens = tokens_of(1, 150)
    for steps in range(4):
        row = row_of(100 + steps, tokens + tokens_of(steps, 9), checkpoints=(64, 150))
        pair.cached.insert(row)
        for _ in range(steps):
            pair.cached.step()
        pair.cached.remove(row.key)
    assert pair.known(row_of(1, tokens + tokens_of(77, 20))) >= 64
