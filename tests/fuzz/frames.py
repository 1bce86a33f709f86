"""Messages that no honest client sends, from a seed; each knows what it must be answered (P17)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgpack

from mlxsup.protocol.client_messages import Cancel, Generate, Ping, Reload, StatusQuery, Subscribe
from mlxsup.protocol.codec import MAX_BODY_BYTES, MAX_HEADER_BYTES, encode
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.protocol.message import Message
from mlxsup.protocol.version import PROTOCOL_VERSION

Header = dict[str, Any]

HARMLESS: tuple[Message, ...] = (
    Generate(id=RequestId("x"), model=ModelName("no such model"), body=b"\x80"),
    Cancel(id=RequestId("x")),
    Ping(id=RequestId("p")),
    StatusQuery(id=RequestId("s")),
    Subscribe(id=RequestId("e")),
    Reload(id=RequestId("r")),
)
RESERVED = b"\xc1"
INVALID = "invalid_request"
ANYTHING = "anything"
"""Only this kind may be answered by whatever the bytes happen to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostile:
    """One thing that a hostile client says.

    Attributes:
        kind: which of `KINDS`.
        messages: the frames of each message, in order.
        id: what the answers will carry; empty if the id cannot be read.
        answers: the code of each error, `reply`, or `done` and the reason; `(ANYTHING,)` for bytes
            that were changed at random.
    """

    kind: str
    messages: tuple[list[bytes], ...]
    id: str = ""
    answers: tuple[str, ...] = (INVALID,)


Make = Callable[[random.Random, str], Hostile]


def _garbage(dice: random.Random, id: str) -> Hostile:
    noise = [dice.randbytes(dice.randrange(200)) for _ in range(dice.randint(1, 4))]
    return Hostile(kind="garbage", messages=(noise,))


def _truncated(dice: random.Random, id: str) -> Hostile:
    first, *rest = encode(dice.choice(HARMLESS))
    return Hostile(kind="truncated", messages=([first[: dice.randrange(len(first))], *rest],))


def _changed(dice: random.Random, id: str) -> Hostile:
    first, *rest = encode(dice.choice(HARMLESS))
    damaged = bytearray(first)
    for _ in range(dice.randint(1, 4)):
        damaged[dice.randrange(len(damaged))] = dice.randrange(256)
    return Hostile(kind="changed bytes", messages=([bytes(damaged), *rest],), answers=(ANYTHING,))


def _deep(dice: random.Random, id: str) -> Hostile:
    opening, depth = dice.choice((b"\x91", b"\x81\xa1a")), dice.choice((600, 5000, 20_000))
    return Hostile(kind="deep", messages=([opening * depth + b"\xc0"],))


def _declared(dice: random.Random, id: str) -> Hostile:
    """It declares a length that it does not have."""
    opening = dice.choice((b"\xdf", b"\xdd", b"\xdb", b"\xc6", b"\xc9"))
    return Hostile(kind="declared length", messages=([opening + b"\xff\xff\xff\xff"],))


def _wrong_type(dice: random.Random, id: str) -> Hostile:
    header: Header = {"type": "generate", "id": id, "model": "no such model"}
    field, values = dice.choice(WRONG_TYPES)
    header[field] = dice.choice(values)
    is_readable = field != "id"
    return Hostile(
        kind="wrong type",
        messages=([msgpack.packb(header), b"\x80"],),
        id=id if is_readable else "",
    )


WRONG_TYPES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("id", (None, True, -1, 1.5, "", "x" * 129, b"bytes", [], {})),
    ("type", (None, True, 7, "", "nope", "Generate", [], {"a": 1})),
    ("model", (None, True, 7, "", "x" * 129, b"m", [], {})),
    ("client", (True, 7, b"c", [], {})),
    ("timeout_s", (True, "1", 1e300, 2**63, -(2**63), [], {})),
    ("notices", (None, 0, 1, "yes", [])),
    ("v", (float(PROTOCOL_VERSION),)),
    ("surprise", (None, 1, "é" * 2000, [[[[]]]])),
    ("body", (b"\x80", None)),
)


def _not_a_number(dice: random.Random, id: str) -> Hostile:
    header: Header = {"type": "generate", "id": id, "model": "no such model"}
    field = dice.choice(("timeout_s", "queue_timeout_s", "first_token_timeout_s"))
    header[field] = dice.choice((float("nan"), float("inf"), float("-inf")))
    return Hostile(kind="NaN", messages=([msgpack.packb(header), b"\x80"],), id=id)


def _version(dice: random.Random, id: str) -> Hostile:
    header: Header = {
        "type": "ping",
        "id": id,
        "v": dice.choice((0, 1, -1, 2**63, None, "1", [], 1.5)),
    }
    return Hostile(
        kind="wrong version",
        messages=([msgpack.packb(header)],),
        id=id,
        answers=("unsupported_version",),
    )


def _frame_count(dice: random.Random, id: str) -> Hostile:
    frames = dice.choice(([b""], [b"", b""], 3 * encode(Ping(id=RequestId("p"))), 500 * [b"\xc0"]))
    return Hostile(kind="frame count", messages=(frames,))


def _reserved(dice: random.Random, id: str) -> Hostile:
    rest = encode(dice.choice(HARMLESS))[1:]
    return Hostile(kind="reserved bytes", messages=([RESERVED * dice.randint(1, 50), *rest],))


def _large_header(dice: random.Random, id: str) -> Hostile:
    return Hostile(kind="oversized header", messages=([dice.choice(LARGE_HEADERS)],))


