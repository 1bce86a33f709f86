"""Answers in every API over HTTP: whole and streamed, cut, refused and broken off."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from mlxsup.client import (
    Channel,
    ConnectionLost,
    ErrorCode,
    FinishReason,
    Logprobs,
    Notice,
    NoticeKind,
    RequestError,
    TokenLogprob,
)
from mlxsup.gateway import limits
from mlxsup.gateway.converter import Api
from mlxsup.gateway.errors import HOW_TO_ADD
from mlxsup.protocol.version import VERSION

from support.gateway.played_gateway import (
    CHAT,
    COMPLETION,
    GENERATE,
    HI,
    LEAST,
    LEAST_OF,
    MESSAGE,
    OLLAMA_CHAT,
    RESPONSE,
    Item,
    PlayedDaemon,
    Response,
    Site,
    delta,
    post,
    refused,
    result,
)

THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
NAMES = {
    CHAT: "chat", COMPLETION: "completion", RESPONSE: "response", MESSAGE: "message",
    OLLAMA_CHAT: "ollama", GENERATE: "generate",
}  # fmt: skip
LEAST_AT = {path: {"model": "m", **fields} for path, fields in LEAST.items()} | {
    "/v1/embeddings": LEAST_OF[Api.EMBEDDINGS],
    "/v1/rerank": LEAST_OF[Api.RERANK],
    "/api/embeddings": LEAST_OF[Api.OLLAMA_EMBEDDING],
    "/detokenize": LEAST_OF[Api.DETOKENIZE],
}
"""The least body of each path that asks the daemon."""
WITH_CALLS = (CHAT, RESPONSE, MESSAGE, OLLAMA_CHAT)
HEADERS = (
    "content-type", "cache-control", "x-request-id", "request-id", "retry-after", "x-should-retry",
)  # fmt: skip


def shown(response: Response) -> str:
    """Return all of a response but times, the version, and what each chunk repeats of the first."""
    head = [f"{name}: {response.headers[name]}" for name in HEADERS if name in response.headers]
    times = r'("(?:created|completed)(?:_at)?": ?)(?:\d+|"[^"]*")'
    body = re.sub(times, r"\g<1>0", response.body.decode())
    for repeated in (
        r'"id":"(?:chat)?cmpl-.*?-VERSION",',
        r'"previous_response_id".*?"prompt_cache_key":null',
    ):
        first, *others = re.split(f"({repeated})", body.replace(VERSION, "VERSION"))
        assert len(set(others[::2])) <= 1, "each chunk has the same head"
        body = first + "".join(others[:2]) + "…".join(["", *others[3::2]])
    end = "" if response.is_whole else "\n(cut)"
    return "\n".join([str(response.status), *head, body.strip()]) + end


def error_in(body: dict[str, Any]) -> str:
    error = body["error"]
    if isinstance(error, str):  # Ollama's
        return error
    return f"{error['type']} {error.get('code', '')}".strip()


def brief(path: str, response: Response) -> str:
    """Return what is said, in one line: each text, thought and call, and why it ends.

    That of a stream is what its events add up to; of a refusal, what clients make of it.
    """
    retry = [response.headers.get(name, "-") for name in ("x-should-retry", "retry-after")]
    if response.status != 200:
        return " ".join([str(response.status), error_in(response.json()), *retry])
    is_streamed = response.body.startswith((b"data: ", b"event: "))
    parts = (PARTS_STREAMED if is_streamed else PARTS)[path](response)
    joined: list[list[Any]] = []
    for part in parts:
        kind, _, value = part
        if joined and joined[-1][:2] == list(part[:2]) and kind in ("text", "thought"):
            joined[-1][2] += value
        else:
            joined.append(list(part))
    return " | ".join(f"{kind}{place or ''} {value!r}" for kind, place, value in joined)


Part = tuple[str, int, Any]
"""Kind, number of the answer, and what it is."""


def of_choices(response: Response) -> Iterator[Part]:
    for chunk in response.events() if response.body.startswith(b"data: ") else [response.json()]:
        if chunk == "[DONE]":
            continue
        for choice in chunk.get("choices", ()):
            index = choice["index"]
            said = choice.get("message") or choice.get("delta") or choice
            for kind, name in (
                ("thought", "reasoning_content"),
                ("text", "content"),
                ("text", "text"),
            ):
                if said.get(name):
                    yield kind, index, said[name]
            for nth, call in enumerate(said.get("tool_calls", ())):
                function = call["function"]
                yield "call", call.get("index", nth), (function["name"], function["arguments"])
            for token in (choice.get("logprobs") or {}).get("content", ()):
                yield "scored", index, token["token"]
            if choice["finish_reason"]:
                yield "end", index, choice["finish_reason"]
        if usage := chunk.get("usage"):
            yield "usage", 0, (usage["prompt_tokens"], usage["completion_tokens"])
        if "error" in chunk:
            yield "broken off", 0, error_in(chunk)


def of_blocks(response: Response) -> Iterator[Part]:
    value = response.json()
    for block in value["content"]:
        if block["type"] == "tool_use":
            yield "call", 0, (block["name"], block["input"])
        else:
            yield "text" if block["type"] == "text" else "thought", 0, block[block["type"]]
    yield "end", 0, (value["stop_reason"], value["stop_sequence"])


def of_block_events(response: Response) -> Iterator[Part]:
    name = ""
    for _, event in response.named_events():
        match event:
            case {"content_block": {"type": "tool_use", "name": name}}:
                pass
            case {"delta": {"type": "input_json_delta", "partial_json": given}}:
                yield "call", 0, (name, json.loads(given))
            case {"delta": {"type": "text_delta", "text": text}}:
                yield "text", 0, text
            case {"delta": {"type": "thinking_delta", "thinking": text}}:
                yield "thought", 0, text
            case {"type": "message_delta", "delta": end}:
                yield "end", 0, (end["stop_reason"], end["stop_sequence"])
            case {"error": _}:
                yield "broken off", 0, error_in(event)


def of_items(response: Response) -> Iterator[Part]:
    events = [data for _, data in response.named_events()]
    value = next((one["response"] for one in reversed(events) if "response" in one), None)
    value = response.json() if value is None else value
    for item in value["output"]:
        if item["type"] == "function_call":
            yield "call", 0, (item.get("namespace", ""), item["name"], item["arguments"])
        elif item["content"]:
            kind = "text" if item["type"] == "message" else "thought"
            yield kind, 0, item["content"][0]["text"]
        if item["status"] != "completed":
            yield item["status"], 0, ""
    if events and "error" in events[-1]:
        yield "broken off", 0, error_in(events[-1])
    yield "end", 0, (value["status"], (value["incomplete_details"] or {}).get("reason"))


def of_lines(response: Response) -> Iterator[Part]:
    for line in response.lines():
        if "error" in line:
            yield "broken off", 0, error_in(line)
            continue
        made = line.get("message", line)
        for kind, name in (("thought", "thinking"), ("text", "content"), ("text", "response")):
            if made.get(name):
                yield kind, 0, made[name]
        for call in made.get("tool_calls", ()):
            function = call["function"]
            yield "call", function["index"], (function["name"], function["arguments"])
        for token in line.get("logprobs", ()):
            yield "scored", 0, token["token"]
        if line["done"]:
            yield "end", 0, line["done_reason"]
            yield "usage", 0, (line["prompt_eval_count"], line["eval_count"])


PARTS = {
    CHAT: of_choices, COMPLETION: of_choices, RESPONSE: of_items, MESSAGE: of_blocks,
    OLLAMA_CHAT: of_lines, GENERATE: of_lines,
}  # fmt: skip
PARTS_STREAMED = PARTS | {MESSAGE: of_block_events}


def called(name: str, arguments: str) -> dict[str, Any]:
    return {"id": f"c-{name}", "type": "function",
            "function": {"name": name, "arguments": arguments}}  # fmt: skip


def calling(*calls: dict[str, Any]) -> Item:
    return delta("".join(json.dumps(one) + "\n" for one in calls), channel=Channel.TOOL_CALL)


def thought(text: str) -> Item:
    return delta(text, channel=Channel.REASONING)


def token(text: str, *rivals: tuple[str, bytes], raw: bytes = b"") -> Logprobs:
    top = [TokenLogprob(token=9, logprob=-0.25, text=one, raw_bytes=bare) for one, bare in rivals]
    chosen = TokenLogprob(token=1, logprob=-0.5, text=text, raw_bytes=raw)
    return Logprobs(chosen=chosen, top=top)


F, G = called("f", '{"a":1}'), called("g", "{}")
END = result("yesmore", FinishReason.TOOL_CALLS, reasoning="hmmore", tool_calls=[F, G])
BOTH = [thought("hm"), delta("yes"), calling(F), calling(G), thought("more"), delta("more"), END]
ONE_CALL: dict[str, dict[str, Any]] = {
    CHAT: {"parallel_tool_calls": False},
    RESPONSE: {"parallel_tool_calls": False},
    MESSAGE: {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}} | THINKING,
}
HALVES = ((" \ufffd", b" \xc3"), (" \ufffd", b" \xe2"))
SCORES = [token("é", ("a", b"")), token(" \ufffd", *HALVES, raw=b" \xc3")]
SPACE = {"type": "namespace", "name": "s", "tools": [{"type": "function", "name": "f"}]}


@dataclass(frozen=True)
class Case:
    """An answer of the daemon, and what is sent for it in each API beside the least."""

    items: list[Item]
    fields: dict[str, dict[str, Any]] = field(default_factory=lambda: {path: {} for path in LEAST})
    count: int = 1


def unread(arguments: str, name: str = "f", reason: FinishReason = FinishReason.TOOL_CALLS) -> Case:
    """Return an answer whose only call cannot be read as JSON."""
    call = called(name, arguments)
    end = result("", reason, tool_calls=[call])
    return Case([calling(call), end], {path: {} for path in WITH_CALLS})


CASES = {
    "text": Case([delta("é\n"), delta(""), delta('"b'), result('é\n"b')]),
    "nothing": Case([result("")]),
    "thought, text and calls": Case(
        [thought("h"), thought("m"), delta("yes"), calling(F, G), delta("end"),
         result("yesend", FinishReason.TOOL_CALLS, reasoning="hm", tool_calls=[F, G])],
        {path: {} for path in LEAST} | {MESSAGE: THINKING},
    ),
    "thought that is not shown": Case(
        [thought("hm"), delta("yes"), result("yes", reasoning="hm")], {MESSAGE: {}}
    ),
    "call alone": Case(
        [calling(F), result("", FinishReason.TOOL_CALLS, tool_calls=[F])],
        {path: {} for path in WITH_CALLS},
    ),
    "one call after the other": Case(
        [calling(F, G), calling(F), calling(G),
         result("", FinishReason.TOOL_CALLS, tool_calls=[F, G, F, G])],
        {path: {} for path in WITH_CALLS},
    ),
    "call of a namespace": Case([calling(F), result("")], {RESPONSE: {"tools": [SPACE]}}),
    "one call at most": Case(BOTH, ONE_CALL),
    "one call at most, both in a piece": Case([*BOTH[:2], calling(F, G), *BOTH[4:]], ONE_CALL),
    "one call at most, none read": Case(
        [delta("no call\n", channel=Channel.TOOL_CALL), *BOTH[2:]], ONE_CALL
    ),
    "one call at most, none made": Case([delta("yes"), delta("more"), result("yesmore")], ONE_CALL),
    "one call at most, with scores": Case(
        [delta("y", logprobs=[token("y")]),
         delta(json.dumps(F) + "\n", channel=Channel.TOOL_CALL, logprobs=[token("f")]),
         delta("z", logprobs=[token("z")]),
         result("yz", logprobs=[token("y"), token("f"), token("z")])],
        {CHAT: {"parallel_tool_calls": False, "logprobs": True}},
    ),
    "call without a name": unread("{}", name=""),
    "call with half its arguments": unread('{"a', reason=FinishReason.LENGTH),
    "call with arguments that only Python reads": unread('{"x": NaN}'),
    "call with a number beyond all": unread('{"x": 1e999}'),
    "call with half a character": unread('{"x": "\\ud83d"}'),
    "cut at the limit": Case([delta("a" * 9), result("a" * 9, FinishReason.LENGTH)]),
    "cut at the end of the context": Case([thought("hm"), result("a" * 8, FinishReason.LENGTH)]),
    "ended by a stop string": Case([delta("abc"), result("abc", stop="x")]),
    "several answers": Case(
        [delta("ab"), result("ab")], {CHAT: {"n": 3}, COMPLETION: {"n": 3}}, count=3
    ),
    "usage asked for": Case(
        [delta("a"), result("a")],
        {path: {"stream_options": {"include_usage": True}} for path in (CHAT, COMPLETION)},
    ),
    "scores": Case(
        [delta("é", logprobs=SCORES[:1]), delta("", logprobs=SCORES[1:]), delta("é"),
         delta("x", logprobs=[token("x")]), result("ééx", logprobs=[*SCORES, token("x")])],
        {CHAT: {"logprobs": True, "top_logprobs": 1}, COMPLETION: {"logprobs": 1},
         OLLAMA_CHAT: {"logprobs": True}},
    ),
    "scores of a response": Case(
        [delta("", logprobs=SCORES[1:]), delta("é", logprobs=SCORES[:1]), thought("h"),
         delta("x", logprobs=[token("x")]), delta("", logprobs=[token("<end>")]), result("éx")],
        {RESPONSE: {"include": ["message.output_text.logprobs"], "top_logprobs": 2}},
    ),
    "sampled as the model's makers do": Case(
        [delta("a", sampling={"temperature": 0.7, "top_k": 20, "top_p": 0.8}), result("a")],
        {RESPONSE: {"top_p": 0.5}},
    ),
    "refused": Case([refused("quarantined")]),
    "broken off": Case([delta("a"), refused("worker_crashed", tokens_sent=1)]),
    "daemon lost": Case([delta("a"), ConnectionLost("it is gone", "ipc:///x")]),
    "ended by hand": Case([delta("a"), result("a", FinishReason.CANCELLED)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_answer_in_each_api(name: str, snapshot: SnapshotAssertion) -> None:
    case, found = CASES[name], {}
    for path, fields in case.fields.items():
        api = NAMES[path]
        if "stream_options" not in fields:
            whole = post(path, *case.items, count=case.count, **fields)
            assert whole.is_whole
            found[api] = brief(path, whole)
        streamed = post(path, *case.items, count=case.count, **fields, stream=True)
        text = brief(path, streamed)
        assert streamed.is_whole == ("broken off" not in text)
        if text not in (known := found.get(api, ""), known.partition(" | usage")[0]):
            found[f"{api}, streamed"] = text
    assert found == snapshot


SHAPES = [
    *(("thought, text and calls", path) for path in LEAST),
    ("scores", CHAT), ("scores", COMPLETION), ("several answers", CHAT), ("broken off", MESSAGE),
    ("broken off", RESPONSE), ("usage asked for", CHAT), ("scores of a response", RESPONSE),
    ("sampled as the model's makers do", RESPONSE),
]  # fmt: skip


@pytest.mark.parametrize(("name", "path"), SHAPES, ids=lambda value: NAMES.get(value, value))
def test_shape_of_an_answer(name: str, path: str, snapshot: SnapshotAssertion) -> None:
    """All bytes of one answer of each kind."""
    case = CASES[name]
    for stream in (True,) if name in ("broken off", "usage asked for") else (False, True):
        response = post(path, *case.items, count=case.count, **case.fields[path], stream=stream)
        assert shown(response) == snapshot(name="streamed" if stream else "whole")


@pytest.mark.parametrize(
    ("path", "shows", "last"),
    [(MESSAGE, b"tool_use", "content_block_stop"),
     (RESPONSE, b"function_call", "response.output_item.done")],
)  # fmt: skip
def test_call_is_complete_when_it_is_sent(path: str, shows: bytes, last: str) -> None:
    seen: list[str] = []

    def on_sent(response: Response) -> None:
        if shows in response.body:
            seen.append(response.named_events()[-1][0])

    body = {"model": "m", **LEAST[path], "stream": True}
    site = Site(PlayedDaemon([calling(F), delta("x"), result("x")]))
    asyncio.run(site.ask("POST", path, body, on_sent=on_sent))
    assert seen[0] == last


# ---------------------------------------------------------------- errors


def test_error_of_the_daemon_is_a_status(snapshot: SnapshotAssertion) -> None:
    """In OpenAI's three APIs the same, in Anthropic's, and in Ollama's."""
    for path in LEAST:
        whole, streamed = (post(path, refused("overloaded"), stream=one) for one in (False, True))
        assert shown(whole) == shown(streamed), "nothing was sent before it"
    found = {}
    for code in ErrorCode:
        answers = {path: brief(path, post(path, refused(code.value))) for path in LEAST}
        assert answers[CHAT] == answers[COMPLETION] == answers[RESPONSE]
        assert answers[OLLAMA_CHAT] == answers[GENERATE]
        found[code.value] = " / ".join(answers[path] for path in (CHAT, MESSAGE, GENERATE))
    assert found == snapshot


