"""What the step loop makes of pauses, and what it renders for a reader who joins an answer."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mlxsup.protocol.delta_body import read_body
from mlxsup.protocol.ids import RequestKey, pack_tokens
from mlxsup.protocol.message import Message
from mlxsup.protocol.rendering import Render, Rendered
from mlxsup.protocol.states import Channel, FinishReason, RowState
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
from mlxsup.worker.engine import EngineFacts, RowToken, StepResult
from mlxsup.worker.engines.fake.text import FakeTextCodec, encode_text
from mlxsup.worker.rendering import TOKENS_PER_TURN, Rendering

from support.worker.turn_bench import A, B, Bench, C

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


def test_a_pause_of_an_unknown_request_is_not_answered(bench: Bench) -> None:
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


FACTS = EngineFacts(context_length=100, vocabulary_size=300, fingerprint="f", backend="fake")


def asked(text: str, *, number: int = 1, opening: str = "", **parameters: Any) -> Render:
    return Render(
        number=number, opening=opening, parameters=parameters, seed=5, fingerprint="f",
        delivered=pack_tokens(encode_text(text)),
    )  # fmt: skip


def rendering() -> tuple[Rendering, list[Rendered]]:
    sent: list[Rendered] = []
    engine: Any = SimpleNamespace(text=FakeTextCodec())
    return Rendering(engine, FACTS, sent.append), sent


def shown(answer: Rendered) -> list[tuple[Channel, str]]:
    bodies = [read_body(body) for body in answer.bodies]
    return [(body.channel, body.text) for body in bodies]


def test_each_tool_call_is_a_piece_of_its_own() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    work, sent = rendering()
    work.begin(asked(f"well{call}{call}", tools=tools))
    work.advance()
    (channel, text), *calls = shown(sent[0])
    assert (channel, text) == (Channel.CONTENT, "well")
    assert [channel for channel, _ in calls] == [Channel.TOOL_CALL] * 2
    assert [json.loads(text)["function"]["name"] for _, text in calls] == ["look"] * 2


def test_rendering_holds_back_like_the_stream() -> None:
    work, sent = rendering()
    work.begin(asked("one, EN", stop=["END"]))
    work.advance()
    assert shown(sent[0]) == [(Channel.CONTENT, "one, ")]
    work.begin(asked("EN", stop=["END"]))
    work.advance()
    assert shown(sent[1]) == [(Channel.CONTENT, "")], "there is a piece, for the tokens"


def test_a_long_answer_takes_several_turns_and_later_ones_wait() -> None:
    work, sent = rendering()
    work.begin(asked("x" * (2 * TOKENS_PER_TURN + 1), number=1))
    work.begin(asked("y", number=2))
    turns = []
    while work.is_busy:
        work.advance()
        turns.append(len(sent))
    assert turns == [0, 0, 1, 2]
    assert [answer.number for answer in sent] == [1, 2]
    assert shown(sent[0]) == [(Channel.CONTENT, "x" * (2 * TOKENS_PER_TURN + 1))]


def test_an_answer_of_another_engine_or_another_version_is_not_rendered() -> None:
    work, sent = rendering()
    work.begin(replace(asked("x"), fingerprint="g"))
    work.begin(asked("x", number=2, colour="red"))
    assert [(answer.number, answer.bodies) for answer in sent] == [(1, []), (2, [])]
    assert not work.is_busy


def test_the_loop_renders_between_its_steps_and_does_not_wait_while_it_does() -> None:
    bench = Bench()
    bench.start(A)
    bench.around.inbox.append(asked("x" * (TOKENS_PER_TURN + 1)))
    for _ in range(2):
        bench.engine.results = [StepResult(tokens=[RowToken(key=A, token=encode_text("x")[0])])]
        assert bench.loop.turn(), "a step in each turn"
    assert [type(one).__name__ for one in bench.sent() if isinstance(one, Rendered)] == ["Rendered"]
    idle = Bench()
    idle.around.inbox.append(asked("x" * (TOKENS_PER_TURN + 1)))
    assert not idle.loop.turn()
    assert idle.loop.wait_s() == 0.0
    idle.loop.turn()
    assert idle.loop.wait_s() != 0.0
