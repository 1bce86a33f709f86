"""What requests for responses ask of the daemon, and that none of them can raise a bug."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.gateway.body import parse_object
from mlxsup.gateway.failure import Failure
from mlxsup.gateway.fields import Use
from mlxsup.gateway.responses.fields import ITEM_FIELDS, RESPONSE_FIELDS
from mlxsup.gateway.responses.requests import ResponseAsk, read_response
from mlxsup.gateway.responses.tools import Called

from support.sent_requests import JSON, outcome, sent


def response(**fields: Any) -> ResponseAsk:
    """A request with these fields besides the model and a text."""
    return read_response({"model": "m", "input": "hello", **fields})


def chat(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    """What the chat template gets."""
    found: list[dict[str, Any]] = response(input=list(items), **fields).inputs[0]["messages"]
    return found


def refusal(**fields: Any) -> Failure:
    """The refusal of a request with these fields."""
    with pytest.raises(Failure) as caught:
        response(**fields)
    assert caught.value.status == 400
    return caught.value


def said(role: str, *texts: str, kind: str = "input_text") -> dict[str, Any]:
    return {"role": role, "content": [{"type": kind, "text": text} for text in texts]}


def called(name: str, call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": "{}"}


def call_of(name: str, call_id: str) -> dict[str, Any]:
    """The same in the form of a chat."""
    function = {"name": name, "arguments": "{}"}
    return {"id": call_id, "type": "function", "function": function}


def thought(text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs", "summary": [], "content": content}


# ---------------------------------------------------------------- the conversation


def test_a_text_is_what_the_user_said() -> None:
    ask = response(temperature=0.5, max_output_tokens=9, stream=True, user="u", store=True)
    assert ask.inputs == ({"messages": [{"role": "user", "content": "hello"}]},)
    assert ask.parameters == {"temperature": 0.5, "max_tokens": 9, "cap_max_tokens": True}
    assert ask.is_streamed
    assert ask.echo["max_output_tokens"] == 9


def test_instructions_come_first_and_texts_of_one_role_are_one() -> None:
    assert chat(said("developer", "b"), said("user", "c", "d"), said("user", "e"),
                instructions="a") == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "c\nd\ne"},
    ]  # fmt: skip
    assert chat(said("user", "a"), instructions="") == [{"role": "user", "content": "a"}]


def test_a_turn_of_the_assistant_is_one_message_with_its_reasoning_and_calls() -> None:
    message = {**said("assistant", "one moment", kind="output_text"), "type": "message",
               "id": "msg", "status": "completed"}  # fmt: skip
    output = {"type": "function_call_output", "call_id": "c1", "output": "42"}
    parts = {"type": "function_call_output", "call_id": "c2",
             "output": [{"type": "input_text", "text": "43"}]}  # fmt: skip
    read = chat(said("user", "hi"), thought("hm"), message, called("f", "c1"), thought("so"),
                called("g", "c2"), output, parts, thought("oh"),
                said("assistant", "done", kind="output_text"))  # fmt: skip
    assert read[1:] == [
        {
            "role": "assistant", "content": "one moment", "reasoning_content": "hm\nso",
            "tool_calls": [call_of("f", "c1"), call_of("g", "c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "tool", "tool_call_id": "c2", "content": "43"},
        {"role": "assistant", "content": "done", "reasoning_content": "oh"},
    ]  # fmt: skip


def test_a_summary_stands_for_reasoning_that_is_not_there() -> None:
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}],
               "encrypted_content": "x"}  # fmt: skip
    read = chat(said("user", "hi"), summary, called("f", "c"))
    assert read[1]["reasoning_content"] == "so"


# ---------------------------------------------------------------- the rest


def test_tools_take_the_form_that_templates_know_and_hosted_ones_are_left_out() -> None:
    tool = {"type": "function", "name": "f", "description": "does", "strict": True,
            "parameters": {"type": "object"}}  # fmt: skip
    ask = response(tools=[{"type": "web_search", "external_web_access": False}, tool])
    function = {"name": "f", "description": "does", "parameters": {"type": "object"}}
    assert ask.parameters["tools"] == [{"type": "function", "function": function}]
    assert ask.echo["tools"] == [{"type": "function", "strict": False, **function}]
    assert "tools" not in response(tools=[{"type": "web_search_preview"}]).parameters
    assert response(tool_choice="none").parameters["tool_choice"] == "none"


def test_functions_of_a_namespace_are_functions_with_names_of_their_own_if_need_be() -> None:
    def function(name: str) -> dict[str, Any]:
        return {"type": "function", "name": name, "parameters": {}}

    spaces = [
        {"type": "namespace", "name": space, "description": "d", "tools": [*map(function, names)]}
        for space, names in (("s", ["a", "b"]), ("t", ["b", "c"]))
    ]
    calls = [called("b", "1") | {"namespace": "t"}, called("b", "2"), called("a", "3")]
    ask = response(tools=[function("c"), *spaces], input=[said("user", "x"), *calls])
    names = [tool["function"]["name"] for tool in ask.parameters["tools"]]
    assert names == ["c", "a", "s__b", "t__b", "t__c"]
    assert ask.called["t__b"] == Called("b", "t")
    assert "c" not in ask.called, "the client knows it under this name"
    sent_back = ask.inputs[0]["messages"][1]["tool_calls"]
    assert [call["function"]["name"] for call in sent_back] == ["t__b", "b", "a"]


def test_formats_are_those_of_a_chat() -> None:
    schema = {"type": "object"}
    named = {"type": "json_schema", "name": "n", "strict": True, "schema": schema}
    assert response(text={"format": named}).parameters["response_format"] == {
        "type": "json_schema", "json_schema": {"schema": schema}
    }  # fmt: skip
    plain = response(text={"format": {"type": "json_object"}})
    assert plain.parameters["response_format"] == {"type": "json_object"}
    assert response(text={"format": {"type": "text"}, "verbosity": "medium"}).parameters == {}


def test_effort_is_for_the_template() -> None:
    ask = response(reasoning={"effort": "low", "summary": "auto"})
    assert ask.parameters == {"chat_template_kwargs": {"reasoning_effort": "low"}}
    extra = {"reasoning_effort": "high"}
    ask = response(reasoning={"effort": "low"}, chat_template_kwargs=extra)
    assert ask.parameters == {"chat_template_kwargs": extra}


def test_one_call_at_a_time_is_for_the_shape() -> None:
    assert response(parallel_tool_calls=False).has_one_call
    assert not response(parallel_tool_calls=True).has_one_call
    assert not response().has_one_call


def test_null_is_as_good_as_nothing() -> None:
    names = {field.name for field in RESPONSE_FIELDS} - {"model", "input"}
    assert response(**dict.fromkeys(names)) == response()


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "data:,x"}]}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"model": ""}, "model", "GET /v1/models lists them"),
        ({"input": None}, "input", "is missing"),
        ({"input": []}, "input", "at least one item"),
        ({"input": 3}, "input", "a list of items"),
        ({"input": [3]}, "input[0]", "an object"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "takes one of"),
        ({"input": [{"type": []}]}, "input[0].type", "takes one of"),
        ({"input": [thought("x")]}, "input", "at least one message"),
        ({"input": [said("wizard")]}, "input[0].role", "developer"),
        ({"input": [{"role": "user"}]}, "input[0].content", "is missing"),
        ({"input": [IMAGE]}, "input[0].content[0]", "send text"),
        ({"input": [{"role": "user", "content": [3]}]}, "input[0].content[0]", "input_text"),
        ({"input": [{"role": "user", "content": "a", "mood": 1}]}, "input[0].mood", "unknown"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name", "takes a text"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id",
         "takes a text"),
        ({"instructions": 3}, "instructions", "takes a text"),
        ({"max_output_tokens": 0}, "max_output_tokens", "from 1 up"),
        ({"tools": {}}, "tools", "a list of tools"),
        ({"tools": [3]}, "tools[0]", "with a type"),
        ({"tools": [{"type": "custom", "name": "f"}]}, "tools[0].type", "not known here"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "takes a text"),
        ({"tools": [{"type": "namespace", "name": "s", "tools": 3}]}, "tools[0].tools",
         "a list of tools"),
        ({"tools": [{"type": "namespace", "name": "s", "tools": [{"type": "namespace"}]}]},
         "tools[0].tools[0].type", "not known here"),
        ({"tools": [{"type": "namespace", "tools": [{"type": "function", "name": "f"}]}]},
         "tools[0].name", "takes a text"),
        ({"tool_choice": "required"}, "tool_choice", "cannot be forced"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "cannot be forced"),
        ({"text": 3}, "text", "takes an object"),
        ({"text": {"format": {"type": "poem"}}}, "text.format", "json_object"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "say it in the input"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort", "takes a text"),
        ({"include": ["message.output_text.logprobs"]}, "include", "/v1/chat/completions"),
        ({"include": "x"}, "include", "takes a list"),
        ({"stream": 1}, "stream", "true or false"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is kept"),
        ({"background": True}, "background", "nothing is kept"),
        ({"truncation": "auto"}, "truncation", "is refused"),
        ({"messages": []}, "messages", "unknown field"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_with_the_place(
    fields: dict[str, Any], param: str, words: str
) -> None:
    failure = refusal(**fields)
    assert failure.param == param
    assert words in failure.message


@pytest.mark.parametrize(
    "field", [field for field in RESPONSE_FIELDS if field.use is Use.IGNORED], ids=lambda f: f.name
)
@pytest.mark.parametrize("value", ["x", {"a": 1}, True, 3])
def test_what_cannot_change_the_text_is_accepted(field: Any, value: Any) -> None:
    assert response(**{field.name: value}) == response()


# ---------------------------------------------------------------- junk

PARTS = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["input_text", "summary_text"]), "text": JSON})
)
ITEMS: list[st.SearchStrategy[dict[str, Any]]] = [
    st.fixed_dictionaries(
        {"type": st.just(kind)}, optional={field.name: JSON | PARTS for field in fields[1:]}
    )
    for kind, fields in ITEM_FIELDS.items()
]
BODIES = st.fixed_dictionaries(
    {"input": st.text() | JSON | st.lists(st.one_of(ITEMS), max_size=3)},
    optional={"model": st.just("m") | JSON}
    | {field.name: JSON for field in RESPONSE_FIELDS if field.name not in ("model", "input")},
)


@given(BODIES)
def test_junk_is_either_refused_or_sent(body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    assert outcome(lambda: len(sent(read_response(parse_object(data))))) in (1, 400)
