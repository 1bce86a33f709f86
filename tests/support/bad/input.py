"""Bad frames, headers, bodies and requests with the error that each gets, as data.

tests/integration/test_bad_input.py sends these to a real daemon, except for WRONG_FIELDS: what the
decoder refuses is tried in tests/unit/test_protocol_codec.py. What is wrong with a parameter is a
table of tests/unit/test_protocol_bodies.py.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, get_type_hints

import msgpack

from mlxsup.protocol.client_messages import CLIENT_MESSAGES, Generate
from mlxsup.protocol.codec import MAX_BODY_BYTES, MAX_HEADER_BYTES
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.message import Message
from mlxsup.protocol.version import PROTOCOL_VERSION

MODEL = "m"
"""The model that a live stream runs on while all of this arrives."""

SMALL = "small"
"""A model with a context of `SMALL_CONTEXT` tokens; a token of the fake engine is a byte."""
SMALL_CONTEXT = 32


Frames = list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class BadInput:
    """Messages of which the last one is wrong, and the answer to that one.

    Attributes:
        name: what is wrong with it, for people.
        sends: what is sent, one after the other.
        code: of the error.
        words: stand in the error's message.
        id: which the answer carries; empty where the id could not be read.
    """

    name: str
    sends: tuple[Frames, ...]
    words: str
    code: ErrorCode = ErrorCode.INVALID_REQUEST
    id: str = "x"


def pack(value: object) -> bytes:
    """Return msgpack, also of what no client would make."""
    packed: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return packed


def header(kind: str, **values: Any) -> bytes:
    """Return a header frame; `id` is x unless it is given."""
    return pack({"type": kind, "id": "x", **values})


def generate(body: bytes, /, **values: Any) -> Frames:
    """Return a `generate` message for `MODEL`, with this body."""
    return [header("generate", **{"model": MODEL, **values}), body]


HELLO_BODY = pack({"prompt": "hello", "max_tokens": 1})

# ---------------------------------------------------------------- frames

_PING = {"type": "ping", "id": "x"}


def _sent(name: str, frames: Frames, words: str, **more: Any) -> BadInput:
    return BadInput(name=name, sends=(frames,), words=words, **more)


def _frames(name: str, frames: Frames, words: str) -> BadInput:
    return _sent(name, frames, words, id="")


FRAMES = (
    _frames("an empty frame", [b""], "not msgpack"),
    _frames("three frames", [pack(_PING), b"", b""], "one or two frames, not 3"),
    _frames("an empty frame before the header (a REQ socket)", [b"", pack(_PING)], "not msgpack"),
    _frames("bytes that are no msgpack", [b"GET / HTTP/1.1\r\n\r\n"], "not msgpack"),
    _frames("the byte that msgpack reserves", [b"\xc1"], "not msgpack"),
    _frames("a header cut short", [pack(_PING)[:-1]], "not msgpack"),
    _frames("bytes after the header", [pack(_PING) + b"\x00"], "not msgpack"),
    _frames("a header that is a list", [pack([1, 2])], "not a msgpack map"),
    _frames("a header that is a number", [b"\x07"], "not a msgpack map"),
    _frames("JSON instead of msgpack", [b'{"type": "ping", "id": "x"}'], "not msgpack"),
    _frames("keys that are no text", [pack({1: 2})], "not msgpack within the limits"),
    _frames("an extension type", [pack(msgpack.ExtType(4, b"xx"))], "not msgpack"),
    _frames("a header over 64 KiB", [b"\x00" * (MAX_HEADER_BYTES + 1)], "at most 65536 bytes"),
    _frames("a list of more than 1024 items", [header("ping", a=[0] * 1025)], "within the limits"),
    _frames("a map of more than 64 keys", [header("ping", a=dict.fromkeys(map(str, range(65))))],
            "within the limits"),
    _frames("a text of more than 4096 bytes", [header("ping", a="y" * 4097)], "within the limits"),
    _frames("2000 lists inside each other", [b"\x91" * 2000 + b"\xc0"], "within the limits"),
    _frames("a text that is not UTF-8", [b"\x81\xa2id\xa2\xff\xfe"], "within the limits"),
    *(
        _frames(f"{what} that says it is 4 GiB long", [first + b"\xff" * 4], "within the limits")
        for what, first in (("a map", b"\xdf"), ("a list", b"\xdd"), ("a text", b"\xdb"),
                            ("bytes", b"\xc6"), ("an extension", b"\xc9"))
    ),
)  # fmt: skip

# ---------------------------------------------------------------- headers


def _unlike(hint: object) -> int | str:
    """Return a value that the field does not take."""
    return 1 if hint in (bool, str) or str in getattr(hint, "__args__", ()) else "text"


def _wrong_types() -> list[BadInput]:
    """Return each field of each message of a client with a value of another type."""
    cases = []
    for cls in CLIENT_MESSAGES:
        hints = get_type_hints(cls)
        body = [HELLO_BODY] if cls is Generate else []
        for name in sorted({field.name for field in fields(cls)} - {"id", "v", "body"}):
            is_name = getattr(hints[name], "__supertype__", None) is str
            value = 1 if is_name else _unlike(hints[name])
            frames = [header(cls.TYPE, **_required(cls) | {name: value}), *body]
            what = f"`{cls.TYPE}` with `{name}` of another type"
            cases.append(_sent(what, frames, f"{name} must be"))
    return cases


def _required(cls: type[Message]) -> dict[str, Any]:
    values = {"model": MODEL, "request": "nobody"}
    return {k: v for k, v in values.items() if k in getattr(cls, "__dataclass_fields__", {})}


TIMES = ("timeout_s", "queue_timeout_s", "first_token_timeout_s")

CONFIGURATION_KEYS = ("path", "repo", "engine", "fake", "context_length", "aliases", "adapter")
"""Keys of a model that only the configuration may set (H10)."""

HEADERS = (
    _sent("no type", [pack({"id": "x"})], "unknown type"),
    _sent("an unknown type", [header("pong")], "known are add_model, attach, cancel"),
    _sent("a type that is no text", [pack({"type": ["ping"], "id": "x"})], "unknown type"),
    _sent("a message of the supervisor", [header("done", seq=0)], "unknown type 'done'"),
    _sent("a message of the worker link", [header("dispatch", key=1), b""], "unknown type"),
    _sent("no id", [pack({"type": "ping"})], "the field id is missing", id=""),
    _sent("an empty id", [pack({"type": "ping", "id": ""})], "text of 1 to 128", id=""),
    _sent("an id that is no text", [pack({"type": "ping", "id": 5})], "id must be text", id=""),
    _sent("an id over 128 characters", [pack({"type": "ping", "id": "x" * 129})],
             "id must be text of at most 128", id=""),
    _sent("another protocol version", [header("ping", v=PROTOCOL_VERSION + 98)],
             f"speaks protocol version {PROTOCOL_VERSION}, not {PROTOCOL_VERSION + 98}",
             code=ErrorCode.UNSUPPORTED_VERSION),
    _sent("a version that is no number", [header("ping", v="one")],
             f"speaks protocol version {PROTOCOL_VERSION}, not one",
             code=ErrorCode.UNSUPPORTED_VERSION),
    _sent("a missing field", [header("load")], "the field model is missing"),
    _sent("an unknown field", [header("ping", colour=1)], "unknown field colour; known are"),
    _sent("an empty model name", [header("load", model="")], "text of 1 to 128 characters"),
    _sent("a model name over 128 characters", [header("load", model="y" * 129)],
             "text of 1 to 128 characters"),
    _sent("a second frame where none belongs", [pack(_PING), b"\x80"], "ping must be one frame"),
    _sent("`generate` without a body", generate(HELLO_BODY)[:1], "must be two frames"),
    _sent("`generate` with its body in the header", generate(HELLO_BODY, body=b"\x80"),
             "must be two frames"),
)  # fmt: skip

WRONG_FIELDS = (
    *_wrong_types(),
    _sent("a map with bytes as a key", [header("configure", changes={b"defaults.preload": "true"})],
             "changes must be a map with texts as keys"),
    *(
        _sent(f"`{name}` of {value}", generate(HELLO_BODY, **{name: float(value)}),
                 f"{name} must be a finite number")
        for name in TIMES for value in ("nan", "inf")
    ),
    *(
        _sent(f"`generate` with the configuration's key `{key}` in its header",
                 generate(HELLO_BODY, **{key: "/models/other"}), f"unknown field {key}")
        for key in CONFIGURATION_KEYS
    ),
)  # fmt: skip
"""Headers with one field that the decoder refuses."""

VALUES = (
    *(
        _sent(f"`{name}` of -1.0", generate(HELLO_BODY, **{name: -1.0}),
                 f"{name} must be 0 seconds or more")
        for name in TIMES
    ),
    _sent("`generate` with a `keep_alive` below 0 that is not -1",
             [header("generate", model=MODEL, keep_alive=-2), HELLO_BODY],
             "keep_alive must be seconds of 0 or more, or -1 to keep the model loaded, not -2"),
    _sent("`load` with a `keep_alive` of 0", [header("load", model=MODEL, keep_alive=0)],
             "keep_alive must be seconds above 0, or -1 to keep the model loaded, not 0"),
    _sent("`load` with a `context_length` below 0",
             [header("load", model=MODEL, context_length=-1)],
             "context_length must be an integer from 0 to 2147483647, not -1"),
    _sent("`load` with `dry_run` and a `context_length`",
             [header("load", model=MODEL, dry_run=True, context_length=9)],
             "a dry run uses the configured settings; remove context_length"),
    _sent("`stop` with `timeout_s` below 0", [header("stop", timeout_s=-1)],
             "timeout_s must be 0 seconds or more"),
)  # fmt: skip
"""Headers that the decoder takes and the core refuses."""

# ---------------------------------------------------------------- requests and commands

_UNKNOWN = ErrorCode.UNKNOWN_MODEL
_LONG = pack({"prompt": "[[fault slow=0.02]]"})

REQUESTS = (
    *(
        _sent(f"`{kind}` of {what}", [header(kind, model=name), *body],
                 f"there is no model {name!r}; configured: {MODEL}, {SMALL}", code=_UNKNOWN)
        for kind, body in (("generate", [HELLO_BODY]), ("load", []), ("unload", []),
                           ("restart", []))
        for what, name in (
            ("a model that is not configured", "nobody"),
            ("a model by the path of a folder", "/models/other"),
            ("a model by the name of a repository", "mlx-community/other"),
        )
    ),
    _sent("`prioritize` of an id that no open request has",
             [header("prioritize", request="nobody", priority="batch")],
             "no open request has the id or number 'nobody'"),
    *(
        _sent(f"`{kind}` of an id that no open request has", [header(kind, request="nobody")],
                 "no open request has the id or number 'nobody'")
        for kind in ("pause", "resume", "cancel_request", "attach")
    ),
    BadInput(name="an id that is open on this connection",
             sends=(generate(_LONG), generate(HELLO_BODY)), code=ErrorCode.DUPLICATE_ID,
             words="already has an open request 'x'"),
)  # fmt: skip

# ---------------------------------------------------------------- bodies

_OVER = ErrorCode.CONTEXT_LENGTH_EXCEEDED
_NOT_MSGPACK = "the body is not msgpack within the limits"


def _body(name: str, body: object, words: str, model: str = MODEL, **more: Any) -> BadInput:
    frame = body if isinstance(body, bytes) else pack(body)
    return _sent(name, generate(frame, model=model), words, **more)


BODIES = (
    *(
        _body(name, body, _NOT_MSGPACK)
        for name, body in (
            ("an empty body", b""),
            ("a body that is no msgpack", b"\xc1\xc1"),
            ("a body cut short", HELLO_BODY[:-1]),
            ("bytes after the body", HELLO_BODY + b"\x00"),
            ("a body of 2000 lists inside each other", b"\x91" * 2000 + b"\xc0"),
            ("a text that is not UTF-8", b"\x81\xa6prompt\xa2\xff\xfe"),
        )
    ),
    _body("a body that is a list", [1], "body must be a map"),
    _body("a body over the limit", bytes(MAX_BODY_BYTES + 1), f"at most {MAX_BODY_BYTES} bytes"),
    _body("an unknown parameter", {"prompt": "a", "colour": 1}, "unknown parameter 'colour'"),
    *(
        _body(f"the configuration's key `{key}` in a body", {"prompt": "hello", key: "/models/x"},
              f"unknown parameter '{key}'")
        for key in ("model", *CONFIGURATION_KEYS)
    ),
    _body("no input", {"max_tokens": 1}, "exactly one of prompt, prompt_tokens and messages"),
    _body("a parameter outside its range", {"prompt": "hello", "temperature": 10.1},
          "temperature must be a number from 0 to 10"),
    _body("`n`", {"prompt": "hello", "n": 2}, "n is not supported: send the request n times"),
    _body("`prompt_tokens` outside the vocabulary", {"prompt_tokens": [10**6]},
          "prompt_tokens must be ids below"),
    _body("`stop_token_ids` outside the vocabulary", {"prompt": "a", "stop_token_ids": [10**6]},
          "stop_token_ids must be ids below"),
    _body("`min_tokens` that do not fit into the context",
          {"prompt": "hello", "min_tokens": SMALL_CONTEXT},
          f"min_tokens {SMALL_CONTEXT} exceed the context of {SMALL_CONTEXT}", SMALL, code=_OVER),
    _body("a prompt longer than the context", {"prompt": "y" * SMALL_CONTEXT},
          f"this model's maximum context length is {SMALL_CONTEXT} tokens", SMALL,
          code=_OVER),
    _body("prompt and `max_tokens` longer than the context",
          {"prompt": "hello", "max_tokens": SMALL_CONTEXT},
          f"exceed the context of {SMALL_CONTEXT}; at most {SMALL_CONTEXT - 5} fit", SMALL,
          code=_OVER),
    _body("a chat that the model's template cannot render",
          {"messages": [{"role": "user", "content": "[[tokenize raise]]"}]},
          "the prompt could not be prepared: KeyError"),
)  # fmt: skip