LARGE_HEADERS = tuple(
    msgpack.packb({"id": value})
    for size in (MAX_HEADER_BYTES + 1, MAX_HEADER_BYTES + 1_000_000)
    for value in ("x" * size, [None] * size, ["x" * 4096] * (size // 4096))
)


def _huge(dice: random.Random, id: str) -> Hostile:
    return Hostile(kind="huge map or list", messages=([dice.choice(HUGE)],))


HUGE = tuple(
    msgpack.packb({"type": "ping", "id": "h", "v": 2, "client": value})
    for value in (
        {str(n): n for n in range(65)},
        {str(n): n for n in range(5000)},
        [0] * 1025,
        [0] * 60_000,
        "x" * 4097,
    )
)


def _duplicate(dice: random.Random, id: str) -> Hostile:
    body = msgpack.packb({"prompt": "twice", "max_tokens": 1_000_000})
    header = msgpack.packb({"type": "generate", "id": id, "model": "m"})
    cancel = encode(Cancel(id=RequestId(id)))
    return Hostile(
        kind="duplicate id",
        messages=([header, body], [header, body], cancel),
        id=id,
        answers=("duplicate_id", "done cancelled"),
    )


def _unknown_id(dice: random.Random, id: str) -> Hostile:
    """A cancel of what is not there; it may have overtaken its request, so nothing answers it."""
    return Hostile(
        kind="unknown id", messages=(encode(Cancel(id=RequestId(id))),), id=id, answers=()
    )


def _odd(dice: random.Random, id: str) -> Hostile:
    """What the decoder lets pass, as it must: odd, but a message."""
    body: dict[str, Any] = {"prompt": "odd", "max_tokens": 1}
    header: Header = {"type": "generate", "id": id, "model": "m"}
    answer = "done length"
    which = dice.randrange(7)
    if which == 0:
        header |= {"timeout_s": 9e14, "client": dice.choice(("", "\x00", "é" * 2048, "‮"))}
    elif which == 1:
        header["id"] = id = (id + "\x00é\U0001f600" + "x" * 128)[:128]
    elif which == 2:
        header["model"], answer = dice.choice(("\x00", "../m", "M", "m ", "x" * 128)), UNKNOWN
    elif which == 3:
        body["prompt"] = dice.choice(("\x00" * 50, "\ud7ff" * 50, "‮‮", " " * 2000))
    else:
        raw = dice.choice(BAD_BODIES)
        return Hostile(kind="odd", messages=([msgpack.packb(header), raw],), id=id)
    frames = [msgpack.packb(header), msgpack.packb(body)]
    return Hostile(kind="odd", messages=(frames,), id=id, answers=(answer,))


UNKNOWN = "unknown_model"
BAD_BODIES = (
    b"",
    b"\x80",
    RESERVED,
    b"\xdf\xff\xff\xff\xff",
    b"\x91" * 100_000 + b"\xc0",
    msgpack.packb([1, 2, 3]),
    msgpack.packb({"prompt": 7}),
    msgpack.packb({"prompt": "x", "max_tokens": -1}),
    msgpack.packb({"prompt": "x", "temperature": float("nan")}),
    msgpack.packb({"prompt": "x", "surprise": {}}),
    msgpack.packb({"prompt_tokens": [2**40]}),
    msgpack.packb({"prompt": "x", "messages": []}),
)


def _large_body(dice: random.Random, id: str) -> Hostile:
    header = msgpack.packb({"type": "generate", "id": id, "model": "m"})
    return Hostile(kind="oversized body", messages=([header, LARGE_BODY],), id=id)


LARGE_BODY = bytes(MAX_BODY_BYTES + 1)


MAKERS: dict[str, tuple[Make, int]] = {
    "garbage": (_garbage, 100),
    "truncated": (_truncated, 100),
    "deep": (_deep, 100),
    "declared length": (_declared, 100),
    "wrong type": (_wrong_type, 200),
    "NaN": (_not_a_number, 100),
    "wrong version": (_version, 100),
    "frame count": (_frame_count, 100),
    "reserved bytes": (_reserved, 100),
    "oversized header": (_large_header, 20),
    "huge map or list": (_huge, 100),
    "duplicate id": (_duplicate, 20),
    "unknown id": (_unknown_id, 50),
    "odd": (_odd, 100),
    "oversized body": (_large_body, 1),
}
"""What may stand in one window with others, and how often it is drawn."""

KINDS = (*MAKERS, "changed bytes")


def hostile(dice: random.Random, sequence: Iterator[int] | None = None) -> Iterator[Hostile]:
    """Without end: one of each kind first, then by weight. Ids carry numbers of the sequence."""
    numbers = count() if sequence is None else sequence
    for kind in MAKERS:
        yield MAKERS[kind][0](dice, f"{kind} {next(numbers)}")
    makers, weights = zip(*MAKERS.values(), strict=True)
    while True:
        (make,) = dice.choices(makers, weights)
        yield make(dice, f"hostile {next(numbers)}")


def changed_bytes(dice: random.Random) -> Hostile:
    """A message of which some bytes were changed; it may still be one."""
    return _changed(dice, "")


def hostile_frames(dice: random.Random) -> list[bytes]:
    """One multipart message that is no request: damaged, deep, of wrong types, or plain noise."""
    makers = (_garbage, _truncated, _changed, _deep, _declared, _wrong_type, _not_a_number,
              _version, _frame_count, _reserved, _huge)  # fmt: skip
    return dice.choice(makers)(dice, "x").messages[0]
