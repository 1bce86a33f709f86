"""Bodies over HTTP in every API: the request of the daemon that each becomes, or its refusal."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from mlxsup.client import RequestError
from mlxsup.gateway import limits
from mlxsup.gateway.anthropic.conversation import BLOCKS as BLOCK_TYPES
from mlxsup.gateway.anthropic.fields import COUNT_FIELDS, MESSAGES_FIELDS
from mlxsup.gateway.anthropic.requests import MessageAsk, read_message
from mlxsup.gateway.converter import Api, parse_object, read_ask
from mlxsup.gateway.errors import failure_of
from mlxsup.gateway.failure import Failure
from mlxsup.gateway.fields import Use
from mlxsup.gateway.ollama import requests as ollama
from mlxsup.gateway.openai.fields import CHAT_FIELDS, COMPLETION_FIELDS
from mlxsup.gateway.openai.messages import READ
from mlxsup.gateway.openai.tokens import DETOKENIZE_FIELDS, TEMPLATE_FIELDS, TOKENIZE_FIELDS
from mlxsup.gateway.responses.fields import RESPONSE_FIELDS
from mlxsup.gateway.responses.input import ITEMS
from mlxsup.gateway.responses.requests import ResponseAsk, read_response
from mlxsup.gateway.vectors import requests as vectors

from support.client.sent_requests import JSON, asked_in, outcome, sent
from support.gateway.played_gateway import HI, LEAST_OF

FIELDS = {
    Api.CHAT: CHAT_FIELDS, Api.COMPLETION: COMPLETION_FIELDS, Api.RESPONSE: RESPONSE_FIELDS,
    Api.MESSAGE: MESSAGES_FIELDS, Api.COUNT: COUNT_FIELDS, Api.RESPONSE_COUNT: RESPONSE_FIELDS,
    Api.OLLAMA_CHAT: ollama.CHAT_FIELDS, Api.GENERATE: ollama.GENERATE_FIELDS,
    Api.TOKENIZE: TOKENIZE_FIELDS, Api.TEMPLATE: TEMPLATE_FIELDS, Api.DETOKENIZE: DETOKENIZE_FIELDS,
    Api.EMBEDDINGS: vectors.EMBEDDING_FIELDS, Api.RERANK: vectors.RERANK_FIELDS,
    Api.OLLAMA_EMBED: vectors.OLLAMA_EMBED_FIELDS,
    Api.OLLAMA_EMBEDDING: vectors.OLLAMA_EMBEDDING_FIELDS,
}  # fmt: skip


def comes_of(api: Api, **fields: Any) -> str:
    """Return what the daemon is asked for each answer, and how it is shown; or the refusal."""
    body = LEAST_OF[api] | fields
    names: Mapping[str, str] = {}
    try:
        ask = read_ask(api, json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        names = ask.names
        choices = [asked_in(frames) for frames in sent(ask)]
    except (Failure, RequestError) as error:
        refusal = error if isinstance(error, Failure) else failure_of(error, names)
        return f"{refusal.status} {refusal.param}: {refusal.message}"
    shown: dict[str, Any] = {
        "stream": ask.is_streamed, "usage": ask.has_usage, "one_call": ask.has_one_call,
    }  # fmt: skip
    if isinstance(ask, MessageAsk):
        shown |= {"thinking": ask.shows_thinking, "most": ask.max_tokens}
    if isinstance(ask, ResponseAsk):
        shown |= {"called": ask.called, "echo": ask.echo}
    shown = {name: value for name, value in shown.items() if value}
    return json.dumps([*choices, shown], ensure_ascii=False, default=asdict)


def without_least(api: Api, outcome: str) -> str:
    """Return what is asked beside the least; of a refusal, not every name that is known."""
    if outcome.startswith("4"):
        return re.sub("; known are .*", "; known are …", outcome)
    least = json.loads(comes_of(api))[0]
    *choices, shown = json.loads(outcome)
    lines = [{k: v for k, v in one.items() if v != least.get(k)} for one in choices]
    if isinstance(echo := shown.get("echo"), dict):
        usual = json.loads(comes_of(Api.RESPONSE))[-1]["echo"]
        shown["echo"] = {k: v for k, v in echo.items() if v != usual[k]}
    return json.dumps([*lines, {k: v for k, v in shown.items() if v}], ensure_ascii=False)


def without_echo(outcome: str) -> Any:
    """Return what the daemon is asked, without what the response says of its request."""
    *choices, shown = json.loads(outcome)
    return choices, {name: value for name, value in shown.items() if name != "echo"}


def name_of(fields: dict[str, Any]) -> str:
    text = json.dumps(fields, ensure_ascii=True)
    return text if len(text) < 600 else f"{text[:60]} … {len(text)}"


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def said(role: str, *texts: str, kind: str = "input_text") -> dict[str, Any]:
    return {"role": role, "content": [{"type": kind, "text": one} for one in texts]}


def called(name: str, call_id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": "{}"}


def thought(words: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": words}]
    return {"type": "reasoning", "id": "rs", "summary": [], "content": content}


def used(**result: Any) -> list[dict[str, Any]]:
    """Return messages in which a tool of Anthropic's API was called and has answered."""
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    answer = {"type": "tool_result", "tool_use_id": "c", **result}
    return [*HI, {"role": "assistant", "content": [call]}, user(answer)]


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = {"type": "object"}
FUNCTION = {"type": "function", "name": "f", "description": "does", "strict": True,
            "parameters": SCHEMA}  # fmt: skip