@pytest.mark.parametrize(("seconds", "shown"), [(0.2, "1"), (7.1, "8"), (9000.0, "120")])
def test_overload_says_when_to_come_back_and_no_later_than_clients_wait(
    seconds: float, shown: str
) -> None:
    response = post(CHAT, refused("overloaded", retry_after_s=seconds))
    assert (response.status, response.headers["retry-after"]) == (429, shown)
    final = post(CHAT, refused("quarantined", retry_after_s=seconds))
    assert "retry-after" not in final.headers


@pytest.mark.parametrize(
    ("path", "parameter", "name"),
    [
        (COMPLETION, "prompt_tokens", "prompt"),
        (COMPLETION, "stop", "stop"),
        (CHAT, "stop", "stop"),
        (CHAT, "response_format", "response_format"),
        (MESSAGE, "stop", "stop_sequences"),
        (MESSAGE, "stop_token", "stop_token"),
        (MESSAGE, "response_format", "output_config.format"),
        (RESPONSE, "response_format", "text.format"),
        (OLLAMA_CHAT, "response_format", "format"),
        (GENERATE, "repetition_penalty", "repeat_penalty"),
        ("/v1/embeddings", "texts", "input"),
        ("/v1/rerank", "texts", "documents"),
        ("/api/embeddings", "texts", "prompt"),
        ("/detokenize", "prompt_tokens", "tokens"),
        ("/detokenize", "prompt", "tokens"),
        ("/v1/chat/completions", r"a client's own\q", r"a client's own\q"),
    ],
)
@pytest.mark.parametrize("begin", ["", "no answer can fit "])
def test_refused_field_has_the_name_that_it_was_sent_with(
    path: str, parameter: str, name: str, begin: str
) -> None:
    refusal = RequestError(
        ErrorCode.INVALID_REQUEST,
        f"{begin}{parameter} takes another value than that of {parameter}",
        retryable=False,
        detail={"parameter": parameter},
    )
    response = asyncio.run(Site(PlayedDaemon([refusal])).ask("POST", path, LEAST_AT[path]))
    assert response.status == 400
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message == f"{begin}{name} takes another value than that of {parameter}"
    if "param" in error:
        assert error["param"] == name


