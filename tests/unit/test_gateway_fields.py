"""Fields and histories as the clients of this year send them, in all APIs: none of them ends a
session, and what has no effect is named."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from mlxsup.client import Channel, Delta
from mlxsup.client.thinking import thinking_arguments
from mlxsup.gateway.answers import ignored
from mlxsup.gateway.anthropic.client_tools import CLIENT_TOOLS
from mlxsup.gateway.ask import Ask
from mlxsup.gateway.converter import Api, ask_of, encode_ask, head_of, read_ask
from mlxsup.gateway.failure import Failure
from mlxsup.gateway.fields import MOST_UNREAD, check_unread
from mlxsup.gateway.openai.chunks import ChatShape
from mlxsup.gateway.responses.events import ResponseShape
from mlxsup.gateway.responses.requests import ResponseAsk
from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.tool_choice import ToolChoice

from support.client.sent_requests import asked_in
from support.gateway.played_gateway import (
    CHAT,
    HI,
    LEAST_OF,
    PlayedDaemon,
    Site,
    post,
    result,
    said,
)

(HELLO,) = HI


def read(api: Api, **fields: Any) -> Ask:
    return read_ask(api, json.dumps(LEAST_OF[api] | fields).encode())


def asked(api: Api, **fields: Any) -> dict[str, Any]:
    """Return what the daemon is asked, without the model."""
    ((_, frames),) = encode_ask(read(api, **fields))
    return {name: value for name, value in asked_in(frames).items() if name != "model"}


def chat_of(api: Api, *turns: dict[str, Any]) -> list[dict[str, Any]]:
    place = "input" if api is Api.RESPONSE else "messages"
    found: list[dict[str, Any]] = asked(api, **{place: [HELLO, *turns, HELLO]})["messages"][1:-1]
    return found


# ---------------------------------------------------------------- names


def test_null_is_absent_on_the_socket() -> None:
    body = {"prompt": "a", "thread": None, "temperature": None}
    assert RequestBody.from_wire(body).to_wire() == {"prompt": "a"}


@pytest.mark.parametrize("api", LEAST_OF)
def test_unknown_field_is_answered_and_named_or_refused(api: Api) -> None:
    ask = read(api, temprature=1, provider={"order": []})
    assert asked(api, temprature=1) == asked(api)
    assert ask.unread == ["temprature", "provider"]
    assert ask_of(api, head_of(ask)).unread == ask.unread  # also if a converter reads the body
    with pytest.raises(Failure, match="temprature is not known here") as caught:
        check_unread(ask.unread)
    assert (caught.value.status, caught.value.param) == (400, "temprature")


def test_header_has_the_names_as_one_line_of_ascii() -> None:
    names = {"a\r\nx-evil: 1": 1, "größe": 1, **{f"f{n}": 1 for n in range(99)}}
    ask = read(Api.CHAT, **names)
    assert len(ask.unread) == MOST_UNREAD
    (header,) = ignored(ask).values()
    assert header.startswith(r"a??x-evil: 1, gr\xf6\xdfe, f0")
    assert not ignored(read(Api.CHAT))


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        (Api.RESPONSE, {"tools": [{"type": "web_search"}] * 99}),
        (Api.RESPONSE, {"input": [HELLO, *[{"type": "web_search_call"}] * 99]}),
        (Api.MESSAGE, {"tools": [{"type": "web_search_20250305", "name": "w"}] * 99}),
    ],
)
def test_names_in_the_header_are_limited(api: Api, fields: dict[str, Any]) -> None:
    assert len(read(api, **fields).unread) == MOST_UNREAD


@pytest.mark.parametrize("is_streamed", [False, True])
def test_answer_names_what_it_does_not_heed_unless_that_is_refused(is_streamed: bool) -> None:
    body = LEAST_OF[Api.CHAT] | {"temprature": 1, "verbosity": "low", "stream": is_streamed}
    answered = post(CHAT, **body)
    assert (answered.status, answered.headers["x-mlxsup-ignored"]) == (200, "temprature, verbosity")
    strict = Site(PlayedDaemon(said("a")), refuses_unread=True)
    refused = asyncio.run(strict.ask("POST", CHAT, body))
    assert (refused.status, refused.error["param"]) == (400, "temprature")
    assert not strict.daemon.asked
    del body["temprature"], body["verbosity"]
    assert "x-mlxsup-ignored" not in asyncio.run(strict.ask("POST", CHAT, body)).headers


@pytest.mark.parametrize(
    ("api", "fields", "path"),
    [
        (Api.CHAT, {"verbosity": "low"}, "verbosity"),
        (Api.CHAT, {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        (Api.CHAT, {"skip_special_tokens": False}, "skip_special_tokens"),
        (Api.CHAT, {"response_format": {"type": "json_schema", "json_schema": {
            "name": "n", "schema": {}, "mood": 1}}}, "response_format.json_schema.mood"),
        (Api.CHAT, {"reasoning": {"enabled": True, "max_tokens": 9}}, "reasoning.max_tokens"),
        (Api.RESPONSE, {"text": {"verbosity": "low"}}, "text.verbosity"),
        (Api.RESPONSE, {"text": {"format": {"type": "text", "mood": 1}}}, "text.format.mood"),
        (Api.RESPONSE, {"reasoning": {"mood": 1}}, "reasoning.mood"),
        (Api.RESPONSE, {"tools": [{"type": "function", "name": "f", "mood": 1}]}, "tools[0].mood"),
        (Api.RESPONSE, {"truncation": "auto"}, "truncation"),
        (Api.RESPONSE, {"tools": [{"type": "web_search"}]}, "tools[0] (web_search)"),
        (Api.RESPONSE, {"input": [HELLO, {"type": "web_search_call", "id": "w"}]},
         "input[1] (web_search_call)"),
        (Api.MESSAGE, {"tool_choice": {"type": "auto", "mood": 1}}, "tool_choice.mood"),
        (Api.MESSAGE, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
         "tools[0] (web_search_20250305)"),
        (Api.MESSAGE, {"tools": [{"name": "f", "input_schema": {}, "input_examples": [{}]}]},
         "tools[0].input_examples"),
    ],
)  # fmt: skip
def test_hint_that_cannot_be_followed_is_named(api: Api, fields: dict[str, Any], path: str) -> None:
    assert read(api, **fields).unread == [path]


@pytest.mark.parametrize(
    "fields",
    [
        {"verbosity": "medium"}, {"skip_special_tokens": True}, {"echo": False}, {"best_of": 1},
        {"typical_p": 1.0},
        {"include_reasoning": True}, {"cache_prompt": True}, {"stop": ""}, {"max_tokens": -1},
        {"top_k": -1}, {"seed": -1}, {"stream_options": {"include_usage": True}},
    ],
)  # fmt: skip
def test_value_that_changes_nothing_is_silent(fields: dict[str, Any]) -> None:
    assert asked(Api.CHAT, **fields) == asked(Api.CHAT)
    assert not read(Api.CHAT, **fields).unread


def _form(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"n_predict": 5}, {"max_tokens": 5}),
        ({"stop": ["x"], "stop_sequences": ["x"]}, {"stop": ["x"]}),
        ({"max_tokens": 5.0, "seed": 3.0}, {"max_tokens": 5, "seed": 3}),
        ({"top_p": 0}, {"top_k": 1}),
        ({"guided_json": SCHEMA}, _form(SCHEMA)),
        ({"guided_json": json.dumps(SCHEMA)}, _form(SCHEMA)),
        ({"json_schema": {"name": "n", "schema": SCHEMA}}, _form(SCHEMA)),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, _form(SCHEMA)),
        ({"response_format": {"type": "json_object", "value": SCHEMA}}, _form(SCHEMA)),
        ({"response_format": {"type": "json", "value": SCHEMA}}, _form(SCHEMA)),
        ({"response_format": {"type": "regex", "value": "a+"}},
         {"response_format": {"type": "regex", "regex": "a+"}}),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, _form(SCHEMA)),
        ({"regex": "a+"}, {"response_format": {"type": "regex", "regex": "a+"}}),
        ({"guided_regex": "a+"}, {"response_format": {"type": "regex", "regex": "a+"}}),
        ({"guided_choice": ["a.b", "c d"]},
         {"response_format": {"type": "regex", "regex": r"a\.b|c d"}}),
        ({"structured_outputs": {"json_object": True}},
         {"response_format": {"type": "json_object"}}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETION])
def test_synonym_of_another_server_means_the_same(
    api: Api, fields: dict[str, Any], meant: dict[str, Any]
) -> None:
    assert asked(api, **fields) == asked(api) | meant
    assert not read(api, **fields).unread


@pytest.mark.parametrize(
    ("fields", "meant"),
    [
        ({}, None),
        ({"continue_final_message": False}, False),
        ({"add_generation_prompt": True}, False),
        ({"add_generation_prompt": False}, True),
        ({"add_generation_prompt": False, "continue_final_message": True}, True),
        ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
        ({"add_generation_prompt": "yes"}, "add_generation_prompt"),
    ],
    ids=json.dumps,
)
def test_a_chat_says_whether_its_last_message_is_continued(
    fields: dict[str, Any], meant: bool | str | None
) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    if isinstance(meant, str):
        with pytest.raises(Failure) as caught:
            read(Api.CHAT, **chat, **fields)
        assert (caught.value.status, caught.value.param) == (400, meant)
    else:
        assert asked(Api.CHAT, **chat, **fields).get("continue_final_message") is meant


@pytest.mark.parametrize(
    ("fields", "template"),
    [
        ({"enable_thinking": False}, thinking_arguments(thinks=False)),
        ({"think": True}, thinking_arguments(thinks=True)),
        ({"think": "low"}, {**thinking_arguments(thinks=True), "reasoning_effort": "low"}),
        ({"thinking": {"type": "disabled"}}, thinking_arguments(thinks=False)),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, thinking_arguments(thinks=True)),
        ({"thinking": {"type": "adaptive"}}, thinking_arguments(thinks=True)),
        ({"thinking": {"type": "auto"}}, thinking_arguments(thinks=True)),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"reasoning": {"enabled": True, "effort": "low"}},
         {**thinking_arguments(thinks=True), "reasoning_effort": "low"}),
        ({"reasoning": {"enabled": False}}, thinking_arguments(thinks=False)),
        ({"reasoning_effort": "none"},
         {"reasoning_effort": "none", **thinking_arguments(thinks=False)}),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
         {"enable_thinking": False, "thinking": True}),
        ({"enable_thinking": False, "reasoning_effort": "high"}, thinking_arguments(thinks=False)),
        ({"think": False, "reasoning": {"effort": "low"}}, thinking_arguments(thinks=False)),
        ({"enable_thinking": True, "reasoning_effort": "high"},
         {**thinking_arguments(thinks=True), "reasoning_effort": "high"}),
        ({"enable_thinking": False, "thinking": {"type": "disabled"}},
         thinking_arguments(thinks=False)),
    ],
)  # fmt: skip
def test_every_way_to_ask_for_reasoning_reaches_the_template(
    fields: dict[str, Any], template: dict[str, Any]
) -> None:
    assert asked(Api.CHAT, **fields)["chat_template_kwargs"] == template


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty", "differ"),
        ({"regex": "a", "guided_json": SCHEMA}, "regex", "send only one format"),
        ({"guided_json": "{"}, "guided_json", "must be a JSON schema"),
        ({"guided_choice": []}, "guided_choice", "a list of texts"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "must not have an empty text"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar", "no effect"),
        ({"structured_outputs": {"jsonn": {}}}, "structured_outputs.jsonn", "ask for json"),
        ({"structured_outputs": 5}, "structured_outputs", "must be an object"),
        ({"thinking": {"type": "wrong"}}, "thinking", '"enabled" or "disabled"'),
        ({"reasoning": {"enabled": "x"}}, "reasoning", "effort or enabled"),
        ({"grammar": "root ::= x"}, "grammar", "no effect here"),
        ({"echo": True}, "echo", "does not repeat the prompt"),
        ({"functions": [{}]}, "functions", "newer form"),
        ({"response_format": {"type": "json_object", "schema": 5}}, "response_format", "a schema"),
        ({"response_format": {"type": "json_object", "value": 5}}, "response_format", "a schema"),
        ({"response_format": "json"}, "response_format", "must be of type text"),
        ({"think": 3}, "think", "must be true, false or an effort"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort", "must be text"),
        ({"think": True, "enable_thinking": False}, "think", "enable_thinking and think contra"),
        ({"think": True, "reasoning_effort": "none"}, "think", "reasoning_effort and think contra"),
    ],
)
def test_what_would_change_the_answer_is_refused(
    fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(Failure, match=words) as caught:
        read(Api.CHAT, **fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("seed", "n", "meant"),
    [(-5, 1, [2**63 - 5]), (2**63 - 1, 2, [2**63 - 1, 0]), (9223372036854775807 + 1, 1, [0])],
)
def test_any_integer_is_a_seed(seed: int, n: int, meant: list[int]) -> None:
    asks = encode_ask(read(Api.CHAT, seed=seed, n=n))
    assert [asked_in(frames)["seed"] for _, frames in asks] == meant


def test_the_best_of_as_many_answers_are_all_of_them() -> None:
    assert read(Api.COMPLETION, n=2, best_of=2).n == 2
    for fields in ({"n": 2, "best_of": 3}, {"best_of": True, "n": 1}):
        with pytest.raises(Failure, match="choose among the answers"):
            read(Api.COMPLETION, **fields)


# ---------------------------------------------------------------- histories

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("turn", "shown"),
    [
        ({"role": "assistant", "content": "a", "reasoning": "r", "reasoning_details": [{}],
          "provider_specific_fields": {"x": 1}, "annotations": [], "audio": {"id": "x"}},
         {"role": "assistant", "content": "a", "reasoning_content": "r"}),
        ({"role": "assistant", "content": "a", "thinking": "r", "thinking_blocks": [{}]},
         {"role": "assistant", "content": "a", "reasoning_content": "r"}),
        ({"role": "assistant", "content": "a", "refusal": "no"},
         {"role": "assistant", "content": "a"}),
        ({"role": "assistant", "content": None, "refusal": "no"},
         {"role": "assistant", "content": "no"}),
        ({"role": "assistant", "content": None, "function_call": CALL["function"]},
         {"role": "assistant", "content": None, "tool_calls": [CALL | {"id": "call_0"}]}),
        ({"role": "function", "name": "f", "content": "42"},
         {"role": "tool", "name": "f", "content": "42"}),
        ({"role": "assistant", "content": [
            {"type": "thinking", "thinking": "x"}, {"type": "output_text", "text": "a", "mood": 1},
            {"type": "refusal", "refusal": "no"}]},
         {"role": "assistant", "content": "ano"}),
        ({"role": "system", "content": [{"type": "input_text", "text": "a"}]},
         {"role": "system", "content": "a"}),
    ],
)  # fmt: skip
def test_history_of_another_server_goes_on_in_a_chat(
    turn: dict[str, Any], shown: dict[str, Any]
) -> None:
    assert chat_of(Api.CHAT, turn) == [shown]


def _used(name: str, arguments: str, output: str) -> list[dict[str, Any]]:
    function = {"name": name, "arguments": arguments}
    return [
        {"role": "assistant", "content": "",
         "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": output},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "output", "arguments"),
    [
        ({"type": "custom_tool_call", "name": "patch", "input": "a\n"}, "custom_tool_call_output",
         '{"input": "a\\n"}'),
        ({"type": "function_call", "name": "patch", "arguments": "{}", "async": None, "mood": 1},
         "function_call_output", "{}"),
        ({"type": "local_shell_call", "action": {"command": ["ls"]}}, "local_shell_call_output",
         '{"command": ["ls"]}'),
        ({"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "/a"}},
         "apply_patch_call_output", '{"type": "delete_file", "path": "/a"}'),
    ],
)  # fmt: skip
def test_items_of_another_server_go_on_in_a_response(
    call: dict[str, Any], output: str, arguments: str
) -> None:
    turns = [call | {"call_id": "c", "id": "x"}, {"type": output, "call_id": "c", "output": "ok"}]
    name = call.get("name", call["type"].removesuffix("_call"))
    assert chat_of(Api.RESPONSE, *turns) == _used(name, arguments, "ok")


@pytest.mark.parametrize("result", [{"output": "ok"}, {"output": None, "error": "ok"}])
def test_call_that_another_server_has_run_is_shown_with_its_output(result: dict[str, Any]) -> None:
    call = {"type": "mcp_call", "id": "c", "server_label": "s", "name": "find", "arguments": "{}"}
    assert chat_of(Api.RESPONSE, call | result) == _used("find", "{}", "ok")


def test_outputs_of_shells_are_read_as_the_sdk_has_them() -> None:
    streams = [{"stdout": "a", "stderr": "b", "outcome": {"type": "exit", "exit_code": 0}}]
    shown = chat_of(
        Api.RESPONSE,
        {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "c", "output": streams},
        {"type": "local_shell_call", "id": "i", "call_id": "d", "action": {}},
        {"type": "local_shell_call_output", "id": "d", "output": "x"},
    )
    results = [(turn["tool_call_id"], turn["content"]) for turn in shown if turn["role"] == "tool"]
    assert results == [("c", "a\nb"), ("d", "x")]


def test_blocks_of_anthropics_servers_are_left_out_and_their_texts_shown() -> None:
    document = {"type": "document", "title": "T", "source": {"type": "text", "data": "words"}}
    found = {"type": "search_result", "title": "S", "source": "here",
             "content": [{"type": "text", "text": "hit"}]}  # fmt: skip
    shown = chat_of(
        Api.MESSAGE,
        {"role": "assistant", "content": [
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
            {"type": "tool_use", "id": "c", "name": "f", "input": None, "toolset_name": None}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "is_error": None,
                                      "content": [document, found]}]},
    )  # fmt: skip
    assert shown == _used("f", "{}", "T\nwords\nS\nhere\nhit")


# ---------------------------------------------------------------- tools


def test_tools_that_the_client_runs_itself_are_described() -> None:
    given = [{"type": f"{kind}_20250728", "name": kind} for kind in CLIENT_TOOLS]
    tools = asked(Api.MESSAGE, tools=given)["tools"]
    for tool, (description, schema) in zip(tools, CLIENT_TOOLS.values(), strict=True):
        function = tool["function"]
        assert (function["description"], function["parameters"]) == (description, schema)


def test_deferred_tool_is_offered_once_the_chat_refers_to_it() -> None:
    tools = [
        {"name": name, "input_schema": SCHEMA, "defer_loading": name != "find"}
        for name in ("find", "read", "write", "move")
    ]
    calls = [
        {"type": "tool_use", "id": "1", "name": "find", "input": {}},
        {"type": "tool_use", "id": "2", "name": "write", "input": {}},
    ]
    referred = {"type": "tool_reference", "tool_name": "read"}
    results = [
        {"type": "tool_result", "tool_use_id": "1", "content": [referred]},
        {"type": "tool_result", "tool_use_id": "2", "content": "done"},
    ]
    turns = [
        HELLO, {"role": "assistant", "content": calls}, {"role": "user", "content": results},
    ]  # fmt: skip
    chosen = asked(Api.MESSAGE, tools=tools, tool_choice={"type": "tool", "name": "move"})["tools"]
    assert [tool["function"]["name"] for tool in chosen] == ["find", "move"]
    for chat, names in (([HELLO], ["find"]), (turns, ["find", "read", "write"])):
        offered = asked(Api.MESSAGE, tools=tools, messages=chat)["tools"]
        assert [tool["function"]["name"] for tool in offered] == names


CUSTOM = {"type": "custom", "name": "patch", "description": "Edit.",
          "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"}}  # fmt: skip


GRAMMAR = {"syntax": "lark", "definition": "start: X"}
CUSTOM_IN_CHATS = {"type": "custom", "custom": {"name": "patch", "description": "Edit.",
                   "format": {"type": "grammar", "grammar": GRAMMAR}}}  # fmt: skip


@pytest.mark.parametrize(
    ("api", "given", "path"),
    [
        (Api.RESPONSE, CUSTOM, "tools[0].format"),
        (Api.CHAT, CUSTOM_IN_CHATS, "tools[0].custom.format"),
        (Api.TEMPLATE, CUSTOM_IN_CHATS, "tools[0].custom.format"),
    ],
)
def test_custom_tool_is_a_function_with_one_text(
    api: Api, given: dict[str, Any], path: str
) -> None:
    (tool,) = asked(api, tools=[given])["tools"]
    assert read(api, tools=[given]).unread == [path], "told, not enforced"
    assert tool["function"]["parameters"]["required"] == ["input"]
    assert "lark grammar:\nstart: X" in tool["function"]["description"]


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "field", "value"),
    [
        ("patch", '{"input": "*** Begin\\n"}', "custom_tool_call", "input", "*** Begin\n"),
        ("patch", '{"text": 1}', "function_call", "arguments", '{"text": 1}'),
        ("plain", '{"input": "a"}', "function_call", "arguments", '{"input": "a"}'),
    ],
)
def test_call_of_a_custom_tool_comes_back_as_one(
    name: str, arguments: str, kind: str, field: str, value: str
) -> None:
    ask = read(Api.RESPONSE, tools=[CUSTOM, {"type": "function", "name": "plain"}])
    assert isinstance(ask, ResponseAsk)
    shape = ResponseShape(ask, "r", 0)
    function = {"name": name, "arguments": arguments}
    call = json.dumps({"id": "c", "type": "function", "function": function})
    sent = shape.piece(0, Delta(text=call, token_ids=[], channel=Channel.TOOL_CALL)) or b""
    (item,) = shape.whole([result("")])["output"]
    assert (item["type"], item["name"], item[field]) == (kind, name, value)
    assert f"response.{kind}_{field}.done".encode() in sent


@pytest.mark.parametrize(
    ("name", "arguments", "shown"),
    [
        ("patch", '{"input": "a\\n"}',
         {"type": "custom", "custom": {"name": "patch", "input": "a\n"}}),
        ("patch", '{"text": 1}',
         {"type": "function", "function": {"name": "patch", "arguments": '{"text": 1}'}}),
        ("plain", '{"input": "a"}',
         {"type": "function", "function": {"name": "plain", "arguments": '{"input": "a"}'}}),
    ],
)  # fmt: skip
def test_call_of_a_custom_tool_comes_back_as_one_in_a_chat(
    name: str, arguments: str, shown: dict[str, Any]
) -> None:
    ask = read(
        Api.CHAT, tools=[CUSTOM_IN_CHATS, {"type": "function", "function": {"name": "plain"}}]
    )
    shape = ChatShape(ask_of(Api.CHAT, head_of(ask)), "c", 0)
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    piece = Delta(text=json.dumps(call), token_ids=[], channel=Channel.TOOL_CALL)
    sent = json.loads((shape.piece(0, piece) or b"").removeprefix(b"data: "))
    assert sent["choices"][0]["delta"]["tool_calls"] == [{"index": 0, "id": "c", **shown}]
    (choice,) = shape.whole([replace(result(""), tool_calls=[call])])["choices"]
    assert choice["message"]["tool_calls"] == [{"id": "c", **shown}]


def test_chat_with_a_custom_tool_goes_on() -> None:
    custom = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": 'a"'}}
    (turn,) = chat_of(Api.CHAT, {"role": "assistant", "content": None, "tool_calls": [custom]})
    called = {"name": "patch", "arguments": '{"input": "a\\""}'}
    assert turn["tool_calls"] == [{"id": "c", "type": "function", "function": called}]


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "custom": {"name": "patch"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
            {"type": "custom", "custom": {"name": "patch"}}]}},
    ],
)  # fmt: skip
def test_custom_tool_can_be_chosen(choice: dict[str, Any]) -> None:
    given = asked(Api.CHAT, tools=[CUSTOM_IN_CHATS], tool_choice=choice)
    body = RequestBody.from_wire(given)
    assert body.choice == ToolChoice(names=frozenset({"patch"}), is_forced=True)
