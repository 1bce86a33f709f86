"""Bodies over HTTP that take long to read: hostile ones, and long ones that are meant."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from support.gateway.http_daemon import CHAT, HttpDaemon

COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"

LIMIT_S = 300.0
SENDERS = 4
"""Connections on which bodies come at the same time."""


@dataclass(frozen=True, slots=True)
class LargeBody:
    """One request.

    Attributes:
        what: for people.
        path: that it is sent to.
        data: its body.
    """

    what: str
    path: str
    data: bytes


def _body(what: str, path: str, **fields: Any) -> LargeBody:
    data = json.dumps({"model": "other", **fields}, separators=(",", ":")).encode()
    return LargeBody(what, path, data)


def _raw(what: str, fields: bytes) -> LargeBody:
    chat = b'{"model":"other","max_tokens":3,"messages":[{"role":"user","content":"x"}],'
    return LargeBody(what, CHAT, chat + fields + b"}")


def _turn(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _chat(what: str, **fields: Any) -> LargeBody:
    return _body(what, CHAT, max_tokens=3, messages=[_turn("x")], **fields)


def _message(what: str, messages: list[Any]) -> LargeBody:
    return _body(what, MESSAGES, max_tokens=3, messages=messages)


def _response(what: str, given: Any, **fields: Any) -> LargeBody:
    return _body(what, RESPONSES, max_output_tokens=3, input=given, **fields)


def hostile_bodies(every: int = 1) -> list[LargeBody]:
    """Return a body of each kind, or of some; most are just short enough to be read."""
    tool = {"type": "function", "function": {"name": "f"}}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    said = {"role": "assistant", "content": "x" * 800}
    tools = [{"type": "function", "name": f"f{n}"} for n in range(1000)]
    blocks = {"role": "user", "content": [{"type": "text", "text": "x"}] * 150_000}
    makers: list[Callable[[], LargeBody]] = [
        lambda: _message("165,000 messages of one role", [_turn("x" * 60)] * 165_000),
        lambda: _message("90,000 messages of one role", [_turn("x" * 60)] * 90_000),
        lambda: _message("10,000 longer messages of one role", [_turn("x" * 800)] * 10_000),
        lambda: _message("150,000 blocks in one message", [blocks]),
        lambda: _response("240,000 items", [_turn("x")] * 240_000),
        lambda: _response(
            "9,000 calls among 1,000 tools", [_turn("x"), *[call] * 9000], tools=tools
        ),
        lambda: _response("9,000 texts of the assistant", [_turn("x"), *[said] * 9000]),
        lambda: _body("220,000 chat messages", CHAT, messages=[_turn("x")] * 220_000),
        lambda: _chat("700,000 biases", logit_bias={str(n): 1 for n in range(700_000)}),
        lambda: _chat("8 MB of [] for the template", chat_template_kwargs={"a": [[]] * 2_700_000}),
        lambda: _chat("16 MB of [] for the template", chat_template_kwargs={"a": [[]] * 5_400_000}),
        lambda: _body("16 prompts of 160,000 token ids", COMPLETIONS, prompt=[[12] * 160_000] * 16),
        lambda: _chat("150,000 tools", tools=[tool] * 150_000),
        lambda: _chat("2 million stop strings", stop=["x"] * 2_000_000),
        lambda: _raw(
            "a million lists within each other", b'"metadata":' + b"[" * 10**6 + b"]" * 10**6
        ),
        lambda: _raw("an integer of 8 million digits", b'"seed":' + b"9" * 8 * 10**6),
        lambda: _raw("700,000 times the same key", b",".join([b'"user":"u"'] * 700_000)),
        lambda: _raw("700,000 unknown keys", b",".join(b'"%x":1' % n for n in range(700_000))),
        lambda: _raw("a text of 7 MB in escapes", b'"user":"' + b"\\u00e9" * 1_200_000 + b'"'),
        lambda: LargeBody("7 MB of one string", CHAT, b'"' + b"\\n" * 3_600_000 + b'"'),
    ]
    return [make() for make in makers[::every]]


def meant_bodies() -> list[LargeBody]:
    text = [_turn("word " * 200_000)]
    return [
        _body("a chat of 1 MB", CHAT, max_tokens=3, messages=text),
        _response("instructions of 700 kB", "x", instructions="do " * 230_000),
        _body("150,000 token ids", COMPLETIONS, max_tokens=3, prompt=[123] * 150_000),
    ]


def send(daemon: HttpDaemon, body: LargeBody) -> tuple[int, bytes]:
    """Return status and body of the response; 0 if the connection ends without one."""
    connection = http.client.HTTPConnection(*daemon.address, timeout=LIMIT_S)
    try:
        connection.request("POST", body.path, body.data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    except ConnectionError:
        return 0, b""
    finally:
        connection.close()


def send_all(daemon: HttpDaemon, bodies: list[LargeBody]) -> list[tuple[int, bytes]]:
    """Return the responses to several that come on a few connections at once."""
    with ThreadPoolExecutor(SENDERS) as senders:
        return list(senders.map(lambda body: send(daemon, body), bodies))