@pytest.mark.parametrize(
    ("close", "advice"),
    [
        (["m"], "; did you mean m?"),
        (["m", "n"], "; did you mean m or n?"),
        (["m", "n", "o"], "; did you mean m, n or o?"),
        ([], HOW_TO_ADD),
    ],
)
def test_unknown_model_is_answered_with_names_like_it(close: list[str], advice: str) -> None:
    said = "there is no model 'mm'; configured: m"
    detail = {"known": ["m"], "close": close}
    for path in LEAST:
        response = post(path, RequestError(ErrorCode.UNKNOWN_MODEL, said, detail=detail))
        message = response.json()["error"]
        message = message if isinstance(message, str) else message["message"]
        assert (response.status, message) == (404, said + advice)
        if path in (CHAT, COMPLETION, RESPONSE):
            assert (response.error["known"], response.error["close"]) == (["m"], close)


@pytest.mark.parametrize(
    ("path", "method", "headers", "status", "kind"),
    [
        (MESSAGE, "GET", {}, 405, "invalid_request_error"),
        (f"{MESSAGE}/batches", "GET", {}, 404, "not_found_error"),
        ("/v1/nothing", "GET", {"anthropic-version": "2023-06-01"}, 404, "not_found_error"),
        (
            MESSAGE,
            "POST",
            {"content-type": "text/plain", "origin": "null"},
            415,
            "invalid_request_error",
        ),
        (MESSAGE, "POST", {"host": "evil.example"}, 403, "permission_error"),
        (MESSAGE, "POST", {}, 400, "invalid_request_error"),
    ],
)
def test_refusals_of_the_gateway_have_the_form_of_anthropic(
    path: str, method: str, headers: dict[str, str], status: int, kind: str
) -> None:
    response = asyncio.run(Site(PlayedDaemon()).ask(method, path, b"", headers=headers))
    assert (response.status, response.json()["type"]) == (status, "error")
    assert response.error["type"] == kind
    assert response.json()["request_id"] == response.headers["x-request-id"]
    assert response.headers["request-id"] == response.headers["x-request-id"]


