"""Rows that leave together change mlx-lm's batch once: each change costs a read for every layer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.generate import BatchGenerator

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import Batching
from mlxsup.worker.engines.mlx.engine import MlxEngine

from support.mlx_rows import known_as, loaded_engine, make_row, run_rows, solo, token_ids
from support.model_types.scenarios import chunks_of
from support.tiny_model import make_tiny_model

pytestmark = pytest.mark.mlx


@pytest.fixture(params=list(Batching))
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MlxEngine]:
    folder = make_tiny_model(tmp_path / "m")
    known = known_as(folder, request.param)
    # Whole prompts in one step, however busy the machine is: no row ends while another is read.
    with (
        chunks_of(64),
        loaded_engine(folder, known_batching=known, prefix_cache_bytes=1 << 28) as engine,
    ):
        yield engine


@pytest.fixture
def removals(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """How many rows each change of the generator took out."""
    seen: list[list[int]] = []
    real = BatchGenerator.remove

    def remove(self: BatchGenerator, uids: list[int], *args: Any, **named: Any) -> Any:
        seen.append(list(uids))
        return real(self, uids, *args, **named)

    monkeypatch.setattr(BatchGenerator, "remove", remove)
    return seen


def prompt(key: int) -> list[int]:
    return [50 + key, 200 + key, 3, 900 - key, 17]


def test_a_storm_of_cancels_is_one_change(engine: MlxEngine, removals: list[list[int]]) -> None:
    alone = {key: solo(engine, make_row(key, prompt(key))) for key in (1, 8)}
    removals.clear()
    for key in range(1, 9):
        engine.insert(make_row(key, prompt(key)))
    got: dict[int, list[int]] = {}
    while len(got.get(8, [])) < 3:
        for token in engine.step().tokens:
            got.setdefault(int(token.key), []).append(token.token or 0)
    engine.remove(*map(RequestKey, range(2, 8)))
    assert [len(uids) for uids in removals] in ([6], []), "lone rows are in no generator"
    assert engine.row_count() == 2
    for key, tokens in run_rows(engine).items():
        got[key] += token_ids(tokens)
    assert {key: got[key] for key in (1, 8)} == alone


def test_what_was_computed_for_each_is_kept(engine: MlxEngine) -> None:
    long = {key: prompt(key) * 10 for key in range(4)}
    for key, tokens in long.items():
        engine.insert(make_row(key, tokens, max_tokens=30))
    seen: set[int] = set()
    while len(seen) < 4:
        seen |= {int(token.key) for token in engine.step().tokens}
    waiting = RequestKey(7)
    engine.insert(make_row(7, prompt(7) * 10))
    engine.remove(*map(RequestKey, long), waiting)
    assert not engine.has_rows()
    cached = {key: engine.insert(make_row(key, tokens)) for key, tokens in long.items()}
    assert min(cached.values()) >= 48
    assert engine.insert(make_row(7, prompt(7) * 10)) < 10, "nothing was computed for it"
    run_rows(engine)


def test_forms_that_end_in_one_step_are_one_change(
    engine: MlxEngine, removals: list[list[int]]
) -> None:
    pytest.importorskip("llguidance")
    from mlxsup.protocol.body import RequestBody
    from mlxsup.protocol.states import Channel

    form = {"type": "regex", "regex": "ab"}
    for key in range(4):
        grammar = engine.text.grammar(
            RequestBody(prompt="x", response_format=form), Channel.CONTENT
        )
        engine.insert(make_row(key, prompt(1), grammar=grammar))
    engine.insert(make_row(9, prompt(9), max_tokens=12))
    removals.clear()
    got = run_rows(engine)
    assert [len(uids) for uids in removals] in ([4], []), "lone rows are in no generator"
    assert len(token_ids(got[9])) == 12
