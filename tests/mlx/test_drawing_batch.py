"""The seam to mlx-lm: its generator's rows are ours, and one call draws for all of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import Batching
from mlxsup.worker.engine import Row
from mlxsup.worker.engines.mlx.batch_sampler import BatchSampler
from mlxsup.worker.engines.mlx.drawing_batch import TableRow
from mlxsup.worker.engines.mlx.engine import MlxEngine

from support.mlx_rows import known_as, loaded_engine, make_row, run_rows, solo, token_ids
from support.tiny_model import VOCABULARY_SIZE, make_tiny_model

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=[Batching.TOGETHER, Batching.SERIAL_PREFILL])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[MlxEngine]:
    with loaded_engine(folder, known_batching=known_as(folder, request.param)) as engine:
        yield engine


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


class Calls:
    """Notes what samplers are asked for.

    Attributes:
        made: rows of each sampler that was made.
        drawn: shapes of the log-probabilities of each draw.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[int] = []
        self.drawn: list[tuple[int, ...]] = []
        make, draw = BatchSampler.__init__, BatchSampler.draw

        def noted_make(sampler: BatchSampler, rows: list[object], *more: object) -> None:
            self.made.append(len(rows))
            make(sampler, rows, *more)  # type: ignore[arg-type]

        def noted_draw(sampler: BatchSampler, logprobs: mx.array) -> mx.array:
            self.drawn.append(tuple(logprobs.shape))
            return draw(sampler, logprobs)

        monkeypatch.setattr(BatchSampler, "__init__", noted_make)
        monkeypatch.setattr(BatchSampler, "draw", noted_draw)


def test_a_step_draws_once_for_all_rows_and_makes_its_sampler_once(
    engine: MlxEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of_all_kinds(max_tokens=100)
    for row in rows:
        engine.insert(row)
    seen: set[int] = set()
    while len(seen) < len(rows):
        seen |= {int(token.key) for token in engine.step().tokens}
    calls = Calls(monkeypatch)
    for _ in range(4):
        engine.step()
    assert len(set(calls.drawn)) == 1
    assert (len(calls.drawn), calls.drawn[0][0]) == (4, len(rows))
    assert len(calls.made) <= 1, "a row may have joined in the step before"
    calls.made.clear()
    engine.remove(RequestKey(2))
    engine.step()
    engine.step()
    assert calls.made == [len(rows) - 1]
    assert calls.drawn[-1][0] == len(rows) - 1
    engine.remove(*(row.key for row in rows))


@pytest.mark.bits
def test_rows_of_all_kinds_answer_as_alone_while_others_join_and_leave(engine: MlxEngine) -> None:
    alone = {int(row.key): solo(engine, row) for row in rows_of_all_kinds()}
    dice = random.Random(2)
    for _ in range(4):
        rows = rows_of_all_kinds()
        dice.shuffle(rows)
        leaves = rows.pop()
        engine.insert(leaves)
        got: dict[int, list[int]] = {}
        while rows or engine.has_rows():
            if rows:
                engine.insert(rows.pop())
            elif leaves.key is not None:
                engine.remove(leaves.key)
            for token in engine.step().tokens:
                if token.token is not None:
                    got.setdefault(int(token.key), []).append(token.token)
        left = got.pop(int(leaves.key), [])
        assert left == alone[int(leaves.key)][: len(left)]
        assert got == {key: tokens for key, tokens in alone.items() if key != int(leaves.key)}


@pytest.mark.bits
def test_a_row_in_the_place_of_another_has_penalties_of_its_own(engine: MlxEngine) -> None:
    """The tokens that the other row has seen are not in its window."""
    penalties = {"frequency_penalty": 2.0, "penalty_window": 0}
    first = make_row(1, [5, 6, 7], max_tokens=6, **penalties)
    second = make_row(2, [8, 9], max_tokens=12, **penalties)
    expected = solo(engine, second)
    engine.insert(first)
    while engine.has_rows():
        engine.step()
    assert token_ids(run_rows(engine, [second])[2]) == expected


def test_log_probabilities_are_cut_out_for_the_rows_that_ask(
    engine: MlxEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all others they are never taken apart."""
    engine.insert(make_row(9, [1], max_tokens=1))
    engine.step()  # the first token of an engine shows the width of its output
    run_rows(engine)
    cut: list[int] = []
    take = TableRow.cut

    def noted(row: TableRow) -> mx.array:
        cut.append(1)
        return take(row)

    monkeypatch.setattr(TableRow, "cut", noted)
    rows = rows_of_all_kinds(max_tokens=6)
    run_rows(engine, rows)
    assert cut == []
    asking = make_row(7, [3, 4], max_tokens=5, top_logprobs=2)
    got = run_rows(engine, [*rows, asking])[7]
    assert len(cut) == 5
    assert all(token.logprobs is not None and len(token.logprobs.top) == 2 for token in got)


@pytest.mark.parametrize("leave", ["ended", "removed"])
def test_rows_that_have_left_leave_no_table_and_no_sampler(engine: MlxEngine, leave: str) -> None:
    """With 64 rows and 150,000 ids each table has 38 MB."""

    def held_after(rows: list[Row]) -> int:
        for row in rows:
            engine.insert(row)
        while leave == "ended" and engine.has_rows():
            engine.step()
        for _ in range(8):
            engine.step()
        engine.remove(*(row.key for row in rows))
        engine.give_back()
        return engine.bytes_held().active

    rows = rows_of_all_kinds(max_tokens=16)
    assert held_after(rows) == held_after(rows[:1]) == held_after(rows)