# ---------------------------------------------------------------- counting


COUNTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    f"{MESSAGE}/count_tokens": ({"messages": HI}, {}),
    f"{RESPONSE}/input_tokens": ({"input": HI}, {"object": "response.input_tokens"}),
}
"""The paths that count prompts, with a body and what comes beside the count."""


def count(path: str, *items: Item, **fields: Any) -> tuple[Response, PlayedDaemon]:
    """Return the response to a count whose request goes so, and the daemon."""
    daemon = PlayedDaemon(list(items))
    body = {"model": "m", **COUNTS[path][0], **fields}
    return asyncio.run(Site(daemon).ask("POST", path, body)), daemon


@pytest.mark.parametrize("path", COUNTS)
def test_count_is_the_length_of_the_prompt(path: str) -> None:
    most = {"max_output_tokens": 9} if path.startswith(RESPONSE) else {}
    response, daemon = count(path, result(), **most)
    assert (response.status, response.json()) == (200, {"input_tokens": 5, **COUNTS[path][1]})
    assert response.headers["x-request-id"] == "r1"
    (asked,) = daemon.asked
    assert (asked["messages"], asked["tokenize"]) == (HI, {"ids": False})
    for code, status in (("unknown_model", 404), ("load_failed", 503)):
        response, _ = count(path, refused(code))
        assert (response.status, response.error["message"]) == (status, f"it is {code}")


