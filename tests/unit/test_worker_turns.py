"""What one turn of the step loop makes of what its engine, its texts and its link give."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mlxsup.protocol.ids import RequestKey, pack_tokens
from mlxsup.protocol.states import FinishReason, WorkerPhase
from mlxsup.protocol.worker_messages import (
    Accepted,
    CancelRow,
    Exit,
    PrefillProgress,
    Rejected,
    RowDelta,
    Step,
)
from mlxsup.worker.engine import (
    EngineBytes,
    RowPrefill,
    RowToken,
    StepResult,
    WorkerFaultError,
)
from mlxsup.worker.engines.fake.text import encode_text
from mlxsup.worker.text.grammar import Grammar

from support.turn_bench import A, B, Bench, C

X = encode_text("x")[0]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_request_is_prepared_accepted_and_read_with_the_models_sampling(bench: Bench) -> None:
    bench.dispatch(A)
    assert bench.around.submitted == [(A, b"body", None)]
    bench.prepare(A)
    bench.engine.results = [StepResult(prefill=[RowPrefill(key=A, done=2, total=3),
                                                RowPrefill(key=C, done=1, total=1)])]  # fmt: skip
    assert bench.loop.turn()
    accepted, step = bench.sent()
    assert isinstance(accepted, Accepted)
    assert (accepted.key, accepted.tokenize_s) == (A, 0.25)
    assert accepted.acceptance.parameters["temperature"] == 0.5
    assert (accepted.acceptance.prompt_tokens, accepted.acceptance.fingerprint) == (
        pack_tokens([5, 6, 7]), "f"
    )  # fmt: skip
    assert bench.engine.rows[A].sampling.temperature == 0.5
    assert step == Step(step=1, prefill=[PrefillProgress(key=A, done=2, total=3)])


def test_a_step_says_what_it_cost_and_for_which_rows(bench: Bench) -> None:
    """A row that left before it is no part of it."""
    bench.start(A, B)
    bench.around.inbox.append(CancelRow(key=B))
    bench.engine.results = [
        StepResult(tokens=[RowToken(key=A, token=X)],
                   prefill=[RowPrefill(key=A, done=3, total=3, computed=2)],
                   took_s=0.5, decode_s=0.125)
    ]  # fmt: skip
    bench.loop.turn()
    [step] = bench.sent()
    assert isinstance(step, Step)
    assert [row.key for row in step.rows] == [B, A]
    assert (step.took_s, step.decode_s, step.between_steps) == (0.5, 0.125, 1)
    assert step.prefill == [PrefillProgress(key=A, done=3, total=3, computed=2)]
    bench.engine.results = [StepResult(tokens=[RowToken(key=A, token=X)])]
    bench.loop.turn()
    assert [step.between_steps for step in bench.sent() if isinstance(step, Step)] == [0]


@pytest.mark.parametrize(("cached", "told"), [(0, 0), (2, 2), (3, 3), (5, 3)])
def test_the_first_token_says_what_of_the_prompt_was_known_and_how_long_the_rest_took(
    bench: Bench, cached: int, told: int
) -> None:
    bench.engine.cached = cached
    bench.start(A)
    bench.now += 1.5
    bench.engine.results = [StepResult(tokens=[RowToken(key=A, token=X)])]
    bench.loop.turn()
    [step] = bench.sent()
    assert step == Step(
        step=2,
        rows=[RowDelta(key=A, text="x", tokens=pack_tokens([X]), prefill_s=1.5,
                       cached_tokens=told)],
    )  # fmt: skip


def test_before_a_step_the_board_says_all_of_it_F5(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    step = bench.engine.step

    def look() -> StepResult:
        seen.append(bench.board.current)
        return step()

    monkeypatch.setattr(bench.engine, "step", look)
    bench.engine.results = [
        StepResult(), StepResult(tokens=[RowToken(key=A, token=X)])
    ]  # fmt: skip
    bench.dispatch(A)
    bench.prepare(A)
    for _ in range(3):
        bench.loop.turn()
    assert [(one.phase, one.step) for one in seen] == [
        (WorkerPhase.PREFILL, 0), (WorkerPhase.PREFILL, 1), (WorkerPhase.DECODE, 2)
    ]  # fmt: skip
    assert (seen[0].predicted_s, seen[0].prefill_chunk) == (0.75, 64)
    assert (seen[0].held, seen[0].since) == (EngineBytes(active=1, cache=2, peak=3), 1000.0)
    assert (seen[0].books.requests, seen[0].books.sent) == (1, 1)


def test_a_token_of_a_row_that_has_left_takes_it_out_D8(bench: Bench) -> None:
    bench.start(A)
    bench.engine.rows[C] = bench.engine.rows[A]
    bench.engine.results = [StepResult(tokens=[RowToken(key=C, token=X), RowToken(key=A, token=X)])]
    bench.loop.turn()
    assert bench.engine.removed == [(C,)]
    [step] = bench.sent()
    assert isinstance(step, Step)
    assert [row.key for row in step.rows] == [A]


def test_a_row_that_ended_by_itself_is_not_taken_out_again(bench: Bench) -> None:
    bench.start(A)
    bench.engine.results = [
        StepResult(tokens=[RowToken(key=A, token=X, finish=FinishReason.LENGTH)],
                   prefill=[RowPrefill(key=A, done=3, total=3)])
    ]  # fmt: skip
    bench.loop.turn()
    [step] = bench.sent()
    assert isinstance(step, Step)
    assert ([row.finish for row in step.rows], step.prefill) == ([FinishReason.LENGTH], [])
    assert bench.engine.removed == []
    assert bench.loop.open_keys == frozenset()
    assert not bench.loop.turn()
    assert bench.sent() == []


def form(*, is_refused: bool) -> Grammar:
    """A grammar that was given up, or was not."""
    matcher = SimpleNamespace(
        is_error=lambda: is_refused,
        get_error=lambda: "too complex",
        is_stopped=lambda: False,
        consume_token=lambda token: None,
    )
    return Grammar(matcher, [])


@pytest.mark.parametrize("is_refused", [True, False])
def test_an_answer_whose_form_was_given_up_ends_as_refused(bench: Bench, is_refused: bool) -> None:
    grammar = form(is_refused=is_refused)
    error = grammar.refusal
    assert (error is not None) is is_refused
    bench.dispatch(A)
    bench.prepare(A, grammar=grammar)
    bench.loop.turn()
    bench.sent()
    bench.engine.results = [StepResult(tokens=[RowToken(key=A, token=X, finish=FinishReason.STOP)])]
    bench.loop.turn()
    step, *rest = bench.sent()
    assert isinstance(step, Step)
    assert [row.finish for row in step.rows] == [None if error else FinishReason.STOP]
    assert rest == ([Rejected(key=A, error=error.to_wire())] if error else [])
    assert bench.loop.open_keys == frozenset()


def test_what_does_not_fit_is_refused_alone_I6(bench: Bench) -> None:
    bench.dispatch(A, B)
    bench.prepare(A, max_tokens=97)
    bench.prepare(B)
    bench.loop.turn()
    rejected, accepted, _ = bench.sent()
    assert isinstance(rejected, Rejected)
    assert isinstance(accepted, Accepted)
    assert (rejected.key, rejected.error["code"]) == (A, "context_length_exceeded")
    assert bench.loop.open_keys == {B}


def test_cancels_take_a_request_out_wherever_it_is_D2(bench: Bench) -> None:
    bench.start(A, B)
    bench.dispatch(C, RequestKey(4))
    bench.prepare(C)
    bench.loop.turn()
    bench.sent()
    books = bench.board.current.books
    assert (books.requests, books.preparing) == (4, 1), "two in their rows, one waits for a row"
    for key in (A, C, RequestKey(4)):
        bench.around.inbox.append(CancelRow(key=key))
    bench.loop.turn()
    assert bench.around.forgotten == [RequestKey(4)]
    assert bench.engine.removed == [(A,)]
    [step] = bench.sent()
    assert isinstance(step, Step)
    assert step.rows == [
        RowDelta(key=key, finish=FinishReason.CANCELLED) for key in (A, C, RequestKey(4))
    ]
    assert bench.loop.open_keys == {B}


@pytest.mark.parametrize(("rows", "is_fault"), [(1, True), (2, False), (3, False)])
def test_an_engine_may_hold_more_rows_than_run_and_never_fewer_P23(
    bench: Bench, rows: int, is_fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.start(A, B)
    monkeypatch.setattr(bench.engine, "row_count", lambda: rows)
    if not is_fault:
        assert bench.loop.turn()
        return
    with pytest.raises(WorkerFaultError, match=r"^the engine has 1 rows, and not 2$"):
        bench.loop.turn()


def test_an_exit_that_is_there_when_the_loop_ends_is_seen(bench: Bench) -> None:
    bench.around.inbox.append(Exit())
    bench.loop.run(lambda: True)
    assert bench.loop.is_exit_asked
    assert bench.sent() == []


def test_a_row_that_a_stop_string_ended_leaves_the_engine_with_that_step(bench: Bench) -> None:
    """Its next token would take it out too, but only after it has cost one more pass."""
    bench.start(A, stop=["x"])
    bench.engine.results = [StepResult(tokens=[RowToken(key=A, token=X)])]
    bench.loop.turn()
    assert bench.engine.removed == [(A,)]
    [step] = bench.sent()
    assert step == Step(
        step=2,
        rows=[RowDelta(key=A, tokens=pack_tokens([X]), prefill_s=0.0, cached_tokens=0,
                       finish=FinishReason.STOP, stop="x")],
    )  # fmt: skip
