"""A call goes from a text to the client and, in messages, back through its template."""

from __future__ import annotations

import json
import pkgutil
from typing import Any

import mlx_lm.tool_parsers
import pytest

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.states import Channel
from mlxsup.worker.engines.mlx.text import MlxText
from mlxsup.worker.text.channels import ChannelParser
from mlxsup.worker.text.tool_calls import ToolCallReader
from mlxsup.worker.text.tool_formats import PARSERS, TAGGED

from support.models.families import ARGUMENTS, FAMILIES, SPELLED, TOOLS, Family, load
from support.worker.tool_values import HOSTILE

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    family: Family = request.param
    return family


@pytest.fixture(scope="module")
def text(family: Family, tmp_path_factory: pytest.TempPathFactory) -> MlxText:
    return load(tmp_path_factory.mktemp("models") / family.name, family)


def rendered(text: MlxText, messages: list[dict[str, Any]]) -> str:
    return text.decode(text.encode(RequestBody(messages=messages, tools=TOOLS)).tokens)


def turn_of(family: Family, shown: str) -> str:
    """Return what the model says in a rendered chat, behind the question."""
    begin, end = family.turn
    return shown[shown.index("hi") :].split(begin, 1)[1].split(end)[0]


ASK: dict[str, Any] = {"role": "user", "content": "hi"}


def calls_in(text: MlxText, said: str, opening: str) -> list[dict[str, Any]]:
    parser = ChannelParser(text.channel_rules, opening, ToolCallReader(TOOLS, seed=7))
    pieces = [piece for letter in said for piece in parser.add(letter)] + parser.finish()
    assert not [piece.warning for piece in pieces if piece.warning], pieces
    lines = "".join(p.text for p in pieces if p.channel is Channel.TOOL_CALL).splitlines()
    return [json.loads(line) for line in lines]


def test_a_call_comes_back_the_same(family: Family, text: MlxText) -> None:
    [call] = calls_in(text, family.said, family.opening)
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    shown = rendered(
        text,
        [
            ASK,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "sunny"},
        ],
    )
    assert "sunny" in shown
    [again] = calls_in(text, turn_of(family, shown), family.opening)
    assert again["function"]["name"] == "weather"
    assert json.loads(again["function"]["arguments"]) == ARGUMENTS
    if family.name in ("mistral-v3", "kimi-k2"):
        assert again["id"] == call["id"]


def test_every_value_comes_back_as_the_template_wrote_it(family: Family, text: MlxText) -> None:
    call_id = "functions.weather:0" if family.name == "kimi-k2" else "abcdefghi"
    for value in HOSTILE:
        arguments = {"city": value, "days": 2}
        function = {"name": "weather", "arguments": json.dumps(arguments, ensure_ascii=False)}
        call = {"id": call_id, "function": function}
        turn = turn_of(family, rendered(text, [ASK, {"role": "assistant", "tool_calls": [call]}]))
        [again] = calls_in(text, turn, family.opening)
        assert json.loads(again["function"]["arguments"]) == arguments, turn


def test_every_parser_of_mlx_lm_is_ours_or_must_account_for_its_text() -> None:
    known = {module.name for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)}
    assert known - {"mistral"} == PARSERS.keys() | TAGGED.keys()


def test_a_call_that_is_cut_short_is_whole_or_none(family: Family, text: MlxText) -> None:
    """As by `max_tokens` or a stop string, after any letter."""
    for cut in range(len(family.said)):
        parser = ChannelParser(text.channel_rules, family.opening, ToolCallReader(TOOLS, seed=7))
        pieces = parser.add(family.said[:cut]) + parser.finish()
        for piece in pieces:
            if piece.channel is Channel.TOOL_CALL:
                call = json.loads(piece.text)
                assert call["function"]["name"] == "weather"
                assert json.loads(call["function"]["arguments"]) == ARGUMENTS


@pytest.mark.parametrize("call_id", ["call_0123456789abcdef01234567", "functions.weather:0"])
def test_a_call_of_another_model_is_rendered(text: MlxText, call_id: str) -> None:
    call = {"id": call_id, "function": {"name": "weather", "arguments": SPELLED}}
    messages: list[dict[str, Any]] = [
        ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "sunny"},
        {"role": "assistant", "content": "It is sunny."},
        {"role": "user", "content": "thanks"},
    ]
    assert "sunny" in rendered(text, messages)