@pytest.mark.parametrize(
    ("path", "fields", "shown"),
    [
        *(("/tokenize", {"prompt": "hi", **named},
           {"tokens": [7, 8, 9], "count": 5, "max_model_len": 64, "token_strs": None})
          for named in ({}, {"model": "m:warm"}, {"model": "gpt-4o"})),
        ("/detokenize", {"tokens": [7]}, {"prompt": "<s>hi", "content": "<s>hi"}),
        ("/apply-template", {"messages": HI}, {"prompt": "<s>hi", "content": "<s>hi"}),
    ],
)  # fmt: skip
def test_tokens_are_the_answer(path: str, fields: dict[str, Any], shown: dict[str, Any]) -> None:
    pieces = [delta("", channel=Channel.PROMPT, prompt_token_ids=ids) for ids in ([7, 8], [9])]
    daemon = PlayedDaemon([*pieces, result(prompt="<s>hi")])
    daemon.presets = {"warm": {"temperature": 0.8}}
    site = Site(daemon, names=[("gpt-*", "m")])
    answer = asyncio.run(site.ask("POST", path, {"model": "n", "mood": 1, **fields}))
    assert (answer.status, answer.json()) == (200, shown)
    assert (answer.headers["x-request-id"], answer.headers["x-mlxsup-ignored"]) == ("r1", "mood")
    metrics = site.gateway.daemon.meter.page(None)
    assert b"mlxsup_prompt_tokens_total{" not in metrics, "nothing was computed"


