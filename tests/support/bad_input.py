"""Every kind of bad input with the error it gets, as data.

tests/integration/test_bad_input.py sends each of these to a real daemon, and
tools/bad_input_table.py prints docs/bad-input.md from them.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BadBody:
    """A body that no request can have.

    Attributes:
        name: what is wrong with it.
        body: a map of parameters, or the frame itself.
        code, words: as in `BadInput`.
        model: whom it is sent to.
        is_known_to_client: whether the Python client refuses the same map with the same error,
            before it sends anything.
    """

    name: str
    body: dict[str, Any] | bytes
    words: str
    code: ErrorCode = ErrorCode.INVALID_REQUEST
    model: str = MODEL
    is_known_to_client: bool = False

    def as_input(self) -> BadInput:
        """What a raw client sends."""
        frame = self.body if isinstance(self.body, bytes) else pack(self.body)
        return BadInput(
            name=self.name,
            sends=(generate(frame, model=self.model),),
            code=self.code,
            words=self.words,
        )


def pack(value: object) -> bytes:
    """msgpack, also of what no client would make."""
    packed: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return packed


def header(kind: str, **values: Any) -> bytes:
    """A header frame; `id` is x unless it is given."""
    return pack({"type": kind, "id": "x", **values})


def generate(body: bytes, /, **values: Any) -> Frames:
    """A `generate` message for `MODEL`, with this body."""
    return [header("generate", **{"model": MODEL, **values}), body]


HELLO_BODY = pack({"prompt": "hello", "max_tokens": 1})

# ---------------------------------------------------------------- frames

_PING = {"type": "ping", "id": "x"}


def _frames(name: str, frames: Frames, words: str, id: str = "") -> BadInput:
    return BadInput(name=name, sends=(frames,), words=words, id=id)


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
)  # fmt: skip

# ---------------------------------------------------------------- headers


def _headers(name: str, frames: Frames, words: str, **more: Any) -> BadInput:
    return BadInput(name=name, sends=(frames,), words=words, **more)


def _unlike(hint: Any) -> Any:
    """A value that the field does not take."""
    return 1 if hint in (bool, str) or str in getattr(hint, "__args__", ()) else "text"


def _wrong_types() -> list[BadInput]:
    """Each field of each message of a client, with a value of another type."""
    cases = []
    for cls in CLIENT_MESSAGES:
        hints = get_type_hints(cls)
        body = [HELLO_BODY] if cls is Generate else []
        for field in fields(cls):
            if field.name in ("id", "v", "body"):
                continue
            is_name = getattr(hints[field.name], "__supertype__", None) is str
            value = 1 if is_name else _unlike(hints[field.name])
            values = {**_required(cls), field.name: value}
            cases.append(
                _headers(
                    f"`{cls.TYPE}` with `{field.name}` of another type",
                    [header(cls.TYPE, **values), *body],
                    f"{field.name} takes",
                )
            )
    return cases


def _required(cls: type[Message]) -> dict[str, Any]:
    return {"model": MODEL} if "model" in getattr(cls, "__dataclass_fields__", {}) else {}


def _seconds(name: str) -> list[BadInput]:
    """A time limit that is no time."""
    return [
        _headers(
            f"`{name}` below 0", generate(HELLO_BODY, **{name: -1.0}), f"{name} takes seconds"
        ),
        _headers(
            f"`{name}` not a number (NaN)",
            generate(HELLO_BODY, **{name: float("nan")}),
            f"{name} takes a finite number",
        ),
        _headers(
            f"`{name}` infinite",
            generate(HELLO_BODY, **{name: float("inf")}),
            f"{name} takes a finite number",
        ),
    ]


CONFIGURATION_KEYS = ("path", "repo", "engine", "fake", "context_length", "aliases", "adapter")
"""What only the configuration may say of a model (H10)."""

HEADERS = (
    _headers("no type", [pack({"id": "x"})], "unknown type"),
    _headers("an unknown type", [header("pong")], "known are cancel, generate, load"),
    _headers("a type that is no text", [pack({"type": ["ping"], "id": "x"})], "unknown type"),
    _headers("a message of the supervisor", [header("done", seq=0)], "unknown type 'done'"),
    _headers("a message of the worker link", [header("dispatch", key=1), b""], "unknown type"),
    _headers("no id", [pack({"type": "ping"})], "the field id is missing", id=""),
    _headers("an empty id", [pack({"type": "ping", "id": ""})], "text of 1 to 128", id=""),
    _headers("an id that is no text", [pack({"type": "ping", "id": 5})], "id takes text", id=""),
    _headers("an id over 128 characters", [pack({"type": "ping", "id": "x" * 129})],
             "id takes text of at most 128", id=""),
    _headers("another protocol version", [header("ping", v=PROTOCOL_VERSION + 98)],
             f"speaks protocol version {PROTOCOL_VERSION}, not {PROTOCOL_VERSION + 98}",
             code=ErrorCode.UNSUPPORTED_VERSION),
    _headers("a version that is no number", [header("ping", v="one")],
             f"speaks protocol version {PROTOCOL_VERSION}, not one",
             code=ErrorCode.UNSUPPORTED_VERSION),
    _headers("a missing field", [header("load")], "the field model is missing"),
    _headers("an unknown field", [header("ping", colour=1)], "unknown field colour; known are"),
    _headers("an empty model name", [header("load", model="")], "text of 1 to 128 characters"),
    _headers("a model name over 128 characters", [header("load", model="y" * 129)],
             "text of 1 to 128 characters"),
    _headers("a second frame where none belongs", [pack(_PING), b"\x80"], "ping takes one frame"),
    _headers("`generate` without a body", generate(HELLO_BODY)[:1], "takes two frames"),
    _headers("`generate` with its body in the header", generate(HELLO_BODY, body=b"\x80"),
             "takes two frames"),
    *_wrong_types(),
    *_seconds("timeout_s"), *_seconds("queue_timeout_s"), *_seconds("first_token_timeout_s"),
    _headers("`stop` with `timeout_s` below 0", [header("stop", timeout_s=-1)],
             "timeout_s takes seconds from 0"),
    *(
        _headers(f"`generate` with the configuration's key `{key}` in its header",
                 generate(HELLO_BODY, **{key: "/models/other"}), f"unknown field {key}")
        for key in CONFIGURATION_KEYS
    ),
)  # fmt: skip

# ---------------------------------------------------------------- requests and commands

_UNKNOWN = ErrorCode.UNKNOWN_MODEL
_LONG = pack({"prompt": "[[fault slow=0.02]]"})

REQUESTS = (
    *(
        _headers(f"`{kind}` of {what}", [header(kind, model=name), *body],
                 f"no model is called {name!r}; configured: {MODEL}, {SMALL}", code=_UNKNOWN)
        for kind, body in (("generate", [HELLO_BODY]), ("load", []), ("unload", []),
                           ("restart", []))
        for what, name in (
            ("a model that is not configured", "nobody"),
            ("a model by the path of a folder", "/models/other"),
            ("a model by the name of a repository", "mlx-community/other"),
        )
    ),
    BadInput(name="an id that is open on this connection",
             sends=(generate(_LONG), generate(HELLO_BODY)), code=ErrorCode.DUPLICATE_ID,
             words="already has an open request 'x'"),
)  # fmt: skip

# ---------------------------------------------------------------- bodies


def _parameter(
    name: str, *, below: Any, above: Any, wrong: Any, words: str, nan: bool = False
) -> list[BadBody]:
    values = [("below its range", below), ("above its range", above), ("of another type", wrong)]
    if nan:
        values += [("not a number (NaN)", float("nan")), ("infinite", float("inf"))]
    return [
        BadBody(
            name=f"`{name}` {what}",
            body={"prompt": "hello", name: value},
            words=f"{name} takes {words}",
            is_known_to_client=True,
        )
        for what, value in values
    ]


def _input(name: str, body: dict[str, Any], words: str, **more: Any) -> BadBody:
    return BadBody(name=name, body=body, words=words, is_known_to_client=True, **more)


_ONE_INPUT = "exactly one of prompt, prompt_tokens and messages"
_OVER = ErrorCode.CONTEXT_LENGTH_EXCEEDED
_NOT_MSGPACK = "the body is not msgpack within the limits"

BODIES = (
    BadBody(name="an empty body", body=b"", words=_NOT_MSGPACK),
    BadBody(name="a body that is no msgpack", body=b"\xc1\xc1", words=_NOT_MSGPACK),
    BadBody(name="a body cut short", body=HELLO_BODY[:-1], words=_NOT_MSGPACK),
    BadBody(name="bytes after the body", body=HELLO_BODY + b"\x00", words=_NOT_MSGPACK),
    BadBody(name="a body of 2000 lists inside each other", body=b"\x91" * 2000 + b"\xc0",
            words=_NOT_MSGPACK),
    BadBody(name="a text that is not UTF-8", body=b"\x81\xa6prompt\xa2\xff\xfe",
            words=_NOT_MSGPACK),
    BadBody(name="a body that is a list", body=pack([1]), words="body takes a map"),
    BadBody(name="a body over 8 MiB", body=bytes(MAX_BODY_BYTES + 1),
            words=f"at most {MAX_BODY_BYTES} bytes"),
    BadBody(name="an unknown parameter", body={"prompt": "hello", "colour": "blue"},
            words="unknown parameter 'colour'; known are"),
    *(
        BadBody(name=f"the configuration's key `{key}` in a body",
                body={"prompt": "hello", key: "/models/other"},
                words=f"unknown parameter '{key}'")
        for key in ("model", *CONFIGURATION_KEYS)
    ),
    _input("no input", {"max_tokens": 1}, f"{_ONE_INPUT}, not none of them"),
    _input("two inputs", {"prompt": "hello", "prompt_tokens": [72]},
           f"{_ONE_INPUT}, not prompt and prompt_tokens"),
    _input("`prompt` empty", {"prompt": ""}, "prompt takes a string that is not empty"),
    _input("`prompt` of another type", {"prompt": 5}, "prompt takes a string"),
    _input("`prompt` of bytes", {"prompt": b"hello"}, "prompt takes a string, not bytes"),
    _input("`prompt_tokens` empty", {"prompt_tokens": []}, "at least one token id"),
    _input("`prompt_tokens` of another type", {"prompt_tokens": "72"}, "a list of integers"),
    _input("`prompt_tokens` with a text", {"prompt_tokens": [72, "x"]}, "a list of integers"),
    _input("`prompt_tokens` with a truth value", {"prompt_tokens": [True]}, "a list of integers"),
    _input("`prompt_tokens` below 0", {"prompt_tokens": [-1]}, "ids from 0 to 4294967295"),
    _input("`prompt_tokens` over 32 bits", {"prompt_tokens": [2**32]}, "ids from 0 to 4294967295"),
    BadBody(name="`prompt_tokens` outside the model's vocabulary", body={"prompt_tokens": [10**6]},
            words="prompt_tokens takes ids below"),
    _input("`messages` empty", {"messages": []}, "a list of at least one message"),
    _input("`messages` of another type", {"messages": "hello"}, "a list of at least one message"),
    _input("`messages` with a text", {"messages": ["hello"]}, "maps with a role"),
    _input("`messages` without a role", {"messages": [{"content": "hi"}]}, "maps with a role"),
    _input("`messages` with a role that is no text", {"messages": [{"role": 1, "content": "hi"}]},
           "maps with a role"),
    *_parameter("max_tokens", below=0, above=2**31, wrong="8",
                words="an integer from 1 to 2147483647"),
    _input("`max_tokens` with a fraction", {"prompt": "hello", "max_tokens": 1.5},
           "max_tokens takes an integer"),
    *_parameter("min_tokens", below=-1, above=2**31, wrong="8",
                words="an integer from 0 to 2147483647"),
    _input("`min_tokens` above `max_tokens`",
           {"prompt": "hello", "min_tokens": 9, "max_tokens": 8}, "min_tokens takes at most"),
    *_parameter("temperature", below=-0.1, above=10.1, wrong="hot", nan=True,
                words="a number from 0 to 10"),
    *_parameter("top_p", below=0.0, above=1.1, wrong=[1], nan=True,
                words="a number above 0 and up to 1"),
    *_parameter("seed", below=-1, above=2**63, wrong=1.5,
                words="an integer from 0 to 9223372036854775807"),
    *_parameter("top_k", below=-1, above=2**31, wrong=1.5, words="an integer from 0"),
    *_parameter("min_p", below=-0.1, above=1.1, wrong="x", nan=True, words="a number from 0 to 1"),
    *_parameter("xtc_probability", below=-0.1, above=1.1, wrong="x", nan=True,
                words="a number from 0 to 1"),
    *_parameter("xtc_threshold", below=-0.1, above=0.6, wrong="x", nan=True,
                words="a number from 0 to 0.5"),
    *_parameter("repetition_penalty", below=0.0, above=10.1, wrong="x", nan=True,
                words="a number from 0.01 to 10"),
    *_parameter("presence_penalty", below=-2.1, above=2.1, wrong="x", nan=True,
                words="a number from -2 to 2"),
    *_parameter("frequency_penalty", below=-2.1, above=2.1, wrong="x", nan=True,
                words="a number from -2 to 2"),
    *_parameter("penalty_window", below=-1, above=2**31, wrong=1.5,
                words="an integer from 0"),
    _input("`logit_bias` of another type", {"prompt": "hello", "logit_bias": [1]}, "a map of"),
    _input("`logit_bias` out of range", {"prompt": "hello", "logit_bias": {"1": 101}},
           "a number from -100 to 100"),
    _input("`logprobs` of another type", {"prompt": "hello", "logprobs": 1}, "true or false"),
    *_parameter("top_logprobs", below=-1, above=21, wrong="x",
                words="an integer from 0 to 20"),
    _input("`tools` of another type", {"prompt": "hello", "tools": ["x"]}, "tools takes a list"),
    _input("`tool_choice` that requires a call", {"prompt": "hello", "tool_choice": "required"},
           'tool_choice takes "auto" or "none"'),
    _input("`tool_choice` that names a function",
           {"prompt": "hello", "tool_choice": {"type": "function", "function": {"name": "f"}}},
           'tool_choice takes "auto" or "none"'),
    _input("`chat_template_kwargs` of another type",
           {"prompt": "hello", "chat_template_kwargs": ["x"]}, "a map with names as keys"),
    _input("`response_format` of another type",
           {"prompt": "hello", "response_format": {"type": "poem"}}, "response_format takes"),
    _input("`stop` of another type", {"prompt": "hello", "stop": "end"}, "a list of strings"),
    _input("`stop` with an empty text", {"prompt": "hello", "stop": [""]}, "that are not empty"),
    _input("`stop` with 17 texts", {"prompt": "hello", "stop": ["a"] * 17}, "at most 16 strings"),
    _input("`stop` with a text over 256 characters", {"prompt": "hello", "stop": ["a" * 257]},
           "at most 256 characters"),
    _input("`stop_token_ids` of another type", {"prompt": "hello", "stop_token_ids": 5},
           "a list of at most 64 token ids"),
    _input("`stop_token_ids` with a text", {"prompt": "hello", "stop_token_ids": ["a"]},
           "a list of at most 64 token ids"),
    _input("`stop_token_ids` below 0", {"prompt": "hello", "stop_token_ids": [-1]},
           "ids from 0 to 4294967295"),
    _input("`stop_token_ids` with 65 ids", {"prompt": "hello", "stop_token_ids": [5] * 65},
           "at most 64 token ids"),
    BadBody(name="`stop_token_ids` outside the model's vocabulary",
            body={"prompt": "hello", "stop_token_ids": [10**6]},
            words="stop_token_ids takes ids below"),
    _input("`ignore_eos` of another type", {"prompt": "hello", "ignore_eos": "yes"},
           "true or false"),
    BadBody(name="`n`", body={"prompt": "hello", "n": 2},
            words="n is not supported: send the request n times"),
    BadBody(name="`skip_special_tokens`", body={"prompt": "hello", "skip_special_tokens": True},
            words="skip_special_tokens is not supported"),
    BadBody(name="`min_tokens` that do not fit into the context",
            body={"prompt": "hello", "min_tokens": SMALL_CONTEXT}, model=SMALL, code=_OVER,
            words=f"min_tokens {SMALL_CONTEXT} exceed the context of {SMALL_CONTEXT}"),
    BadBody(name="a prompt longer than the context", body={"prompt": "y" * SMALL_CONTEXT},
            model=SMALL, code=_OVER,
            words=f"the prompt has {SMALL_CONTEXT} tokens; the context of {SMALL_CONTEXT}"),
    BadBody(name="prompt and `max_tokens` longer than the context",
            body={"prompt": "hello", "max_tokens": SMALL_CONTEXT}, model=SMALL, code=_OVER,
            words=f"exceed the context of {SMALL_CONTEXT}; at most {SMALL_CONTEXT - 5} fit"),
    BadBody(name="a chat that the model's template cannot render",
            body={"messages": [{"role": "user", "content": "[[tokenize raise]]"}]},
            words="the prompt could not be prepared: KeyError"),
)  # fmt: skip

RAW: dict[str, tuple[BadInput, ...]] = {
    "Frames": FRAMES,
    "Headers": HEADERS,
    "Requests and commands": REQUESTS,
    "Bodies": tuple(case.as_input() for case in BODIES),
}
"""All that is sent through a raw socket, by heading."""

# ---------------------------------------------------------------- only the Python client meets it

LONE_SURROGATE = "\udcff"

CLIENT_ONLY = (
    _input("`prompt` with a lone surrogate", {"prompt": LONE_SURROGATE}, "encoded as UTF-8"),
    _input("`stop` with a lone surrogate", {"prompt": "hello", "stop": [LONE_SURROGATE]},
           "encoded as UTF-8"),
    _input("`messages` with a lone surrogate",
           {"messages": [{"role": "user", "content": LONE_SURROGATE}]}, "cannot be encoded"),
    _input("`messages` with what msgpack cannot carry",
           {"messages": [{"role": "user", "content": {1, 2}}]}, "cannot be encoded"),
    _input("a body over 8 MiB", {"prompt": "y" * MAX_BODY_BYTES}, f"at most {MAX_BODY_BYTES}"),
    *(
        _input(f"`{name}` {what}", {"prompt": "hello", name: value}, f"{name} takes seconds")
        for name in ("timeout_s", "queue_timeout_s", "first_token_timeout_s")
        for what, value in (("below 0", -1), ("not a number (NaN)", float("nan")),
                            ("infinite", float("inf")), ("of another type", "5"))
    ),
    _input("`client` empty", {"prompt": "hello", "client": ""}, "client takes text of 1 to"),
    _input("`client` of another type", {"prompt": "hello", "client": 5}, "client takes text"),
)  # fmt: skip

UNANSWERED = (
    ("a frame over 16 MiB", "the connection is closed"),
    ("bytes that are not ZeroMQ's", "nothing, or the error of a frame that is no message"),
    ("a connection that does not finish ZeroMQ's greeting", "it is closed after 2 s"),
)
"""What cannot be answered, for it carries no message."""
