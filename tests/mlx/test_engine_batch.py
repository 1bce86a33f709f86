"""Rows in a batch: the same answers as alone, whoever else is there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import Batching, FinishReason
from mlxsup.worker.engine import Row
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.sampling import PLAIN, derive_key, make_draws

from support.mlx_draws import drawer, draws_of
from support.mlx_rows import (
    check_no_row_is_left,
    known_as,
    loaded_engine,
    make_row,
    random_state,
    run_rows,
    solo,
    token_ids,
)
from support.model_types.scenarios import chunks_of
from support.tiny_model import VOCABULARY_SIZE, make_tiny_model

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module", params=list(Batching))
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MlxEngine]:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    with loaded_engine(folder, known_batching=known_as(folder, request.param)) as engine:
        yield engine


def make_prompt(seed: int, length: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(VOCABULARY_SIZE) for _ in range(length)]


def greedy_rows() -> list[Row]:
    lengths = [1, 2, 3, 9, 17, 40, 75, 120]
    return [
        make_row(key, make_prompt(key, length), max_tokens=12 + 3 * key)
        for key, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def alone(engine: MlxEngine) -> dict[int, list[int]]:
    """The answer of each greedy row with nobody else in the engine."""
    return {int(row.key): solo(engine, row) for row in greedy_rows()}


@pytest.mark.bits
def test_batched_greedy_answers_equal_solo_ones_A8_C10(
    engine: MlxEngine, alone: dict[int, list[int]]
) -> None:
    together = run_rows(engine, greedy_rows())
    assert {key: token_ids(got) for key, got in together.items()} == alone
    assert len({tuple(tokens[:8]) for tokens in alone.values()}) == len(alone)


def test_every_row_gets_its_tokens_once_and_one_finish_C4(engine: MlxEngine) -> None:
    rows = greedy_rows()
    for row, got in zip(rows, run_rows(engine, rows).values(), strict=True):
        assert len(got) == row.max_tokens
        assert [token.finish for token in got[:-1]] == [None] * (row.max_tokens - 1)
        assert got[-1].finish is FinishReason.LENGTH


@pytest.mark.bits
@pytest.mark.parametrize("seed", range(4))
def test_answers_survive_insert_and_remove_churn_C10_D6_D8(
    engine: MlxEngine, alone: dict[int, list[int]], seed: int
) -> None:
    rows = {int(row.key): row for row in greedy_rows()}
    numbers = random.Random(seed)
    waiting = list(rows)
    numbers.shuffle(waiting)
    victims = set(waiting[::3])
    got: dict[int, list[int]] = {key: [] for key in rows}
    while waiting or engine.has_rows():
        if waiting and numbers.random() < 0.4:
            engine.insert(rows[waiting.pop()])
        for token in engine.step().tokens:
            assert token.token is not None
            got[int(token.key)].append(token.token)
        if numbers.random() < 0.2 and (key := numbers.choice(list(rows))) in victims:
            engine.remove(RequestKey(key))
            engine.remove(RequestKey(key))
    for key, tokens in got.items():
        if key in victims:
            assert tokens == alone[key][: len(tokens)]
        else:
            assert tokens == alone[key]


def test_a_row_is_removed_in_mid_prefill_D3(engine: MlxEngine) -> None:
    other = make_row(2, make_prompt(2, 5), max_tokens=20)
    expected = solo(engine, other)
    engine.insert(make_row(1, make_prompt(1, 3000)))
    engine.insert(other)
    done = [progress.done for progress in engine.step().prefill if progress.key == 1]
    assert 0 < done[0] < 2999
    engine.remove(RequestKey(1))
    got = run_rows(engine)
    assert list(got) == [2]
    assert token_ids(got[2]) == expected


def test_a_row_removed_before_its_first_step_leaves_nothing_D1(engine: MlxEngine) -> None:
    engine.insert(make_row(1, [1, 2, 3]))
    engine.remove(RequestKey(1))
    assert not engine.has_rows()
    engine.remove(RequestKey(99))


def test_a_key_can_be_used_again_at_once_D7(engine: MlxEngine) -> None:
    engine.insert(make_row(1, make_prompt(1, 9)))
    engine.step()
    engine.remove(RequestKey(1))
    row = make_row(1, make_prompt(2, 9))
    assert token_ids(run_rows(engine, [row])[1]) == solo(engine, row)


def test_nothing_is_left_of_many_cancelled_rows_D9(engine: MlxEngine) -> None:
    numbers = random.Random(0)
    for key in range(200):
        engine.insert(make_row(key, make_prompt(key, numbers.randrange(1, 40))))
        for _ in range(numbers.randrange(4)):
            engine.step()
        engine.remove(RequestKey(key))
    assert not engine.has_rows()
    check_no_row_is_left(engine)


def test_prefill_progress_is_reported_to_the_end(engine: MlxEngine) -> None:
    engine.insert(make_row(1, make_prompt(1, 300), max_tokens=2))
    seen: list[tuple[int, int]] = []
    while engine.has_rows():
        seen += [(progress.done, progress.total) for progress in engine.step().prefill]
    assert seen == sorted(seen)
    assert seen[-1] == (300, 300)


def test_a_request_that_comes_in_mid_decode_gets_its_first_token_in_three_steps_C2(
    engine: MlxEngine,
) -> None:
    engine.insert(make_row(1, make_prompt(1, 5), max_tokens=100))
    for _ in range(10):
        engine.step()
    engine.insert(make_row(2, make_prompt(2, 4), max_tokens=2))
    steps = 0
    with chunks_of(8):
        while not any(token.key == 2 for token in engine.step().tokens):
            steps += 1
    assert steps <= 2, "prompt, last token of the prompt, first token of the answer"
    engine.remove(RequestKey(1))
    run_rows(engine)


def sampled(key: int, **changes: float | int) -> Row:
    values: dict[str, float | int] = {"temperature": 1.0, "top_p": 0.95, "seed": 42}
    return make_row(key, make_prompt(3, 12), max_tokens=24, **(values | changes))


@pytest.mark.bits
def test_seeded_rows_answer_alike_alone_and_in_any_batch_A6_C8(engine: MlxEngine) -> None:
    alone = solo(engine, sampled(1))
    assert solo(engine, sampled(1)) == alone
    for others in (
        [make_row(2, make_prompt(2, 30))],
        [sampled(2, seed=43), sampled(3, seed=44, temperature=0.7), make_row(4, [5])],
    ):
        assert token_ids(run_rows(engine, [*others, sampled(1)])[1]) == alone


def test_seeds_and_temperatures_differ_A6(engine: MlxEngine) -> None:
    answers = [solo(engine, sampled(1, seed=seed)) for seed in range(4)]
    assert len({tuple(answer) for answer in answers}) == 4
    assert solo(engine, sampled(1, temperature=0.3)) != solo(engine, sampled(1, temperature=3.0))


def test_sampling_leaves_the_global_random_state_alone_A6(engine: MlxEngine) -> None:
    mx.random.seed(7)
    before = random_state()
    first = solo(engine, sampled(1))
    assert random_state() == before
    mx.random.seed(8)
    assert solo(engine, sampled(1)) == first


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 1e-300},
        {"temperature": 1e-4},
        {"temperature": 10.0},
        {"temperature": 1.0, "top_p": 1e-12},
        {"temperature": 1e-4, "top_p": 1e-12},
    ],
)
def test_no_parameter_breaks_a_step_C7(engine: MlxEngine, parameters: dict[str, float]) -> None:
    row = sampled(1, **parameters)
    tokens = solo(engine, row)
    assert len(tokens) == row.max_tokens
    assert all(0 <= token < VOCABULARY_SIZE for token in tokens)
    if parameters["temperature"] < 1.0 or "top_p" in parameters:
        greedy_answer = solo(engine, sampled(1, temperature=0.0))
        assert tokens == greedy_answer, "cold or narrow enough to be greedy"


def test_rows_that_ask_for_nothing_have_nothing_of_their_own() -> None:
    assert make_draws(make_row(1, [1]), ending=[2], spared=[3]) is PLAIN
    assert make_draws(make_row(2, [1], top_p=0.5, top_k=3, seed=2)) is PLAIN


def test_draws_follow_the_probabilities_and_top_p() -> None:
    logprobs = mx.log(mx.array([[0.5, 0.3, 0.15, 0.05]]))
    draw = drawer(draws_of(top_p=0.75))
    counts = [0, 0, 0, 0]
    for _ in range(400):
        counts[draw(logprobs)[0]] += 1
    assert counts[2] == counts[3] == 0, "0.5 + 0.3 reach 0.75"
    assert 200 <= counts[0] <= 300  # 0.625 of 400 expected, 5 deviations away
    draw = drawer(draws_of(top_p=1.0))
    assert {draw(logprobs)[0] for _ in range(400)} == {0, 1, 2, 3}


def test_keys_of_draws_do_not_collide() -> None:
    keys = {derive_key(seed, number) for seed in (0, 1, 2, 2**63 - 1) for number in range(500)}
    assert len(keys) == 2000


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


def test_a_second_row_with_the_same_key_is_refused(engine: MlxEngine) -> None:
    engine.insert(make_row(1, [1, 2]))
    with pytest.raises(ValueError, match="already"):
        engine.insert(make_row(1, [1, 2]))
    engine.remove(RequestKey(1))