def test_id_that_the_model_lacks_is_named_as_it_was_sent() -> None:
    unknown = refused("invalid_request", parameter="prompt_tokens")
    unknown.message = "prompt_tokens must be ids below 9, not 12"
    site = Site(PlayedDaemon([unknown]))
    answer = asyncio.run(site.ask("POST", "/detokenize", {"model": "m", "tokens": [12]}))
    assert (answer.status, answer.error["param"]) == (400, "tokens")
    assert answer.error["message"].startswith("tokens must be ids below")


def test_usage_of_a_stream_is_that_of_the_whole_answer() -> None:
    items = delta("hm", channel=Channel.REASONING), delta("a"), result("a", reasoning="hm")
    usage = post(CHAT, *items).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2}
    events = post(CHAT, *items, stream=True, stream_options={"include_usage": True}).events()
    assert events[-2:] == [{**events[0], "choices": [], "usage": usage}, "[DONE]"]


@pytest.mark.parametrize("path", LEAST)
def test_an_answer_has_its_warnings(path: str) -> None:
    """A call that could not be read is no silent text."""
    end = result("<tool_call>{", warnings=["a call is text", "so is this"])
    whole = post(path, delta("<tool_call>{"), end)
    answer = whole.json()
    place = answer["choices"][0] if "choices" in answer else answer
    assert place["warnings"] == ["a call is text", "so is this"]
    streamed = post(path, delta("<tool_call>{"), end, stream=True).body.decode()
    assert streamed.count('"warnings":["a call is text","so is this"]') == 1
    plain = post(path, delta("yes"), result("yes"))
    assert b"warnings" not in plain.body


