"""Prompts that begin alike: what they share is read once, and no answer changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import Batching
from mlxsup.worker.engine import Row
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.prefill import PassCost

from support.model_types.build import make_model
from support.models.tiny_model import make_tiny_model
from support.worker.mlx_rows import (
    check_no_row_is_left,
    known_as,
    loaded_engine,
    make_row,
    run_rows,
    solo,
    token_ids,
)

pytestmark = pytest.mark.mlx

BYTES = 256 << 20
SHARED = [(7 * n + n // 13) % 250 for n in range(900)]


@pytest.fixture(scope="module", params=["together", "serial", "state", "window"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp(request.param)
    types = {"state": "mamba2", "window": "gemma3_text"}
    if request.param in types:
        return make_model(parent, types[request.param])
    folder = make_tiny_model(parent)
    (folder / "way").write_text("serial_prefill" if request.param == "serial" else "together")
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Iterator[MlxEngine]:
    way = folder / "way"
    known = known_as(folder, Batching(way.read_text())) if way.exists() else None
    # No pass costs more than 256 tokens do.
    with (
        mock.patch.object(PassCost, "worthwhile", 0),
        loaded_engine(folder, prefix_cache_bytes=BYTES, known_batching=known) as engine,
    ):
        yield engine


@pytest.fixture
def engine(loaded: MlxEngine) -> MlxEngine:
    """An engine that keeps nothing of other tests."""
    loaded.give_back()
    return loaded


def rows_of(forks: list[int], *, tail: int = 20) -> list[Row]:
    """Rows that have so many first tokens of `SHARED`, and a tail of their own."""
    return [
        make_row(n + 1, SHARED[:fork] + [(n * 31 + i) % 250 for i in range(tail)], max_tokens=6)
        for n, fork in enumerate(forks)
    ]


def run(
    engine: MlxEngine, rows: list[Row]
) -> tuple[dict[int, list[int]], Counter[int], dict[int, int], Counter[int]]:
    """Return what each row got, how many tokens each had computed, and what each was lent.

    All hear of their prompts, those that wait for another, too, and nothing that goes back.
    """
    cached = {int(row.key): engine.insert(row) for row in rows}
    got: dict[int, list[int]] = {int(row.key): [] for row in rows}
    computed: Counter[int] = Counter()
    done: Counter[int] = Counter()
    heard_while_waiting: Counter[int] = Counter()
    while engine.row_count():
        result = engine.step()
        for token in result.tokens:
            if token.token is not None:
                got[int(token.key)].append(token.token)
        for read in result.prefill:
            assert read.done >= done[int(read.key)], "what is told never goes back"
            done[int(read.key)] = read.done
            heard_while_waiting.update([int(read.key)] if not read.computed else [])
            computed[int(read.key)] += read.computed
            if read.known is not None:
                cached[int(read.key)] = read.known
        engine.settle()
    assert all(done[int(row.key)] == len(row.tokens) for row in rows)
    return got, computed, cached, heard_while_waiting


def answer_alone(engine: MlxEngine, row: Row) -> list[int]:
    """Return the answer of a row that reads all of its prompt; nothing is kept of it."""
    answer = solo(engine, row)
    engine.give_back()
    return answer


def test_burst_reads_what_it_shares_once_and_answers_alike(engine: MlxEngine) -> None:
    rows = rows_of([900] * 3)
    expected = {int(row.key): answer_alone(engine, row) for row in rows}
    got, computed, cached, heard = run(engine, rows)
    assert got == expected
    assert computed[1] == 920
    assert {2, 3} <= heard.keys(), "those that wait hear of it"
    for key in (2, 3):
        assert computed[key] + cached[key] == 920
        assert cached[key] > 800, "the first one has read it"
    check_no_row_is_left(engine)


@pytest.mark.parametrize("folder", ["together", "window"], indirect=True)
def test_tails_behind_what_is_shared_are_read_in_one_pass(engine: MlxEngine) -> None:
    for row in rows_of([900] * 4):
        engine.insert(row)
    passes = []
    while engine.row_count():
        read = {int(one.key) for one in engine.step().prefill if one.computed > 1}
        passes += [read] if 4 in read else []
        engine.settle()
    assert passes == [{1, 2, 3, 4}], "that of the first one, too, which has read for the others"


def test_rows_that_fork_at_different_places_wait_for_one_another(engine: MlxEngine) -> None:
    rows = rows_of([600, 900, 900, 300, 605, 100])
    _, computed, cached, _ = run(engine, rows)
    assert computed[1] == 620
    assert cached[6] == 0, "so little is read sooner than waited for"
    for key, shared in ((2, 600), (3, 900), (4, 300), (5, 600)):
        assert shared - 40 < cached[key] <= shared
    check_no_row_is_left(engine)


@pytest.mark.parametrize("folder", ["together"], indirect=True)
def test_no_more_is_lent_than_the_prompt_has(engine: MlxEngine) -> None:
    """An answer that goes on may begin as another one's prompt."""
    [first] = rows_of([900])
    again = make_row(2, SHARED[:600], max_tokens=290, delivered=SHARED[600:880])
    for row in (first, again):
        assert engine.insert(row) == 0
    lent = []
    while engine.row_count():
        lent += [read.known for read in engine.step().prefill if read.key == again.key]
        engine.settle()
    assert [known for known in lent if known is not None] == [600]


def test_late_row_continues_from_one_that_still_answers(engine: MlxEngine) -> None:
    first, second = rows_of([900, 880])
    engine.insert(make_row(1, first.tokens, max_tokens=20))
    for _ in range(200):
        if any(token.token is not None for token in engine.step().tokens):
            break
    known = engine.insert(second)
    can_cut = engine.prefixes is not None and engine.prefixes.room.cuttable_tokens is None
    assert (known > 850) if can_cut else known <= 880
    run_rows(engine)
    check_no_row_is_left(engine)


@pytest.mark.parametrize(("leaves", "steps"), [("is cancelled", 2), ("is set aside", 0)])
def test_rows_that_wait_go_on_when_the_one_that_reads_leaves(
    engine: MlxEngine, leaves: str, steps: int
) -> None:
    rows = rows_of([900, 900, 900])
    alone = answer_alone(engine, rows[2])
    for row in rows:
        engine.insert(row)
    for _ in range(steps):
        engine.step()
    if leaves == "is cancelled":
        engine.remove(RequestKey(1))
    else:
        engine.set_aside(RequestKey(1), keep=False)
    assert token_ids(run_rows(engine)[3]) == alone
    check_no_row_is_left(engine)


def test_rows_that_wait_can_leave(engine: MlxEngine) -> None:
    for row in rows_of([900, 900, 900]):
        engine.insert(row)
    engine.step()
    engine.remove(RequestKey(2))
    [left] = engine.set_aside(RequestKey(3), keep=True)
    assert not left.is_kept, "nothing was read of it"
    run_rows(engine)
    check_no_row_is_left(engine)