KEPT: list[dict[str, Any]] = [
    {"keep_alive": value} for value in (0, 300, "5m", "90", -7.5, "-1m", "soon", True, "1e400")
] + [{"ttl": -1}, {"ttl": [1]}, {"keep_alive": 1, "ttl": 1}]  # fmt: skip
"""Times for a model to stay, as other programs write them, and texts that are none."""

SPACES = [
    {"type": "namespace", "name": space, "description": "d",
     "tools": [{"type": "function", "name": name, "parameters": {}} for name in names]}
    for space, names in (("s", "ab"), ("t", "bc"))
]  # fmt: skip

FUNCTION_NAMED = {"type": "function", "name": "f"}
TOOL = {"type": "function", "function": {"name": "f"}}


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


BLOCKS: list[dict[str, Any]] = [
    {"type": "poem"}, {"type": []}, {"type": "text"}, text("a", mood=1),
    {"type": "tool_use", "id": "a", "name": "f", "input": {}},
    {"type": "tool_result", "tool_use_id": "c", "is_error": 1},
]  # fmt: skip
"""Blocks of a user of Anthropic's API that are refused."""

TOKENIZED_CHATS: list[dict[str, Any]] = [
    {}, {"tools": []}, {"add_generation_prompt": False}, {"add_special_tokens": True},
    {"add_generation_prompt": False, "continue_final_message": True},
    {"add_generation_prompt": True, "continue_final_message": True},
    {"chat_template": "x"}, {"chat_template_kwargs": {"a": 1}},
]  # fmt: skip

