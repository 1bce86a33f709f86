"""The text of an answer that must be a call or JSON, or may only call some functions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import Channel, FinishReason
from mlxsup.protocol.worker_messages import Dispatch
from mlxsup.worker.engine import EngineFacts, Prompt, RowToken
from mlxsup.worker.engines.fake.text import FakeTextCodec, encode_text
from mlxsup.worker.rows import plan_row, running_row
from mlxsup.worker.text.channels import NORMAL, REASONING, TOOL, ChannelRules
from mlxsup.worker.text.grammar import call_form, closed
from mlxsup.worker.text.tool_formats import ToolFormat, parse_json_calls

from support.client.pieces import unpacked

FACTS = EngineFacts(context_length=1000, vocabulary_size=300, fingerprint="f", backend="fake")
KEY = RequestKey(1)
RULES = ChannelRules(
    transitions={
        NORMAL: [("<think>", REASONING), ("<call>", TOOL)],
        REASONING: [("</think>", NORMAL)],
        TOOL: [("</call>", NORMAL)],
    },
    tool_format=ToolFormat(name="json", parse=parse_json_calls),
)
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]


class Codec(FakeTextCodec):
    """The fake engine's text side with markers."""

    channel_rules = RULES


def written(
    text: str,
    choice: Any,
    opening: str = "",
    *,
    ends: FinishReason = FinishReason.STOP,
    **more: Any,
) -> list[tuple[Channel, str]]:
    """Return what a client is shown of an answer."""
    body = RequestBody(prompt="x", tools=TOOLS, tool_choice=choice, seed=1, **more)
    row = plan_row(KEY, body, Prompt(tokens=[5], opening=opening), FACTS)
    running = running_row(
        row, body, Prompt(tokens=[5], opening=opening), Codec(), Dispatch(key=KEY, body=b"")
    )
    tokens = encode_text(text)
    shown: list[tuple[Channel, str]] = []
    for place, token in enumerate(tokens):
        finish = ends if place == len(tokens) - 1 else None
        for delta in unpacked(running.advance(RowToken(key=KEY, token=token, finish=finish), 1.0)):
            if delta.text:
                shown.append((delta.channel, delta.text))
    return shown


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def arguments_in(line: str) -> Any:
    return json.loads(json.loads(line)["function"]["arguments"])


@pytest.mark.parametrize("value", ["</call>", "<think>", "<call>", '"}', "\n"])
def test_marker_in_an_argument_of_a_forced_call_stays_there(value: str) -> None:
    ((channel, line),) = written(call("f", a=value), "required")
    assert channel is Channel.TOOL_CALL
    assert arguments_in(line) == {"a": value}


@pytest.mark.parametrize("value", ["</call>", "<think>", "<call>"])
def test_marker_in_a_json_answer_stays_there(value: str) -> None:
    text = json.dumps({"a": value})
    shown = written(text, "auto", response_format={"type": "json_object"})
    assert {channel for channel, _ in shown} == {Channel.CONTENT}
    assert "".join(part for _, part in shown) == text


def test_reasoning_comes_before_a_forced_call() -> None:
    shown = written("hm</think>" + call("f"), "required", opening="<think>")
    assert "".join(text for channel, text in shown if channel is Channel.REASONING) == "hm"
    assert [channel for channel, _ in shown].count(Channel.TOOL_CALL) == 1


@pytest.mark.parametrize(("mode", "is_call"), [("f", True), ("g", False)])
def test_call_of_a_function_that_is_not_allowed_is_text(mode: str, is_call: bool) -> None:
    only_f = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": TOOLS[:1]}}
    text = f"<call>{call(mode)}</call>"
    channels = {channel for channel, _ in written(text, only_f)}
    assert channels == ({Channel.TOOL_CALL} if is_call else {Channel.CONTENT})


# ---------------------------------------------------------------- closed schemas

X: dict[str, Any] = {"properties": {"x": {"type": "integer"}}}
CLOSED = X | {"type": "object", "additionalProperties": False}
CLOSING = {"type": "object", "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "meant"),
    [
        (X, CLOSED),
        ({"properties": {"a": X}, "$defs": {"D": X}},
         {"properties": {"a": CLOSED}, "$defs": {"D": CLOSED}, **CLOSING}),
        ({"type": "array", "items": X}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [X, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"properties": {"properties": X}},
         {"properties": {"properties": CLOSED}, **CLOSING}),
        (X | {"type": ["object", "null"]}, CLOSED | {"type": ["object", "null"]}),
    ],
)  # fmt: skip
def test_object_is_closed_wherever_it_is(schema: Any, meant: Any) -> None:
    assert closed(schema) == meant


@pytest.mark.parametrize(
    "schema",
    [
        X | {"additionalProperties": True},
        X | {"additionalProperties": {"type": "string"}},
        X | {"patternProperties": {"^y": {}}},
        X | {"required": ["x", "y"]},
        {"allOf": [X, {"properties": {"y": {}}}]},
        *(
            X | {kind: [{"properties": {"y": {}}, "required": ["y"]}, X]}
            for kind in ("anyOf", "oneOf")
        ),
        X | {"$ref": "#/$defs/y"},
        X | {"if": X, "then": {"properties": {"y": {}}}},
        {"type": "object"},
        {"enum": [X]},
        {"const": X},
        True,
    ],
)
def test_what_says_more_or_is_no_object_stays(schema: Any) -> None:
    assert closed(schema) == schema


def test_schema_that_is_nested_too_deeply_is_refused_with_its_function() -> None:
    deep: dict[str, Any] = {}
    for _ in range(900):
        deep = {"properties": {"a": deep}}
    with pytest.raises(RemoteError, match="the parameters of 'f': the schema is nested") as caught:
        call_form([{"type": "function", "function": {"name": "f", "parameters": deep}}])
    assert caught.value.detail["parameter"] == "tools"


@pytest.mark.parametrize("kind", [None, "object", ["object", "null"], ["null", "object"]])
def test_arguments_are_an_object_although_they_may_be_null(kind: Any) -> None:
    """Generators write the type of optional arguments as a list."""
    parameters = {} if kind is None else {"type": kind}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert [one["type"] for _, one in call_form([tool])["tools"]] == ["object"]


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ('{"name": "f", "arguments": {"a": "b', "f", '{"a": "b'),
        ('{"name":"g","arguments":{"a":{"name":"f"}}', "g", '{"a":{"name":"f"}}'),
        ('{"name": "f", "argu', "f", ""),
    ],
)
def test_a_forced_call_that_is_cut_off_is_a_call(text: str, name: str, arguments: str) -> None:
    ((channel, line),) = written(text, "required", ends=FinishReason.LENGTH)
    assert channel is Channel.TOOL_CALL
    assert json.loads(line)["function"] == {"name": name, "arguments": arguments}


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ('{"name": "h", "arguments": {"a": 1', FinishReason.LENGTH),
        ('{"name": "f', FinishReason.LENGTH),
        ('{"name": "f", "arguments": {"a": 1', FinishReason.STOP),
    ],
    ids=["of a function that is not offered", "within its name", "ended by itself"],
)
def test_what_is_cut_before_it_is_a_call_is_text(text: str, ends: FinishReason) -> None:
    assert written(text, "required", ends=ends) == [(Channel.CONTENT, text)]