def test_a_warning_may_have_characters_that_no_header_has() -> None:
    """It may name what a request or a template has written."""
    warnings = ["changed: 蓝", "not enforced: 蓝\n"]
    whole = post("/v1/chat/completions", delta("yes"), result("yes", warnings=warnings))
    assert whole.json()["choices"][0]["warnings"] == warnings
    assert whole.headers["x-mlxsup-changed"] == r"\u84dd"


def test_header_is_short_whatever_it_names() -> None:
    """aiohttp takes no line of more than 8,190 bytes, and nginx no head of more than 4 KiB."""
    unknown = {f"{number:\N{GRINNING FACE}>60}": 1 for number in range(40)}
    warnings = [f"changed: the text of message {number}" for number in range(200)]
    whole = post(CHAT, delta("yes"), result("yes", warnings=warnings), **unknown)
    assert whole.json()["choices"][0]["warnings"] == warnings
    for name in ("x-mlxsup-changed", "x-mlxsup-ignored"):
        assert whole.headers[name].endswith("...")
        assert len(whole.headers[name]) <= 1024
    for length, is_cut in ((1024, False), (1025, True)):
        warning = f"changed: {'x' * length}"
        changed = post(CHAT, result("", warnings=[warning])).headers["x-mlxsup-changed"]
        assert (len(changed), changed.endswith("...")) == (1024, is_cut)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", LEAST)
