"""Rows in a batch of real MLX, in each way of running them: answers, joins, leaves."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import Batching, FinishReason
from mlxsup.worker.engine import Row
from mlxsup.worker.engines.mlx import batch as mlx_batch
from mlxsup.worker.engines.mlx.batch_modes import LoneDecode
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.sampler import DrawingBatch

from support.model_types.scenarios import chunks_of
from support.models.tiny_model import VOCABULARY_SIZE, make_tiny_model
from support.worker.mlx_rows import (
    check_no_row_is_left,
    known_as,
    loaded_engine,
    make_row,
    random_state,
    run_rows,
    solo,
    token_ids,
)

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module", params=list(Batching))
def engine(request: pytest.FixtureRequest, tiny: Path) -> Iterator[MlxEngine]:
    with loaded_engine(tiny, known_batching=known_as(tiny, request.param)) as engine:
        yield engine


def make_prompt(seed: int, length: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(VOCABULARY_SIZE) for _ in range(length)]


def test_a_key_is_used_by_one_row_and_again_at_once_D7(engine: MlxEngine) -> None:
    engine.insert(make_row(1, make_prompt(1, 9)))
    with pytest.raises(ValueError, match="already"):
        engine.insert(make_row(1, [1, 2]))
    engine.step()
    engine.remove(RequestKey(1))
    row = make_row(1, make_prompt(2, 9))
    assert token_ids(run_rows(engine, [row])[1]) == solo(engine, row)


def test_nothing_is_left_of_many_cancelled_rows_D9(engine: MlxEngine) -> None:
    numbers = random.Random(0)
    kinds: tuple[dict[str, Any], ...] = (
        {}, {"prompt_logprobs": 1}, {"top_logprobs": 2}, {"max_tokens": 0}
    )  # fmt: skip
    for key in range(20):
        prompt = make_prompt(key, numbers.randrange(1, 40))
        engine.insert(make_row(key, prompt, **kinds[key % len(kinds)]))
        for _ in range(numbers.randrange(4)):
            engine.step()
        engine.remove(RequestKey(key))
    assert not engine.row_count()
    check_no_row_is_left(engine)


def test_sampling_leaves_the_global_random_state_alone_A6(engine: MlxEngine) -> None:
    row = make_row(1, make_prompt(3, 12), max_tokens=24, temperature=1.0, top_p=0.95, seed=42)
    mx.random.seed(7)
    before = random_state()
    first = solo(engine, row)
    assert random_state() == before
    mx.random.seed(8)
    assert solo(engine, row) == first


def test_an_end_of_text_token_ends_the_row_without_a_token(
    engine: MlxEngine, tmp_path: Path
) -> None:
    prompt = make_prompt(1, 12)
    answer = solo(engine, make_row(1, prompt, max_tokens=10))
    end = answer[4]
    stop_at = answer.index(end)
    with loaded_engine(make_tiny_model(tmp_path, eos_token_id=end)) as stopping:
        got = run_rows(stopping, [make_row(1, prompt, max_tokens=10)])[1]
        at_the_limit = run_rows(stopping, [make_row(1, prompt, max_tokens=stop_at + 1)])[1]
    assert token_ids(got) == answer[:stop_at]
    assert (got[-1].token, got[-1].finish) == (None, FinishReason.STOP)
    assert at_the_limit == got, "the end of the text counts before the limit"


@pytest.fixture(params=list(Batching))
def keeping_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MlxEngine]:
    folder = make_tiny_model(tmp_path / "m")
    known = known_as(folder, request.param)
    # Whole prompts in one step, and none waits for what passes have cost, however busy the machine
    # is: no row ends while another is read.
    changes: dict[str, Any] = {"prefix_cache_bytes": 1 << 28, "decode_share": 0.0}
    with (
        chunks_of(64),
        loaded_engine(folder, known_batching=known, **changes) as keeping_engine,
    ):
        yield keeping_engine


@pytest.fixture
def removals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each change of the batch took out."""
    seen: list[int] = []
    real = DrawingBatch.filter

    def filtered(self: Any, keep: list[int]) -> None:
        seen.append(len(self.uids) - len(keep))
        real(self, keep)

    monkeypatch.setattr(DrawingBatch, "filter", filtered)
    return seen


def prompt(key: int) -> list[int]:
    return [50 + key, 200 + key, 3, 900 - key, 17]


def test_a_storm_of_cancels_is_one_change(keeping_engine: MlxEngine, removals: list[int]) -> None:
    alone = {key: solo(keeping_engine, make_row(key, prompt(key))) for key in (1, 8)}
    for key in range(1, 9):
        keeping_engine.insert(make_row(key, prompt(key)))
    got: dict[int, list[int]] = {}
    while len(got.get(8, [])) < 3:
        for token in keeping_engine.step().tokens:
            got.setdefault(int(token.key), []).append(token.token or 0)
    removals.clear()
    keeping_engine.remove(*map(RequestKey, range(2, 8)))
    assert removals in ([6], []), "lone rows are in no batch"
    assert keeping_engine.row_count() == 2
    for key, tokens in run_rows(keeping_engine).items():
        got[key] += token_ids(tokens)
    assert {key: got[key] for key in (1, 8)} == alone