BODIES: dict[Api, list[dict[str, Any]]] = {
    Api.CHAT: [
        {"prompt_logprobs": 1, "max_completion_tokens": 0},
        {"temperature": 0.5, "top_p": 0.9, "seed": 3, "max_completion_tokens": 9, "stop": "\n",
         "user": "u", "timeout_s": 5, "queue_timeout_s": 1, "first_token_timeout_s": 2,
         "priority": "batch"},
        *KEPT,
        {"messages": [{"role": "developer", "content": "be brief"},
                      user(text("a"), text("b", cache_control={})) | {"name": "ada"}]},
        {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": [CALL],
                               "refusal": None},
                      {"role": "tool", "tool_call_id": "c", "content": "42"}]},
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True,
                                                     "parameters": {}}}],
         "tool_choice": "auto", "parallel_tool_calls": True},
        *({"tools": [TOOL], "tool_choice": choice} for choice in (
            "required", TOOL, FUNCTION_NAMED, allowed("required", TOOL))),
        {"tools": [], "parallel_tool_calls": False},
        {"reasoning_effort": "low"},
        {"reasoning_effort": "low", "chat_template_kwargs": {
            "reasoning_effort": "high", "enable_thinking": False}},
        {"n": 3, "seed": 5},
        {"n": 2},
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        {"model": "m" * 200}, {"messages": [{"role": "wizard", "content": ""}]},
        {"messages": [{"content": "a"}]}, {"messages": [{"role": "user"}]},
        {"messages": [*HI, {"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": "a", "mood": 1}]},
        {"n": 17}, {"stream": 1}, {"stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"x": 1}},
        {"max_tokens": 3, "max_completion_tokens": 4},
        {"modalities": ["text", "audio"]}, {"verbosity": "low"}, {"functions": [{}]},
        {"temprature": 1}, {"client": "bob"}, {"temperature": 99},
        *({"messages": [*HI, user(text("look"), {"type": kind, kind: {"url": "data:,x"}})]}
          for kind in ("input_audio", "file")),
        {"chat_template_kwargs": {"tools": 1}}, {"chat_template_kwargs": {"a": "x" * 70_000}},
    ],
    Api.COMPLETION: [
        {}, {"max_tokens": 3}, *KEPT[:3], {"prompt": [1, 2]}, {"prompt": ["a", "b"]},
        {"prompt": [[1], [2, 3]]}, {"prompt": ["a", "b"], "n": 2, "seed": 1}, {"logprobs": 2},
        {"prompt": None}, {"prompt": ["a", 3]}, {"prompt": ["a"] * 17},
        {"prompt": ["a"] * 16, "n": 2}, {"logprobs": 21}, {"echo": True, "max_tokens": 1},
        {"echo": True, "logprobs": 2},
        {"echo": True, "logprobs": 2, "max_tokens": 1}, {"prompt_logprobs": 3, "logprobs": 2},
        {"echo": True, "prompt_logprobs": 3, "logprobs": 2}, {"prompt_logprobs": 21},
        {"prompt_logprobs": 1, "stream": True}, {"max_tokens": 0}, {"suffix": "x"},
        {"best_of": True},
    ],
    Api.RESPONSE: [
        {"temperature": 0.5, "max_output_tokens": 9, "stream": True, "user": "u", "store": True},
        {"instructions": "a", "input": [said("developer", "b"), said("user", "c", "d"),
                                        said("user", "e")]},
        {"instructions": "", "input": [said("user", "a")]},
        {"input": [
            said("user", "hi"), thought("hm"),
            said("assistant", "one moment", kind="output_text") | {
                "type": "message", "id": "msg", "status": "completed"},
            called("f", "c1"), thought("so"), called("g", "c2"),
            {"type": "function_call_output", "call_id": "c1", "output": "42"},
            {"type": "function_call_output", "call_id": "c2",
             "output": [{"type": "input_text", "text": "43"}]},
            thought("oh"), said("assistant", "done", kind="output_text")]},
        {"input": [said("user", "hi"), {
            "type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}],
            "encrypted_content": "x"}, called("f", "c")]},
        {"tools": [{"type": "web_search", "external_web_access": False}, FUNCTION]},
        {"tools": [{"type": "web_search_preview"}]},
        {"tool_choice": "none"},
        {"tools": [{"type": "function", "name": "c", "parameters": {}}, *SPACES],
         "input": [said("user", "x"), called("b", "1") | {"namespace": "t"}, called("b", "2"),
                   called("a", "3")]},
        {"text": {"format": {"type": "json_schema", "name": "n", "strict": True,
                             "schema": SCHEMA}}},
        {"text": {"format": {"type": "json_object"}}},
        {"text": {"format": {"type": "text"}, "verbosity": "medium"}},
        {"reasoning": {"effort": "low", "summary": "auto"}},
        {"reasoning": {"effort": "low"}, "chat_template_kwargs": {"reasoning_effort": "high"}},
        {"parallel_tool_calls": False}, {"parallel_tool_calls": True},
        {"input": None}, {"input": []}, {"input": [3]}, {"input": [{"type": []}]},
        {"input": [thought("x")]}, {"input": [said("wizard")]}, {"input": [{"role": "user"}]},
        {"input": [{"role": "user", "content": [3]}]},
        {"input": [{"role": "user", "content": "a", "mood": 1}]},
        {"input": [{"type": "function_call", "call_id": "c"}]},
        {"input": [{"type": "function_call_output", "output": "x"}]},
        {"max_output_tokens": 0}, {"tools": [3]},
        {"tools": [{"type": "custom", "name": "f"}]}, {"tools": [{"type": "function"}]},
        {"tools": [{"type": "namespace", "name": "s", "tools": 3}]},
        {"tools": [{"type": "namespace", "name": "s", "tools": [{"type": "namespace"}]}]},
        {"tools": [{"type": "namespace", "tools": [{"type": "function", "name": "f"}]}]},
        *({"tools": [FUNCTION], "tool_choice": choice} for choice in (
            "required", "any", FUNCTION_NAMED, {"type": "custom", "name": "f"},
            {"type": "web_search"},
            {"type": "allowed_tools", "mode": "auto",
             "tools": [FUNCTION_NAMED, {"type": "web_search"}]})),
        {"text": {"format": {"type": "poem"}}}, {"text": {"verbosity": "low"}},
        {"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2},
        {"truncation": "auto"}, {"client": "bob"},
    ],
    Api.MESSAGE: [
        {"temperature": 0.5, "top_k": 3, "stop_sequences": ["x"], "stream": True,
         "metadata": {"a": 1}},
        {"system": "be brief"}, {"system": ""},
        *({"system": blocks} for blocks in (
            [text("x-anthropic-billing-header: cc=1;"), text("a"), text("b", cache_control={})],
            [text("x-anthropic-billing-header: cc=1;")])),
        {"messages": [user(text("a"), text("b")), user(text("c", citations=None))]},
        {"messages": [user()]},
        {"messages": [
            *HI,
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"}, text("one moment"),
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"é": 1}},
                {"type": "tool_use", "id": "c2", "name": "g", "input": {}}]},
            user({"type": "tool_result", "tool_use_id": "c1", "content": "42", "is_error": False},
                 {"type": "tool_result", "tool_use_id": "c2", "content": [text("a"), text("b")]},
                 text("and?"))]},
        {"messages": used()},
        *({"messages": used(is_error=True, content=content)}
          for content in ("no such file", [text("a"), text("b")], None)),
        {"tools": [{"name": "f", "description": "does", "input_schema": SCHEMA, "strict": True,
                    "cache_control": {"type": "ephemeral"}, "type": "custom",
                    "defer_loading": False}],
         "tool_choice": {"type": "auto", "disable_parallel_tool_use": False}},
        {"tools": [], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        *({"thinking": thinking} for thinking in (
            {"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"},
            {"type": "adaptive", "display": "summarized"},
            {"type": "enabled", "budget_tokens": 1024, "display": "omitted"})),
        {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}},
        {"output_config": {"effort": "low"}, "chat_template_kwargs": {
            "reasoning_effort": "high", "thinking": True}},
        {"max_tokens": 2**400},
        {"max_tokens": None}, {"messages": [{"role": "tool", "content": ""}]},
        {"messages": [{"role": [], "content": ""}]},
        {"messages": [{"role": "user"}]},
        *({"messages": [user(block)]} for block in BLOCKS),
        {"messages": [*HI, {"role": "assistant", "content": "once upon"}]},
        {"messages": [{"role": "assistant", "content": [
            {"type": "tool_use", "id": "a", "name": "f", "input": "x"}]}, *HI]},
        {"system": [{"type": "thinking", "thinking": "x"}]}, {"tools": [3]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": [{"name": "f"}]}, {"tools": [{"name": 3, "input_schema": {}}]},
        *({"tools": [{"name": "f", "input_schema": {}}], "tool_choice": choice} for choice in (
            {"type": "any"}, {"type": "tool", "name": "f"}, {"type": "auto", "name": "f"}, "auto",
            {"type": "tool"}, {"type": "required"},
            {"type": "auto", "disable_parallel_tool_use": 1})),
        {"messages": [{"role": "user", "content": [
            {"type": "text", "text": "before"},
            {"type": "tool_result", "tool_use_id": "c", "content": "result"},
            {"type": "text", "text": "after"}]}]},
        {"output_config": {"format": {"type": "poem"}}}, {"client": "bob"}, {"n": 2},
    ],
    Api.COUNT: [{"system": "s", "tools": []}, {"timeout_s": 1}, {"max_tokens": 9}],
    Api.TOKENIZE: [
        {}, {"messages": HI}, {"prompt": None}, {"prompt": ["a"]}, {"content": "a"},
        {"prompt": None, "content": "a"}, {"prompt": None, "content": "a", "add_special": True},
        {"prompt": "", "add_special_tokens": False}, {"return_token_strs": True},
        *({"prompt": None, "messages": HI, **more} for more in TOKENIZED_CHATS),
    ],
    Api.TEMPLATE: [{}, {"add_generation_prompt": False}, {"messages": None}, {"prompt": "a"}],
    Api.DETOKENIZE: [{"tokens": []}, {"tokens": [True]}],
    Api.RESPONSE_COUNT: [
        {"instructions": "s", "tools": [FUNCTION], "text": {"format": {"type": "json_object"}}},
        {"store": True, "stream": True, "max_output_tokens": 9}, {"model": None}, {"input": None},
    ],
}  # fmt: skip


