"""What requests in Anthropic's form ask of the daemon, and that none of them can raise a bug."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.gateway.anthropic.fields import BLOCK_FIELDS, COUNT_FIELDS, MESSAGES_FIELDS
from mlxsup.gateway.anthropic.requests import MessageAsk, read_count, read_message
from mlxsup.gateway.body import parse_object
from mlxsup.gateway.failure import Failure
from mlxsup.gateway.fields import Use
from mlxsup.protocol.parameters import MOST_TOKENS

from support.sent_requests import JSON, outcome, sent

HELLO = [{"role": "user", "content": "hello"}]
QUIET = {"enable_thinking": False, "thinking": False}


def message(**fields: Any) -> MessageAsk:
    """A request with these fields besides the model, the limit and a message."""
    return read_message({"model": "m", "max_tokens": 9, "messages": HELLO, **fields})


def chat(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """What the chat template gets."""
    found: list[dict[str, Any]] = message(messages=list(messages), **fields).inputs[0]["messages"]
    return found


def refusal(**fields: Any) -> Failure:
    """The refusal of a request with these fields."""
    with pytest.raises(Failure) as caught:
        message(**fields)
    assert caught.value.status == 400
    return caught.value


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


# ---------------------------------------------------------------- the chat


def test_a_request_becomes_messages_and_parameters() -> None:
    ask = message(temperature=0.5, top_k=3, stop_sequences=["x"], stream=True, metadata={"a": 1})
    assert ask == MessageAsk(
        model="m",
        inputs=({"messages": HELLO},),
        parameters={
            "temperature": 0.5, "top_k": 3, "stop": ["x"], "max_tokens": 9,
            "cap_max_tokens": True,
        },
        template=QUIET,
        is_streamed=True,
        max_tokens=9,
    )  # fmt: skip


def test_the_system_prompt_comes_first_and_without_what_differs_each_time() -> None:
    assert chat(*HELLO, system="be brief")[0] == {"role": "system", "content": "be brief"}
    blocks = [text("x-anthropic-billing-header: cc=1;"), text("a"), text("b", cache_control={})]
    assert chat(*HELLO, system=blocks)[0] == {"role": "system", "content": "a\nb"}
    assert chat(*HELLO, system=blocks[:1]) == HELLO
    assert chat(*HELLO, system="") == HELLO


def test_blocks_of_text_are_one_text_and_turns_of_one_role_are_one() -> None:
    assert chat(user(text("a"), text("b")), user(text("c", citations=None))) == [
        {"role": "user", "content": "a\nb\nc"}
    ]
    assert chat(user()) == [{"role": "user", "content": ""}]


def test_calls_their_results_and_reasoning_go_back_to_the_model() -> None:
    said = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            text("one moment"),
            {"type": "tool_use", "id": "c1", "name": "f", "input": {"é": 1}},
            {"type": "tool_use", "id": "c2", "name": "g", "input": {}},
        ],
    }
    results = user(
        {"type": "tool_result", "tool_use_id": "c1", "content": "42", "is_error": False},
        {"type": "tool_result", "tool_use_id": "c2", "content": [text("a"), text("b")]},
        text("and?"),
    )
    assert chat(*HELLO, said, results)[1:] == [
        {
            "role": "assistant", "content": "one moment", "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {
                    "name": "f", "arguments": '{"é": 1}'}},
                {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "tool", "tool_call_id": "c2", "content": "a\nb"},
        {"role": "user", "content": "and?"},
    ]  # fmt: skip


def test_a_result_without_content_is_empty() -> None:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c"}
    read = chat(*HELLO, {"role": "assistant", "content": [call]}, user(result))
    assert read[-1] == {"role": "tool", "tool_call_id": "c", "content": ""}


@pytest.mark.parametrize(
    ("content", "shown"),
    [("no such file", "error: no such file"), ([text("a"), text("b")], "error: a\nb"),
     (None, "error: ")],
)  # fmt: skip
def test_the_result_of_a_tool_that_has_failed_says_so(content: Any, shown: str) -> None:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": content, "is_error": True}
    read = chat(*HELLO, {"role": "assistant", "content": [call]}, user(result))
    assert read[-1] == {"role": "tool", "tool_call_id": "c", "content": shown}


def test_tools_take_the_form_that_templates_know() -> None:
    tool = {
        "name": "f", "description": "does", "input_schema": {"type": "object"}, "strict": True,
        "cache_control": {"type": "ephemeral"}, "type": "custom", "defer_loading": False,
    }  # fmt: skip
    ask = message(tools=[tool], tool_choice={"type": "auto", "disable_parallel_tool_use": False})
    function = {"name": "f", "description": "does", "parameters": {"type": "object"}}
    assert ask.parameters["tools"] == [{"type": "function", "function": function}]
    assert ask.parameters["tool_choice"] == "auto"
    assert not ask.has_one_call
    assert message(tool_choice={"type": "auto", "disable_parallel_tool_use": True}).has_one_call
    assert "tools" not in message(tools=[]).parameters


@pytest.mark.parametrize(
    ("thinking", "thinks", "is_shown"),
    [
        (None, False, False),
        ({"type": "disabled"}, False, False),
        ({"type": "enabled", "budget_tokens": 1024}, True, True),
        ({"type": "adaptive"}, True, True),
        ({"type": "adaptive", "display": "summarized"}, True, True),
        ({"type": "enabled", "budget_tokens": 1024, "display": "omitted"}, True, False),
    ],
)
def test_thinking_is_for_the_template_and_decides_what_is_shown(
    thinking: Any, thinks: bool, is_shown: bool
) -> None:
    ask = message(thinking=thinking)
    (choice,) = ask.choices()
    assert choice["chat_template_kwargs"] == {"enable_thinking": thinks, "thinking": thinks}
    assert ask.shows_thinking is is_shown


def test_effort_is_for_the_template_and_the_format_for_the_daemon() -> None:
    schema = {"type": "object"}
    form = {"type": "json_schema", "schema": schema}
    parameters = message(output_config={"effort": "low", "format": form}).parameters
    assert parameters["chat_template_kwargs"] == {"reasoning_effort": "low"}
    assert parameters["response_format"] == {
        "type": "json_schema", "json_schema": {"schema": schema}
    }  # fmt: skip
    extra = {"reasoning_effort": "high", "thinking": True}
    ask = message(output_config={"effort": "low"}, chat_template_kwargs=extra)
    assert ask.choices()[0]["chat_template_kwargs"] == QUIET | extra


def test_more_tokens_than_can_be_meant_are_many() -> None:
    ask = message(max_tokens=2**400)
    assert (ask.parameters["max_tokens"], ask.max_tokens) == (MOST_TOKENS, MOST_TOKENS)


def test_a_count_asks_for_what_cannot_fit() -> None:
    ask = read_count({"model": "m", "messages": HELLO, "system": "s", "tools": []})
    assert ask.parameters == {"max_tokens": MOST_TOKENS}
    assert ask.choices()[0]["chat_template_kwargs"] == QUIET
    assert len(ask.inputs[0]["messages"]) == 2


def test_null_is_as_good_as_nothing() -> None:
    names = [field.name for field in MESSAGES_FIELDS]
    fields = dict.fromkeys(set(names) - {"model", "messages", "max_tokens"})
    assert message(**fields) == message()


# ---------------------------------------------------------------- refusals

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
SAID = {"role": "assistant", "content": "once upon"}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"model": 3}, "model", "GET /v1/models lists them"),
        ({"max_tokens": None}, "max_tokens", "from 1 up"),
        ({"max_tokens": True}, "max_tokens", "from 1 up"),
        ({"max_tokens": 0}, "max_tokens", "from 1 up"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": "hi"}, "messages", "a list of messages"),
        ({"messages": [3]}, "messages[0]", "role and content"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role", "takes one of"),
        ({"messages": [{"role": [], "content": ""}]}, "messages[0].role", "takes one of"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "a list of blocks"),
        ({"messages": [user(text("a"), IMAGE)]}, "messages[0].content[1]", "send text"),
        ({"messages": [user({"type": "poem"})]}, "messages[0].content[0].type", "takes one of"),
        ({"messages": [user({"type": []})]}, "messages[0].content[0].type", "takes one of"),
        ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text", "takes a text"),
        ({"messages": [user(text("a", mood=1))]}, "messages[0].content[0].mood", "unknown field"),
        ({"messages": [user({"type": "tool_use", "id": "a", "name": "f", "input": {}})]},
         "messages[0].content[0].type", "no place in a message of the role user"),
        ({"messages": [*HELLO, SAID]}, "messages[1]", "cannot be continued"),
        ({"messages": [{"role": "assistant", "content": [
            {"type": "tool_use", "id": "a", "name": "f", "input": "x"}]}, *HELLO]},
         "messages[0].content[0].input", "takes an object"),
        ({"messages": [user({"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]})]},
         "messages[0].content[0].content[0]", "send text"),
        ({"system": [{"type": "thinking", "thinking": "x"}]}, "system[0].type", "takes text"),
        ({"system": 3}, "system", "blocks of type text"),
        ({"messages": [user({"type": "tool_result", "tool_use_id": "c", "is_error": 1})]},
         "messages[0].content[0].is_error", "true or false"),
        ({"tools": {}}, "tools", "a list of tools"),
        ({"tools": [3]}, "tools[0]", "name and input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type",
         "Anthropic's own servers"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "a JSON schema"),
        ({"tools": [{"name": 3, "input_schema": {}}]}, "tools[0].name", "takes a text"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type", "cannot be forced"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.type", "cannot be forced"),
        ({"tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name", "unknown field"),
        ({"tool_choice": "auto"}, "tool_choice", "an object with a type"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
         "tool_choice.disable_parallel_tool_use", "true or false"),
        ({"thinking": {"type": "much"}}, "thinking.type", "takes one of"),
        ({"thinking": True}, "thinking", "an object with a type"),
        ({"output_config": 3}, "output_config", "takes an object"),
        ({"output_config": {"effort": 3}}, "output_config.effort", "takes a text"),
        ({"output_config": {"format": {"type": "poem"}}}, "output_config.format", "json_schema"),
        ({"stop_sequences": "x"}, "stop_sequences", "a list of texts"),
        ({"stream": 1}, "stream", "true or false"),
        ({"n": 2}, "n", "unknown field"),
        ({"container": "c"}, "container", "has no effect here"),
        ({"mcp_servers": [{}]}, "mcp_servers", "has no effect here"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_with_the_place(
    fields: dict[str, Any], param: str, words: str
) -> None:
    failure = refusal(**fields)
    assert failure.param == param
    assert words in failure.message


@pytest.mark.parametrize(
    "field", [field for field in MESSAGES_FIELDS if field.use is Use.IGNORED], ids=lambda f: f.name
)
@pytest.mark.parametrize("value", ["x", {"a": 1}, True, 3])
def test_what_cannot_change_the_text_is_accepted(field: Any, value: Any) -> None:
    assert message(**{field.name: value}) == message()


# ---------------------------------------------------------------- junk

BLOCKS: list[st.SearchStrategy[dict[str, Any]]] = [
    st.fixed_dictionaries(
        {"type": st.just(kind)}, optional={field.name: JSON for field in fields[1:]}
    )
    for kind, fields in BLOCK_FIELDS.items()
]
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system"]) | JSON,
            "content": JSON | st.text() | st.lists(st.one_of(BLOCKS), max_size=3),
        }
    ),
    max_size=3,
)
BODIES = st.fixed_dictionaries(
    {"max_tokens": st.just(5) | JSON},
    optional={"model": st.just("m") | JSON, "messages": MESSAGES | JSON}
    | {
        field.name: JSON
        for field in (*MESSAGES_FIELDS, *COUNT_FIELDS)
        if field.name not in ("model", "messages", "max_tokens")
    },
)


@given(BODIES)
def test_junk_is_either_refused_or_sent(body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    for read in (read_message, read_count):
        found = outcome(lambda read=read: len(sent(read(parse_object(data)))))  # type: ignore[misc]
        assert found in (1, 400)
