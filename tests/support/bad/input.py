"""Bad frames, headers and requests with the error that each gets, as data.

tests/integration/test_bad_input.py sends each of these to a real daemon.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, get_type_hints

import msgpack

from mlxsup.protocol.client_messages import CLIENT_MESSAGES, Generate
from mlxsup.protocol.codec import MAX_HEADER_BYTES
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.message import Message
from mlxsup.protocol.version import PROTOCOL_VERSION

MODEL = "m"
"""The model that a live stream runs on while all of this arrives."""

SMALL = "small"
"""A model with a context of `SMALL_CONTEXT` tokens; a token of the fake engine is a byte."""
SMALL_CONTEXT = 32

LONE_SURROGATE = "\udcff"

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


def _unlike(hint: object) -> int | str:
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
    values = {"model": MODEL, "request": "nobody"}
    return {k: v for k, v in values.items() if k in getattr(cls, "__dataclass_fields__", {})}


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
    _headers("an unknown type", [header("pong")], "known are attach, cancel, cancel_request"),
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
    _headers("`generate` with a `keep_alive` below 0 that is not -1",
             [header("generate", model=MODEL, keep_alive=-2), HELLO_BODY],
             "keep_alive takes seconds from 0 up, or -1 for ever, not -2"),
    _headers("`load` with a `keep_alive` of 0", [header("load", model=MODEL, keep_alive=0)],
             "keep_alive takes seconds above 0, or -1 for ever, not 0"),
    _headers("`load` with a `context_length` below 0",
             [header("load", model=MODEL, context_length=-1)],
             "context_length takes an integer from 0 to 2147483647, not -1"),
    _headers("`load` with `dry_run` and a `context_length`",
             [header("load", model=MODEL, dry_run=True, context_length=9)],
             "what a load as configured would lead to: leave context_length out"),
    _headers("`log_level` with a word that is no level", [header("log_level", level="loud")],
             "level takes one of debug, info, warning, error, not 'loud'"),
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
    _headers("`prioritize` of an id that no open request has",
             [header("prioritize", request="nobody", priority="batch")],
             "no open request has the id 'nobody'"),
    *(
        _headers(f"`{kind}` of an id that no open request has", [header(kind, request="nobody")],
                 "no open request has the id 'nobody'")
        for kind in ("pause", "resume", "cancel_request", "attach")
    ),
    BadInput(name="an id that is open on this connection",
             sends=(generate(_LONG), generate(HELLO_BODY)), code=ErrorCode.DUPLICATE_ID,
             words="already has an open request 'x'"),
)  # fmt: skip