@pytest.mark.parametrize("api", BODIES)
def test_body_is_asked_of_the_daemon_or_refused(api: Api, snapshot: SnapshotAssertion) -> None:
    found = {name_of(one): without_least(api, comes_of(api, **one)) for one in BODIES[api]}
    assert found == snapshot


@pytest.mark.parametrize("api", [Api.TOKENIZE, Api.TEMPLATE, Api.DETOKENIZE])
def test_ids_of_a_prompt_are_asked_for_only_where_they_are_shown(api: Api) -> None:
    (frames,) = sent(read_ask(api, json.dumps(LEAST_OF[api]).encode()))
    assert asked_in(frames)["tokenize"].get("ids", True) is (api is Api.TOKENIZE)


@pytest.mark.parametrize(
    ("api", "fields", "param"),
    [
        (Api.CHAT, {"stream": 1}, "stream"), (Api.CHAT, {"top_p": False}, "top_p"),
        (Api.CHAT, {"seed": 5.5}, "seed"), (Api.COMPLETION, {"logprobs": 0.5}, "logprobs"),
        (Api.CHAT, {"parallel_tool_calls": 0}, "parallel_tool_calls"),
        (Api.CHAT, {"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        (Api.COMPLETION, {"stream_options": []}, "stream_options"),
        (Api.RESPONSE, {"store": "no"}, "store"), (Api.RESPONSE, {"include": "x"}, "include"),
        (Api.RESPONSE, {"instructions": ["a"]}, "instructions"),
        (Api.RESPONSE, {"text": "x"}, "text"), (Api.RESPONSE, {"reasoning": True}, "reasoning"),
        (Api.RESPONSE, {"parallel_tool_calls": 0}, "parallel_tool_calls"),
        (Api.MESSAGE, {"stream": "x"}, "stream"), (Api.MESSAGE, {"thinking": "on"}, "thinking"),
        (Api.MESSAGE, {"tool_choice": "auto"}, "tool_choice"),
        (Api.MESSAGE, {"output_config": []}, "output_config"),
        (Api.OLLAMA_CHAT, {"stream": 0}, "stream"), (Api.OLLAMA_CHAT, {"tools": {}}, "tools"),
        (Api.OLLAMA_CHAT, {"options": {"repeat_last_n": False}}, "repeat_last_n"),
        (Api.GENERATE, {"raw": 1}, "raw"), (Api.GENERATE, {"system": ["a"]}, "system"),
        (Api.GENERATE, {"options": "x"}, "options"),
        (Api.TOKENIZE, {"add_special_tokens": 1}, "add_special_tokens"),
        (Api.TEMPLATE, {"add_generation_prompt": 1}, "add_generation_prompt"),
        (Api.EMBEDDINGS, {"dimensions": True}, "dimensions"),
        (Api.EMBEDDINGS, {"truncate": 1}, "truncate"), (Api.RERANK, {"query": 1}, "query"),
        (Api.RERANK, {"documents": "a"}, "documents"), (Api.RERANK, {"truncate": 1}, "truncate"),
        (Api.OLLAMA_EMBED, {"dimensions": True}, "dimensions"),
        (Api.OLLAMA_EMBED, {"truncate": "x"}, "truncate"),
        (Api.OLLAMA_EMBEDDING, {"prompt": ["a"]}, "prompt"),
    ],
)  # fmt: skip
def test_value_of_another_type_is_refused(api: Api, fields: dict[str, Any], param: str) -> None:
    assert comes_of(api, **fields).startswith(f"400 {param}: ")


@pytest.mark.parametrize("api", BODIES)
def test_null_is_as_good_as_nothing(api: Api) -> None:
    names = {field.name for field in FIELDS[api]} - LEAST_OF[api].keys()
    nulls = dict.fromkeys({*names, "temprature"})
    assert comes_of(api, **nulls) == comes_of(api)
    assert not read_ask(api, json.dumps(LEAST_OF[api] | nulls).encode()).unread


@pytest.mark.parametrize("api", BODIES)
def test_field_without_an_effect_is_ignored(api: Api) -> None:
    fields = [field for field in FIELDS[api] if field.use is Use.IGNORED]
    for field in fields:
        for value in ("x", {"a": 1}, True, 3):
            assert without_echo(comes_of(api, **{field.name: value})) == without_echo(comes_of(api))


@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETION, Api.RESPONSE, Api.MESSAGE])
def test_field_with_one_harmless_value_takes_no_other(api: Api) -> None:
    for field in FIELDS[api]:
        if field.use is Use.NEUTRAL:
            for value in field.neutral:
                found = comes_of(api, **{field.name: value})
                assert without_echo(found) == without_echo(comes_of(api)), field.name
            assert comes_of(api, **{field.name: {"x": 1}}).startswith(f"400 {field.name}: ")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not JSON"),
        (b"[]", "must be an object"),
        (b'{"a": NaN}', "NaN is not allowed"),
        (b'{"a": [-1e999]}', "too large: -1e999"),
        (b'{"a": \xff}', "not UTF-8 text (byte 6)"),
        (b'{"a": 1,}', "line 1, column"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a": ' * 5_000 + b"1" + b"}" * 5_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5_000 + b"}", "too many digits"),
        (rb'{"a": "\ud800"}', "half a surrogate pair"),
    ],
)
def test_bytes_that_are_no_object_are_refused_with_the_reason(data: bytes, words: str) -> None:
    with pytest.raises(Failure) as caught:
        parse_object(data)
    assert (caught.value.status, caught.value.code) == (400, "invalid_request")
    assert words in caught.value.message


