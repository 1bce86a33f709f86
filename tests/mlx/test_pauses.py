"""Rows that are set aside, in their caches: keys and values, sliding windows, states."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import Batching, FinishReason
from mlxsup.worker.engine import Row
from mlxsup.worker.engines.mlx.engine import MlxEngine

from support.daemon.paused_answers import answer_with_pauses, assert_same
from support.model_types.build import make_model
from support.model_types.scenarios import chunks_of
from support.models.tiny_model import make_tiny_model
from support.worker.loop_driver import LoopDriver
from support.worker.mlx_rows import check_no_row_is_left, known_as, loaded_engine, make_row, solo

pytestmark = [pytest.mark.mlx, pytest.mark.bits]


CHUNK = 8

PROMPT = [3 + 7 * n % 90 for n in range(45)]

KEY = RequestKey(1)

LONG = 80
"""Tokens of an answer: several times the windows of the tiny models."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    made = {name: make_model(base / name, name) for name in ("gemma3_text", "mamba")}
    return made | {"llama": make_tiny_model(base / "llama")}


WAYS = [
    *(("llama", way) for way in Batching),
    ("gemma3_text", Batching.TOGETHER),
    ("mamba", Batching.SERIAL_PREFILL),
]


@pytest.fixture(scope="module", params=WAYS, ids=" ".join)
def engine(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[MlxEngine]:
    name, way = request.param
    known = known_as(folders[name], way)
    with chunks_of(CHUNK), loaded_engine(folders[name], known_batching=known) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(engine: MlxEngine) -> list[int]:
    """Return the answer of a row that is never set aside."""
    return solo(engine, row_of(2))


def row_of(key: int = 1, max_tokens: int = 10, **changes: object) -> Row:
    return make_row(key, PROMPT, max_tokens, **changes)


@pytest.mark.parametrize("steps", [1, 4])
def test_a_prompt_that_is_set_aside_while_it_is_read_continues_there(
    engine: MlxEngine, expected: list[int], steps: int
) -> None:
    engine.insert(row_of())
    done = 0
    for _ in range(steps):
        done = engine.step().prefill[0].done
    [left] = engine.set_aside(KEY, keep=True)
    assert (left.key, left.token, left.is_kept) == (KEY, None, True)
    assert engine.bytes_held().kept > 0
    assert engine.insert(row_of()) == done == steps * CHUNK
    assert engine.bytes_held().kept == 0
    got: list[int | None] = []
    while engine.row_count():
        got += [token.token for token in engine.step().tokens]
    assert got == expected
    check_no_row_is_left(engine)


@pytest.mark.parametrize("held_steps", [0, 1])
def test_a_prompt_that_is_set_aside_again_before_its_next_chunk_keeps_its_state(
    engine: MlxEngine, expected: list[int], held_steps: int
) -> None:
    """As after a resume that waits for a lease, or behind other prompts."""
    engine.insert(row_of())
    for _ in range(2):
        engine.step()
    engine.set_aside(KEY, keep=True)
    kept = engine.bytes_held().kept
    for _ in range(2):
        assert engine.insert(row_of()) == 2 * CHUNK
        for _ in range(held_steps):
            engine.decode()
        [left] = engine.set_aside(KEY, keep=True)
        assert (left.token, left.is_kept, engine.bytes_held().kept) == (None, True, kept)
    assert solo(engine, row_of()) == expected
    check_no_row_is_left(engine)


def test_an_answer_that_is_set_aside_again_before_its_next_step_keeps_its_state(
    engine: MlxEngine, expected: list[int]
) -> None:
    engine.insert(row_of())
    got: list[int] = []
    while not got:
        got += [token.token for token in engine.step().tokens if token.token is not None]
    [left] = engine.set_aside(KEY, keep=True)
    assert left.token is not None
    assert left.token.token is not None
    got.append(left.token.token)
    kept = engine.bytes_held().kept
    assert engine.insert(row_of(delivered=got)) == len(PROMPT) + 1
    assert [again.is_kept for again in engine.set_aside(KEY, keep=True)] == [True]
    assert engine.bytes_held().kept == kept
    assert got + solo(engine, row_of(delivered=got)) == expected


def test_a_kept_state_serves_its_own_row_alone(engine: MlxEngine) -> None:
    engine.insert(row_of())
    for _ in range(3):
        engine.step()
    engine.set_aside(KEY, keep=True)
    assert engine.bytes_held().kept > 0
    engine.set_aside(KEY, keep=False)
    assert engine.bytes_held().kept == 0, "a pause that keeps nothing drops it"
    engine.insert(row_of())
    for _ in range(3):
        engine.step()
    engine.set_aside(KEY, keep=True)
    other = make_row(1, [5, *PROMPT], max_tokens=4)
    assert engine.insert(other) == 0, "other tokens under the same key: the state is dropped"
    engine.remove(KEY)
    assert engine.bytes_held().kept == 0


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_an_end_that_was_drawn_already_ends_the_answer(
    engine: MlxEngine, expected: list[int], finish: FinishReason
) -> None:
    place = next(n for n in range(2, 10) if expected[n] not in expected[:n])
    if finish is FinishReason.STOP:
        row, last = row_of(stop_token_ids=(expected[place],)), None
    else:
        row, last = row_of(max_tokens=place + 1), expected[place]
    engine.insert(row)
    got = 0
    while got < place:
        got += len(engine.step().tokens)
    [left] = engine.set_aside(KEY, keep=True)
    assert left.token is not None
    assert (left.token.token, left.token.finish) == (last, finish)
    assert not left.is_kept


@pytest.mark.parametrize("engine", WAYS[len(Batching) :], ids=" ".join, indirect=True)
def test_a_window_that_has_turned_many_times_continues(engine: MlxEngine) -> None:
    """Tokens, not log-probabilities: where a window begins in memory decides how sums round."""
    driver = LoopDriver(engine, engine.facts)
    try:
        whole = driver.answer(prompt_tokens=PROMPT, max_tokens=LONG, ignore_eos=True)
        answer = answer_with_pauses(
            driver, 17, keep=True, prompt_tokens=PROMPT, max_tokens=LONG, ignore_eos=True
        )
        assert_same(answer, whole)
    finally:
        driver.close()
    check_no_row_is_left(engine)


def test_a_kept_row_counts_its_own_tokens_in_any_company(engine: MlxEngine) -> None:
    assert engine.batch is not None
    sizes = []
    for company in (0, 3):
        for key in range(1, 2 + company):
            engine.insert(row_of(key))
        tokens = 0
        while tokens < 2:
            tokens += sum(token.key == KEY for token in engine.step().tokens)
        engine.set_aside(KEY, keep=True)
        sizes.append(engine.bytes_held().kept)
        engine.drop_kept(KEY)
        engine.remove(*(RequestKey(key) for key in range(2, 2 + company)))
    assert sizes[0] == sizes[1] > 0
    check_no_row_is_left(engine)