def test_an_answer_says_in_its_head_what_was_changed(
    path: str, is_streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HOLD_S", 0.0)
    warnings = ["changed: a and b", "changed: c"]
    told = Notice(kind=NoticeKind.CHANGED, detail={"warnings": warnings})
    reads = Notice(kind=NoticeKind.PREFILLING, detail={"done": 1, "total": 2})
    for pieces in ([], [delta("yes")], [reads, delta("yes")]):
        end = result("yes", warnings=[*warnings, "odd"])
        changed = post(path, told, *pieces, end, stream=is_streamed)
        assert changed.headers["x-mlxsup-changed"] == "a and b; c"
        assert "changed: c" in changed.body.decode()
    plain = post(path, delta("yes"), result("yes", warnings=["odd"]), stream=is_streamed)
    assert "x-mlxsup-changed" not in plain.headers


TOLD = [
    Logprobs(chosen=TokenLogprob(token=1, logprob=None, text="h")),
    Logprobs(
        chosen=TokenLogprob(token=2, logprob=-2.5, text="i"),
        top=[
            TokenLogprob(token=3, logprob=-0.5, text="o"),
            TokenLogprob(token=2, logprob=-2.5, text="i"),
        ],
    ),
]
SHOWN = [
    delta("hi", channel=Channel.PROMPT),
    delta("", channel=Channel.PROMPT, logprobs=TOLD),
    delta("a"),
]
TOLD_BY_ID = [
    None,
    {
        "2": {"logprob": -2.5, "rank": 2, "decoded_token": "i"},
        "3": {"logprob": -0.5, "rank": 1, "decoded_token": "o"},
    },
]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_a_prompt_is_told_by_token_id_as_in_vllm(path: str) -> None:
    whole = post(path, *SHOWN, result("a"), prompt_logprobs=2).json()
    assert (whole if path == CHAT else whole["choices"][0])["prompt_logprobs"] == TOLD_BY_ID
    assert whole["choices"][0]["logprobs"] is None
    assert brief(path, post(path, *SHOWN, result("a"), prompt_logprobs=2)).startswith("text 'a'")
    refusal = post(path, prompt_logprobs=2, stream=True).json()["error"]
    assert refusal["param"] == "prompt_logprobs"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_too_many_log_probabilities_of_prompts_are_refused(
    monkeypatch: pytest.MonkeyPatch, *, is_streamed: bool
) -> None:
    asked: dict[str, Any] = {"echo": True, "logprobs": 2, "n": 2, "stream": is_streamed}
    monkeypatch.setattr(limits, "MAX_PROMPT_LOGPROBS", 8)
    fits = post(COMPLETION, *SHOWN, result("a", prompt="hi"), count=2, **asked)
    assert (fits.status, fits.is_whole) == (200, True)
    monkeypatch.setattr(limits, "MAX_PROMPT_LOGPROBS", 7)
    refusal = post(COMPLETION, *SHOWN, result("a", prompt="hi"), count=2, **asked)
    assert "more than 7 log-probabilities" in refusal.body.decode()


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize(
    ("ended", "reason"), [({"stop": "x"}, "x"), ({"stop_token": 0}, 0), ({}, None)]
)
def test_a_choice_says_what_stopped_it(
    path: str, ended: dict[str, Any], reason: str | int | None, *, is_streamed: bool
) -> None:
    got = post(path, delta("a"), result("a", **ended), stream=is_streamed)
    values = got.events()[:-1] if is_streamed else [got.json()]
    last = values[-1]["choices"][0]
    assert last["finish_reason"] == "stop"
    assert last.get("stop_reason") == reason


@pytest.mark.parametrize(
    ("drafted", "accepted", "told"), [(5, 3, {"accepted": 6, "rejected": 4}), (0, 0, {})]
)
def test_usage_says_which_guesses_were_right(
    drafted: int, accepted: int, told: dict[str, int]
) -> None:
    one = result("a")
    usage = replace(one.usage, drafted=drafted, draft_accepted=accepted)
    got = post(CHAT, delta("a"), replace(one, usage=usage), count=2, n=2).json()["usage"]
    predictions = {f"{name}_prediction_tokens": count for name, count in told.items()}
    assert got["completion_tokens_details"] == {"reasoning_tokens": 0, **predictions}
