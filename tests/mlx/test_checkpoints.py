"""What a prompt shares with another is not computed again, whatever caches a model has."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxsup.protocol.states import Batching
from mlxsup.worker.engine import Row
from mlxsup.worker.engines.mlx.engine import MlxEngine

from support.models.cache_models import CONFIGURATIONS, make_cache_model
from support.models.tiny_model import VOCABULARY_SIZE
from support.worker.mlx_rows import known_as, loaded_engine, make_row, run_rows, solo

pytestmark = pytest.mark.mlx


BYTES = 256 * 2**20

RECURRENT = ("lfm2", "mamba", "qwen3_next", "falcon_h1")

NEVER_CUTTABLE = ("gemma3_text", *RECURRENT)

ROUNDING = 1e-3

ANSWER = 8
"""Tokens of an answer."""

Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Make:
    made: dict[str, Path] = {}

    def make(model_type: str) -> Path:
        if model_type not in made:
            folder = tmp_path_factory.mktemp("models") / model_type
            made[model_type] = make_cache_model(folder, model_type)
        return made[model_type]

    return make


def way_of(model_type: str) -> Batching:
    """Recurrent layers read prompts one by one, because some of them do not honour padding."""
    return Batching.SERIAL_PREFILL if model_type in RECURRENT else Batching.TOGETHER


QUICK = {
    ("llama", Batching.TOGETHER),
    ("gemma3_text", Batching.TOGETHER),
    ("falcon_h1", Batching.SERIAL_PREFILL),
}
KINDS = [
    *((name, way_of(name)) for name in sorted(CONFIGURATIONS)),
    # These types are right in any way of running rows.
    *(("gemma3_text", way) for way in (Batching.SERIAL_PREFILL, Batching.ONE_ROW)),
    *(("lfm2", way) for way in (Batching.TOGETHER, Batching.ONE_ROW)),
]


def tokens_of(seed: int, length: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(VOCABULARY_SIZE - 4) for _ in range(length)]


class Pair:
    """An engine with a prefix cache beside one without."""

    def __init__(self, cached: MlxEngine, plain: MlxEngine) -> None:
        self.cached = cached
        self.plain = plain

    def known(self, row: Row) -> int:
        """Runs a row in both; what was known of it. The answers are equal but for rounding."""
        count = self.cached.insert(row)
        got, expected = (run_rows(engine)[int(row.key)] for engine in self.engines(row))
        assert [token.token for token in got] == [token.token for token in expected]
        for one, other in zip(got, expected, strict=True):
            assert one.logprobs is not None
            assert other.logprobs is not None
            assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=ROUNDING)
        return count

    def engines(self, row: Row) -> Iterator[MlxEngine]:
        yield self.cached
        self.plain.insert(row)
        yield self.plain


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.slow) for kind in KINDS],
    ids="-".join,
)
def kind(request: pytest.FixtureRequest) -> tuple[str, Batching]:
    name, way = request.param
    return name, way


@pytest.fixture(scope="module")
def model_type(kind: tuple[str, Batching]) -> str:
    return kind[0]


@pytest.fixture(scope="module")
def changes(kind: tuple[str, Batching], folder_of: Make) -> dict[str, Any]:
    """Of the launch spec: the way of running rows is known."""
    return {"known_batching": known_as(folder_of(kind[0]), kind[1])}


@pytest.fixture(scope="module")
def loaded(model_type: str, changes: dict[str, Any], folder_of: Make) -> Iterator[Pair]:
    folder = folder_of(model_type)
    with loaded_engine(folder, prefix_cache_bytes=BYTES, **changes) as cached:
        assert cached.prefixes is not None
        assert (cached.prefixes.room.cuttable_tokens is not None) == (model_type in NEVER_CUTTABLE)
        with loaded_engine(folder, **changes) as plain:
            yield Pair(cached, plain)


@pytest.fixture
def pair(loaded: Pair) -> Pair:
    loaded.cached.give_back()
    return loaded


def row_of(key: int, tokens: list[int], **changes: Any) -> Row:
    return make_row(key, tokens, max_tokens=ANSWER, top_logprobs=0, **changes)


@pytest.mark.bits
def test_the_same_prompt_again_computes_its_last_token(pair: Pair) -> None:
    tokens = tokens_of(1, 90)
    assert [pair.known(row_of(key, tokens)) for key in range(3)] == [0, 89, 89]


@pytest.mark.bits
def test_a_checkpoint_serves_every_prompt_that_continues_it(pair: Pair) -> None:
    system = tokens_of(1, 60)
    first = pair.known(row_of(1, system + tokens_of(2, 40), checkpoints=(60, 95)))
    others = [
        pair.known(row_of(key, system + tokens_of(key, 50), checkpoints=(60,))) for key in (3, 4)
    ]
    turn = pair.known(row_of(5, system + tokens_of(2, 40)[:35] + tokens_of(5, 30)))
    again = pair.known(row_of(6, system + tokens_of(3, 50)))
    assert (first, others, turn, again) == (0, [60, 60], 95, 109)


@pytest.mark.bits
def test_an_answer_is_gone_on_with(pair: Pair) -> None:
    tokens = tokens_of(1, 70)
    pair.known(row_of(1, tokens))
    answer = solo(pair.plain, row_of(1, tokens))
    known = pair.known(row_of(2, [*tokens, *answer, *tokens_of(2, 20)]))
    assert known in (70 + ANSWER - 1, 70 + ANSWER)


@pytest.mark.bits
def test_the_third_prompt_with_an_unnamed_beginning_finds_it(pair: Pair, model_type: str) -> None:
    stem = tokens_of(1, 64)
    known = [pair.known(row_of(key, stem + tokens_of(10 + key, 30))) for key in range(4)]
    assert known == [0, 0 if model_type in NEVER_CUTTABLE else 64, 64, 64]


@pytest.mark.bits
def test_rows_side_by_side_keep_and_use_checkpoints(pair: Pair) -> None:
    """Prompts of different length, in pieces, together: what is kept is each row's own."""
    stems = [tokens_of(stem, 40 + 17 * stem) for stem in range(3)]
    rows = [
        row_of(key, stem + tokens_of(50 + key, 5 + 13 * key), checkpoints=(len(stem),))
        for key, stem in enumerate(stems * 2)
    ]
    alone = {int(row.key): run_rows(pair.plain, [row])[int(row.key)] for row in rows}
    for expected_known in ([0, 0, 0], [len(stem) for stem in stems]):
        half = rows[:3] if expected_known[0] == 0 else rows[3:]
        assert [pair.cached.insert(row) for row in half] == expected_known
        for key, got in run_rows(pair.cached).items():
            assert [token.token for token in got] == [token.token for token in alone[key]]


@pytest.mark.bits
def test_a_row_cancelled_at_any_step_leaves_right_caches(pair: Pair) -> None:
    tokens = tokens_of(1, 150)
    for steps in range(6):
        pair.cached.insert(row_of(100 + steps, tokens + tokens_of(steps, 9), checkpoints=(64, 150)))
        for _ in range(steps):
            pair.cached.step()
        pair.cached.remove(row_of(100 + steps, tokens).key)
    assert pair.known(row_of(1, tokens + tokens_of(77, 20))) >= 64
