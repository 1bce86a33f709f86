"""Calls that a request forces, with a real engine: whatever a model would rather write, its answer
is one call of an allowed function with arguments by the schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.states import Channel, FinishReason

from support.worker.loop_driver import Answer, LoopDriver, check_resumes

pytestmark = pytest.mark.mlx

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in {
        "weather": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Rome", "</tool_call>", '"<think>"\n']},
                "when": {"$ref": "#/$defs/Day"},
            },
            "required": ["city", "when"],
            "$defs": {
                "Day": {
                    "type": "object",
                    "properties": {"day": {"type": "integer", "minimum": 1, "maximum": 31}},
                    "required": ["day"],
                }
            },
        },
        "größe.of": {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]},
        "noop": None,
    }.items()
]


def one(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(*names: str) -> dict[str, Any]:
    tools = [one(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools}}


def asked(choice: Any, seed: int = 1, **more: Any) -> dict[str, Any]:
    given = {"prompt": "data", "tools": TOOLS, "tool_choice": choice, "seed": seed}
    return given | {"temperature": 1.5, "max_tokens": 200} | more


def call_of(answer: Answer) -> tuple[str, Any]:
    assert answer.finish is FinishReason.TOOL_CALLS
    assert not answer.text_of(Channel.CONTENT)
    (line,) = answer.text_of(Channel.TOOL_CALL).splitlines()
    function = json.loads(line)["function"]
    return function["name"], json.loads(function["arguments"])


def check_arguments(name: str, arguments: Any) -> None:
    match name:
        case "weather":
            assert arguments["city"] in ("Rome", "</tool_call>", '"<think>"\n')
            assert 1 <= arguments["when"].pop("day") <= 31
            assert arguments == {"city": arguments["city"], "when": {}}
        case "größe.of":
            assert arguments in ({"n": True}, {"n": False})
        case _:
            assert arguments == {}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "größe.of", "noop"}),
        (one("weather"), {"weather"}),
        (one("noop"), {"noop"}),
        (allowed("größe.of", "weather"), {"größe.of", "weather"}),
    ],
)
def test_answer_is_one_call_by_the_schema(worker: LoopDriver, choice: Any, names: set[str]) -> None:
    keys = [worker.dispatch(**asked(choice, seed, temperature=10.0)) for seed in range(12)]
    called = [call_of(answer) for answer in worker.finish(*keys)]
    assert {name for name, _ in called} == names
    for name, arguments in called:
        check_arguments(name, arguments)


@pytest.mark.bits
def test_half_a_call_goes_on_rightly(worker: LoopDriver) -> None:
    whole = worker.answer(**asked(one("weather"), seed=3))
    check_arguments(*call_of(whole))
    check_resumes(worker, whole, range(0, len(whole.tokens), 3), at_once=8)


def test_forced_call_is_held_back_when_it_is_rendered_again(worker: LoopDriver) -> None:
    whole = worker.answer(**asked(one("noop")))
    assert not any(shown.text for shown in worker.render(whole.resume_after(9)))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("tokens", [25, 35])
def test_call_that_is_cut_has_the_arguments_that_have_come(
    worker: LoopDriver, tokens: int, strict: bool
) -> None:
    functions: list[Any] = [tool["function"] for tool in TOOLS]
    tools = [{"type": "function", "function": each | {"strict": strict}} for each in functions]
    whole = worker.answer(**asked(one("weather"), seed=3, tools=tools))
    cut = worker.answer(**asked(one("weather"), seed=3, tools=tools, max_tokens=tokens))
    assert cut.finish is FinishReason.LENGTH
    assert cut.text_of(Channel.CONTENT) == ""
    [given] = [json.loads(cut.text_of(Channel.TOOL_CALL))["function"]]
    [all_of_it] = [json.loads(whole.text_of(Channel.TOOL_CALL))["function"]]
    assert given["name"] == "weather"
    assert all_of_it["arguments"].startswith(given["arguments"])
    assert given["arguments"] != all_of_it["arguments"]


def test_a_forced_call_goes_before_a_format(worker: LoopDriver) -> None:
    """OpenAI's formats are of texts, and instructor sends both."""
    alone = worker.answer(**asked("required"))
    both = worker.answer(**asked("required", response_format={"type": "json_object"}))
    assert call_of(both) == call_of(alone)


def test_allowed_functions_bind_a_free_answer_too(worker: LoopDriver) -> None:
    choice = allowed("noop")
    choice["allowed_tools"]["mode"] = "auto"
    free = worker.answer(**asked(choice, max_tokens=9))
    assert free.tokens == worker.answer(**asked("auto", max_tokens=9)).tokens


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tool_choice": one("other")}, "one of the tools (weather, größe.of, noop), not 'other'"),
        ({"tool_choice": "required", "tools": None}, "tools to choose from"),
        ({"tool_choice": allowed()}, "tools to choose from"),
        ({"tool_choice": "maybe"}, "not 'maybe'"),
        ({"tool_choice": {"type": "function"}}, "allowed_tools"),
    ],
)
def test_choice_that_cannot_be_made_is_refused(
    worker: LoopDriver, more: dict[str, Any], words: str
) -> None:
    with pytest.raises(RemoteError) as caught:
        worker.dispatch(**asked("required") | more)
    assert words in caught.value.message
    assert caught.value.detail["parameter"] == "tool_choice"


def with_property(schema: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        (with_property(False), "'f'"),
        ({"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}},
         "the parameters of 'f' must be of type object"),
    ],
)  # fmt: skip
def test_schema_that_no_call_can_match_is_refused_by_the_name_of_its_function(
    worker: LoopDriver, tool: dict[str, Any], words: str
) -> None:
    got = worker.answer(**asked("required", tools=[*TOOLS, tool]))
    assert got.error is not None
    assert words in got.error.message
    assert "call0" not in got.error.message, "no grammar of ours"
    assert got.error.detail["parameter"] == "tools"


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": ["a"], "format": "password"},
        {"enum": ["a"], "type": "string", "pattern": r"(?=a)\w"},
        {"type": "array", "uniqueItems": True, "items": {"enum": [1]}, "maxItems": 1},
        {"type": "object", "propertyNames": {"type": "string"}, "maxProperties": 0},
    ],
)
def test_keyword_that_no_grammar_knows_is_left_out(worker: LoopDriver, schema: Any) -> None:
    name, arguments = call_of(worker.answer(**asked("required", tools=[with_property(schema)])))
    assert (name, list(arguments)) == ("f", ["x"])
