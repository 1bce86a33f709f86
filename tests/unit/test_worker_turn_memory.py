"""What the step loop makes of a budget for its rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxsup.protocol.cache_cost import GROWTH_TOKENS, cache_bytes
from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import PauseReason, Priority, RowState
from mlxsup.protocol.worker_messages import Accepted, Dispatch, PauseRow, RowDelta, SetBudget, Step
from mlxsup.worker.engine import RowToken, StepResult
from mlxsup.worker.loop import StepLoop

from support.turn_bench import FACTS, STEP_TIMEOUT_S, A, B, Bench

LAYERS = (CacheLayers(layers=1, token_bytes=1),)
PROMPT_TOKENS = 3


@pytest.fixture
def bench() -> Bench:
    made = Bench()
    made.loop = StepLoop(
        engine=made.engine,
        facts=replace(FACTS, cache_layers=LAYERS),
        link=made.around,
        text=made.around,
        board=made.board,
        max_concurrency=2,
        step_timeout_s=STEP_TIMEOUT_S,
        clock=lambda: made.now,
    )
    return made


def bytes_of(rows: int, longest: int) -> int:
    return cache_bytes(LAYERS, rows=rows, longest=longest)


ROOMY = bytes_of(2, PROMPT_TOKENS + GROWTH_TOKENS)
"""Enough for two of them to join each other."""


def set_budget(bench: Bench, rows_bytes: int, number: int = 1, *, gives_back: bool = False) -> None:
    bench.around.inbox.append(
        SetBudget(number=number, rows_bytes=rows_bytes, gives_back=gives_back)
    )


def rows_of(messages: list[Message]) -> list[RowDelta]:
    rows = [row for message in messages if isinstance(message, Step) for row in message.rows]
    return [row for row in rows if isinstance(row, RowDelta)]


def left(key: RequestKey) -> RowDelta:
    return RowDelta(key=key, paused=RowState.DROPPED, pause_reason=PauseReason.MEMORY)


def test_a_row_without_room_returns_to_the_supervisor_once_it_is_accepted(bench: Bench) -> None:
    set_budget(bench, ROOMY - 1)
    bench.dispatch(A, B)
    bench.prepare(A)
    bench.prepare(B)
    bench.loop.turn()
    said = bench.sent()
    assert [m.key for m in said if isinstance(m, Accepted)] == [A, B]
    assert rows_of(said) == [left(B)]
    assert list(bench.engine.rows) == [A]
    assert bench.loop.open_keys == {A}
    assert bench.engine.returned == 0, "it held nothing"


def test_both_run_if_there_is_room(bench: Bench) -> None:
    set_budget(bench, ROOMY)
    bench.start(A, B)
    assert list(bench.engine.rows) == [A, B]


def test_a_row_leaves_before_the_step_for_which_there_is_no_room(bench: Bench) -> None:
    """Every token counts, and the last one served leaves, without its state."""
    set_budget(bench, ROOMY)
    bench.start(A, B)
    set_budget(bench, bytes_of(2, PROMPT_TOKENS), number=2)
    bench.engine.results = [StepResult(tokens=[RowToken(key=A, token=65)])]
    bench.loop.turn()
    assert rows_of(bench.sent())[0].key == A
    made = len(bench.engine.made)
    bench.loop.turn()
    assert rows_of(bench.sent()) == [left(B)]
    assert bench.engine.set_asides == [((B,), False)]
    assert bench.engine.returned == 1, "what it had computed is of no use to others"
    assert len(bench.engine.made) == made + 1, "the one that stays runs on"


def test_the_row_of_the_lowest_class_leaves(bench: Bench) -> None:
    set_budget(bench, ROOMY)
    for key, priority in ((A, Priority.BATCH), (B, Priority.INTERACTIVE)):
        bench.around.inbox.append(Dispatch(key=key, body=b"body", priority=priority))
        bench.loop.drain()
        bench.prepare(key)
    bench.loop.turn()
    bench.sent()
    set_budget(bench, bytes_of(1, PROMPT_TOKENS), number=2)
    bench.loop.turn()
    assert rows_of(bench.sent()) == [left(A)]


def test_a_row_that_may_not_leave_stays_if_another_may(bench: Bench) -> None:
    set_budget(bench, ROOMY)
    for key, may_leave in ((A, True), (B, False)):
        bench.around.inbox.append(Dispatch(key=key, body=b"body", may_leave=may_leave))
        bench.loop.drain()
        bench.prepare(key)
    bench.loop.turn()
    bench.sent()
    set_budget(bench, bytes_of(1, PROMPT_TOKENS), number=2)
    bench.loop.turn()
    assert rows_of(bench.sent()) == [left(A)]


def test_a_row_that_does_not_fit_alone_leaves_too(bench: Bench) -> None:
    set_budget(bench, ROOMY)
    bench.start(A)
    set_budget(bench, bytes_of(1, PROMPT_TOKENS) - 1, number=2)
    bench.loop.turn()
    assert rows_of(bench.sent()) == [left(A)]
    assert bench.loop.open_keys == frozenset()


def test_the_beat_says_which_budget_the_rows_keep_to(bench: Bench) -> None:
    """Only once the row that is too much has left."""
    bench.start(A, B)
    bench.loop.turn()
    assert bench.board.beat().budget == 0
    set_budget(bench, bytes_of(1, PROMPT_TOKENS), number=1)
    bench.around.flushes = [False]
    bench.loop.turn()  # the supervisor reads nothing: nothing is done
    assert (bench.board.beat().budget, len(bench.engine.rows)) == (0, 2)
    bench.loop.turn()
    assert (bench.board.beat().budget, len(bench.engine.rows)) == (1, 1)


def test_it_gives_back_after_the_rows_have_left_that_must_leave(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may leave something behind for reuse."""
    bench.start(A)
    bench.start(B)
    set_budget(bench, ROOMY, gives_back=True)
    bench.around.inbox.append(PauseRow(key=B, keep=False))
    rows_then: list[list[RequestKey]] = []
    monkeypatch.setattr(bench.engine, "give_back", lambda: rows_then.append([*bench.engine.rows]))
    bench.loop.turn()
    assert rows_then == [[A]]
