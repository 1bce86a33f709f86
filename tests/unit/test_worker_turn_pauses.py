"""What the step loop makes of pauses: what is said of each row, and what the engine is asked."""

from __future__ import annotations

import pytest

from mlxsup.protocol.ids import RequestKey, pack_tokens
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import FinishReason, RowState
from mlxsup.protocol.worker_messages import (
    Acceptance,
    CancelRow,
    DropKept,
    PauseRow,
    Rejected,
    Resume,
    RowDelta,
    Step,
)
from mlxsup.worker.engine import RowToken, StepResult
from mlxsup.worker.engines.fake.text import encode_text

from support.turn_bench import A, B, Bench, C

X = encode_text("x")[0]
D = RequestKey(4)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def rows_of(messages: list[Message]) -> list[RowDelta]:
    rows = [row for message in messages if isinstance(message, Step) for row in message.rows]
    return [row for row in rows if isinstance(row, RowDelta)]


def pause(bench: Bench, *keys: RequestKey, keep: bool = True) -> list[Message]:
    bench.around.inbox += [PauseRow(key=key, keep=keep) for key in keys]
    bench.loop.turn()
    return bench.sent()


@pytest.mark.parametrize(("keep", "state"), [(True, RowState.KEPT), (False, RowState.DROPPED)])
def test_rows_leave_in_one_change_and_each_says_whether_its_state_is_kept(
    bench: Bench, keep: bool, state: RowState
) -> None:
    bench.start(A, B)
    rows = rows_of(pause(bench, A, B, keep=keep))
    assert rows == [RowDelta(key=A, paused=state), RowDelta(key=B, paused=state)]
    assert bench.engine.set_asides == [((A, B), keep)]
    assert (bench.engine.removed, bench.engine.dropped) == ([], [])
    assert bench.loop.open_keys == frozenset()


def test_a_token_that_was_computed_ahead_comes_with_it(bench: Bench) -> None:
    bench.start(A)
    bench.engine.ahead[A] = RowToken(key=A, token=X)
    [row] = rows_of(pause(bench, A))
    assert (row.text, row.tokens, row.paused) == ("x", pack_tokens([X]), RowState.KEPT)
    assert row.finish is None


def test_a_pause_between_two_steps_is_counted_until_it_was_told(bench: Bench) -> None:
    bench.start(A, B)
    bench.around.inbox.append(PauseRow(key=A, keep=True))
    pause_seen = []
    step = bench.engine.step

    def look() -> StepResult:
        pause_seen.append(bench.board.current.books.requests)
        return step()

    bench.engine.step = look  # type: ignore[method-assign]
    bench.loop.turn()
    assert pause_seen == [2], "one runs, and one has left without the supervisor knowing"


@pytest.mark.parametrize("ends_by", ["the token", "a stop string"])
def test_an_answer_that_ends_with_that_token_is_not_paused(bench: Bench, ends_by: str) -> None:
    if ends_by == "the token":
        bench.start(A)
        bench.engine.ahead[A] = RowToken(key=A, token=X, finish=FinishReason.LENGTH)
        finish = FinishReason.LENGTH
    else:
        bench.start(A, stop=["x"])
        bench.engine.ahead[A] = RowToken(key=A, token=X)
        finish = FinishReason.STOP
    [row] = rows_of(pause(bench, A))
    assert (row.finish, row.paused) == (finish, None)
    assert bench.engine.dropped == [A], "nobody comes back for its state"


def test_a_request_without_a_row_is_taken_back_wherever_it_is(bench: Bench) -> None:
    bench.start(A, B)
    bench.dispatch(C, D)
    bench.prepare(C)
    bench.loop.turn()
    bench.sent()
    rows = rows_of(pause(bench, C, D))
    assert rows == [RowDelta(key=key, paused=RowState.DROPPED) for key in (C, D)]
    assert bench.around.forgotten == [D]
    assert bench.loop.open_keys == {A, B}


def test_a_pause_of_what_is_not_there_is_not_answered(bench: Bench) -> None:
    bench.start(A)
    assert rows_of(pause(bench, B)) == [], "its end is on the way"
    assert bench.engine.set_asides == []


def test_a_cancel_in_the_same_breath_is_the_only_answer(bench: Bench) -> None:
    bench.start(A)
    bench.around.inbox += [PauseRow(key=A, keep=True), CancelRow(key=A)]
    bench.loop.turn()
    assert rows_of(bench.sent()) == [RowDelta(key=A, finish=FinishReason.CANCELLED)]
    assert (bench.engine.set_asides, bench.engine.removed) == ([], [(A,)])


def test_a_state_that_is_not_needed_is_dropped(bench: Bench) -> None:
    bench.around.inbox.append(DropKept(key=A))
    bench.loop.drain()
    assert bench.engine.dropped == [A]
    assert bench.sent() == []


ACCEPTED = Acceptance(
    prompt_tokens=pack_tokens([5, 6, 7]), opening="", parameters={}, seed=1, fingerprint="f"
)


@pytest.mark.parametrize("why", ["cancelled", "another fingerprint", "too long", "complete"])
def test_a_state_is_dropped_if_its_request_never_gets_a_row_again(bench: Bench, why: str) -> None:
    fingerprint = "other" if why == "another fingerprint" else "f"
    accepted = Acceptance(
        prompt_tokens=ACCEPTED.prompt_tokens, opening="", parameters={}, seed=1,
        fingerprint=fingerprint,
    )  # fmt: skip
    delivered = pack_tokens([X] * (9 if why == "complete" else 1))
    resume = Resume(acceptance=accepted, delivered=delivered)
    bench.dispatch(A, resume=resume)
    if why == "cancelled":
        bench.around.inbox.append(CancelRow(key=A))
    elif why != "another fingerprint":
        bench.prepare(A, resume=resume, max_tokens=97 if why == "too long" else 9)
    bench.loop.turn()
    assert bench.engine.dropped == [A]
    said = bench.sent()
    is_rejected = why in ("another fingerprint", "too long")
    assert any(isinstance(message, Rejected) for message in said) is is_rejected
    assert bench.loop.open_keys == frozenset()