def test_a_mark_of_utf_8_may_come_before_the_body() -> None:
    assert parse_object(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


# ---------------------------------------------------------------- how much a body may have

MANY = limits.MAX_ITEMS
TURN = {"role": "user", "content": "x"}
ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
THOUGHT = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 3200}]}
PLAIN = {"type": "function", "name": "f"}
COUNTED: list[tuple[Api, Callable[[int], dict[str, Any]], int, str]] = [
    (Api.CHAT, lambda n: {"messages": [TURN] * n}, MANY, "messages"),
    (Api.CHAT, lambda n: {"messages": [user(*[text("x")] * n)]}, MANY, "messages[0].content"),
    (Api.CHAT, lambda n: {"tools": [{"type": "function", "function": {"name": "f"}}] * n},
     limits.MAX_TOOLS, "tools"),
    (Api.MESSAGE, lambda n: {"messages": [TURN] * n}, MANY, "messages"),
    (Api.MESSAGE, lambda n: {"messages": [user(*[text("x")] * n)]}, MANY, "messages[0].content"),
    (Api.MESSAGE, lambda n: {"system": [text("x")] * n}, MANY, "system"),
    (Api.MESSAGE, lambda n: {"tools": [{"name": "f", "input_schema": {}}] * n}, limits.MAX_TOOLS,
     "tools"),
    (Api.RESPONSE, lambda n: {"input": [TURN] * n}, MANY, "input"),
    (Api.RESPONSE, lambda n: {"input": [said("user", *"x" * n)]}, MANY, "input[0].content"),
    (Api.RESPONSE, lambda n: {"tools": [PLAIN] * n}, limits.MAX_TOOLS, "tools"),
    (Api.RESPONSE, lambda n: {"tools": [{"type": "namespace", "name": "s", "tools": [PLAIN] * n}]},
     limits.MAX_TOOLS, "tools"),
]  # fmt: skip


