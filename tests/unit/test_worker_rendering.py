"""What was delivered of an answer is rendered as it was shown, in pieces, between the steps."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from mlxsup.protocol.delta_body import read_body
from mlxsup.protocol.ids import pack_tokens
from mlxsup.protocol.rendering import Render, Rendered
from mlxsup.protocol.states import Channel
from mlxsup.worker.engine import EngineFacts, RowToken, StepResult
from mlxsup.worker.engines.fake.text import FakeTextCodec, encode_text
from mlxsup.worker.rendering import TOKENS_PER_TURN, Rendering

from support.turn_bench import A, Bench

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


def test_texts_of_one_channel_are_one_piece() -> None:
    work, sent = rendering()
    work.begin(asked("why not</think>because", opening="<think>"))
    work.advance()
    assert shown(sent[0]) == [(Channel.REASONING, "why not"), (Channel.CONTENT, "because")]
    assert not work.is_busy


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


def test_what_the_stream_holds_back_is_held_back_here_too() -> None:
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