def test_removed_rows_keep_their_prefixes(keeping_engine: MlxEngine) -> None:
    long = {key: prompt(key) * 10 for key in range(4)}
    for key, tokens in long.items():
        keeping_engine.insert(make_row(key, tokens, max_tokens=30))
    seen: set[int] = set()
    while len(seen) < 4:
        seen |= {int(token.key) for token in keeping_engine.step().tokens}
    waiting = RequestKey(7)
    keeping_engine.insert(make_row(7, prompt(7) * 10))
    keeping_engine.remove(*map(RequestKey, long), waiting)
    assert not keeping_engine.row_count()
    cached = {key: keeping_engine.insert(make_row(key, tokens)) for key, tokens in long.items()}
    assert min(cached.values()) >= 48
    assert keeping_engine.insert(make_row(7, prompt(7) * 10)) < 10, "nothing was computed for it"
    run_rows(keeping_engine)


@pytest.fixture(scope="module", params=[Batching.TOGETHER, Batching.SERIAL_PREFILL])
def batched_engine(request: pytest.FixtureRequest, tiny: Path) -> Iterator[MlxEngine]:
    with loaded_engine(tiny, known_batching=known_as(tiny, request.param)) as batched_engine:
        yield batched_engine


def rows_of_all_kinds(max_tokens: int = 16) -> list[Row]:
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
        {"repetition_penalty": 1.3, "penalty_window": 0},
        {"temperature": 1.0, "frequency_penalty": 0.5, "penalty_window": 4, "min_tokens": 6},
        {"logit_bias": {7: 3.0}, "temperature": 2.0, "xtc_probability": 0.5},
    )
    dice = random.Random(1)
    return [
        make_row(
            key,
            [dice.randrange(VOCABULARY_SIZE) for _ in range(3 + 5 * key)],
            max_tokens=max_tokens,
            **{"seed": key, **kind},
        )
        for key, kind in enumerate(kinds)
    ]


@pytest.mark.bits
def test_rows_of_all_kinds_answer_as_alone_while_others_join_and_leave(
    batched_engine: MlxEngine,
) -> None:
    alone = {int(row.key): solo(batched_engine, row) for row in rows_of_all_kinds()}
    dice = random.Random(2)
    for _ in range(3):
        rows = rows_of_all_kinds()
        dice.shuffle(rows)
        leaves = rows.pop()
        batched_engine.insert(leaves)
        got: dict[int, list[int]] = {}
        while rows or batched_engine.row_count():
            if rows:
                batched_engine.insert(rows.pop())
            elif leaves.key is not None:
                batched_engine.remove(leaves.key)
            for token in batched_engine.step().tokens:
                if token.token is not None:
                    got.setdefault(int(token.key), []).append(token.token)
        left = got.pop(int(leaves.key), [])
        assert left == alone[int(leaves.key)][: len(left)]
        assert got == {key: tokens for key, tokens in alone.items() if key != int(leaves.key)}


@pytest.mark.parametrize("leave", ["ended", "removed"])
def test_rows_that_have_left_leave_no_table_and_no_sampler(
    batched_engine: MlxEngine, leave: str
) -> None:
    """With 64 rows and 150,000 ids each table has 38 MB."""

    def held_after(rows: list[Row], leave: str = leave) -> int:
        for row in rows:
            batched_engine.insert(row)
        while leave == "ended" and batched_engine.row_count():
            batched_engine.step()
        for _ in range(8):
            batched_engine.step()
        batched_engine.remove(*(row.key for row in rows))
        batched_engine.give_back()
        return batched_engine.bytes_held().active

    rows = rows_of_all_kinds(max_tokens=16)
    held_after(rows, "ended")  # made once, and only by rows whose prompt has been read
    assert held_after(rows) == held_after(rows[:1]) == held_after(rows)


def test_memory_for_reuse_is_given_back_every_512_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As mlx-lm does: a row's cache grows in new buffers, and the old ones would stay."""
    steps: list[list[Any]] = []
    given_back_in: list[int] = []
    monkeypatch.setattr(mx, "clear_cache", lambda: given_back_in.append(1 + len(steps)))
    decode = LoneDecode(None)
    while len(steps) < 1100:
        steps.append(decode.next())
    assert given_back_in == [512, 1024]


@pytest.mark.parametrize("plan_s", [0.0, 1.0], ids=["exact shapes", "shapes that have run"])
def test_padded_passes_change_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan_s: float
) -> None:
    """What pads the tokens is cut off again, and what pads the keys is masked."""
    folder = make_tiny_model(tmp_path)
    prompts = {1: 300, 2: 9, 3: 10, 4: 41, 5: 1, 6: 30}
    rows = [
        make_row(key, make_prompt(key, length), 12, top_logprobs=0)
        for key, length in prompts.items()
    ]
    known = known_as(folder, Batching.TOGETHER)
    with chunks_of(64), loaded_engine(folder, known_batching=known) as engine:
        alone = {int(row.key): run_rows(engine, [row])[int(row.key)] for row in rows}
        assert engine.batch is not None
        monkeypatch.setattr(mlx_batch, "PLAN_S", plan_s)
        engine.batch.pad()
        for row in rows:
            engine.insert(row)
            engine.step()
        together = run_rows(engine)
        check_no_row_is_left(engine)
    for key, got in alone.items():
        have = together.get(key, [])
        assert token_ids(have) == token_ids(got)[len(got) - len(have) :]
        for one, other in zip(have[::-1], got[::-1], strict=False):
            assert one.logprobs
            assert other.logprobs
            assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-5)