def test_requests_of_one_body_are_limited_together(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = read_ask(Api.CHAT, json.dumps({**LEAST_OF[Api.CHAT], "n": 2}).encode())
    length = sum(len(frame) for frames in sent(twice) for frame in frames)
    monkeypatch.setattr(limits, "MAX_ASKED_BYTES", length + 99)  # ids differ in length
    assert len(sent(twice)) == 2
    monkeypatch.setattr(limits, "MAX_ASKED_BYTES", length // 2)
    with pytest.raises(Failure, match="exceeds 0 MiB; use a smaller n") as caught:
        sent(twice)
    assert caught.value.param == "n"


@pytest.mark.parametrize(("api", "fields", "most", "path"), COUNTED)
def test_lists_of_a_body_are_limited(
    api: Api, fields: Callable[[int], dict[str, Any]], most: int, path: str
) -> None:
    read_ask(api, json.dumps(LEAST_OF[api] | fields(most)).encode())
    refusal = comes_of(api, **fields(most + 1))
    assert refusal.startswith(f"400 {path}: {path} must have at most {most} ")
    assert f"not {most + 1}: send fewer" in refusal


def read_items(*items: dict[str, Any], count: int = MANY, **fields: Any) -> object:
    return read_response(LEAST_OF[Api.RESPONSE] | {"input": [*items] * count, **fields})


LONG: dict[str, Callable[[], object]] = {
    "messages of one role": lambda: read_message(
        LEAST_OF[Api.MESSAGE] | {"messages": [TURN | {"content": "x" * 800}] * MANY}
    ),
    "items of one role": lambda: read_items(TURN | {"content": "x" * 800}),
    "texts of the assistant": lambda: read_items({"role": "assistant", "content": "x" * 800}),
    "thoughts of the assistant": lambda: read_items(THOUGHT, ITEM, count=MANY // 2),
    "calls among many tools": lambda: read_items(
        ITEM, tools=[PLAIN | {"name": f"f{n}"} for n in range(1000)]
    ),
}


@pytest.mark.parametrize("what", LONG)
def test_reading_takes_linear_time(what: str) -> None:
    """CPU time of this thread alone; squared, each of these takes minutes."""
    begun_s = time.thread_time()
    LONG[what]()
    assert time.thread_time() - begun_s < 5.0


# ---------------------------------------------------------------- junk


PART_FIELDS = (
    "text", "thinking", "id", "name", "input", "tool_use_id", "content", "is_error", "source",
    "title", "tool_name", "role", "call_id", "arguments", "namespace", "output", "summary",
    "action",
)  # fmt: skip


def parts(kinds: Sequence[str]) -> st.SearchStrategy[Any]:
    """Return lists of objects that have a type and some fields."""
    some = st.dictionaries(st.sampled_from(PART_FIELDS), JSON | st.text(), max_size=4)
    one = st.tuples(st.sampled_from(kinds), some).map(lambda pair: {**pair[1], "type": pair[0]})
    return st.lists(one, max_size=2)


CHATS = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", *READ]), JSON)
    | st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "tool", "assistant", "system"]) | JSON,
            "content": JSON | st.text() | parts(BLOCK_TYPES),
        }
    ),
    max_size=3,
)
INPUTS = st.text() | JSON | parts(ITEMS)


@given(api=st.sampled_from(Api), data=st.data())
def test_junk_is_refused_or_sent(api: Api, data: st.DataObject) -> None:
    names = [field.name for field in FIELDS[api] if field.name not in LEAST_OF[api]]
    chosen = data.draw(st.lists(st.sampled_from(names), max_size=4, unique=True))
    body: dict[str, Any] = dict(LEAST_OF[api]) | {name: data.draw(JSON) for name in chosen}
    if "messages" in body:
        body["messages"] = data.draw(CHATS | JSON)
    if "input" in body:
        body["input"] = data.draw(INPUTS)
    if "prompt" in body:
        body["prompt"] = data.draw(st.text() | JSON)
    found = outcome(lambda: sent(read_ask(api, json.dumps(body).encode())))
    assert found in (400, 413) or isinstance(found, list)


@given(st.binary(max_size=64) | st.text(max_size=64).map(str.encode))
def test_any_bytes_are_an_object_or_refused(data: bytes) -> None:
    found = outcome(lambda: parse_object(data))
    assert found == 400 or isinstance(found, dict)
