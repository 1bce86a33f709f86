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

HARMLESS: tuple[Message, ...] = (
    Generate(id=RequestId("x"), model=ModelName("no such model"), body=b"\x80"),
    Cancel(id=RequestId("x")),
    Ping(id=RequestId("p")),
    StatusQuery(id=RequestId("s")),
    Subscribe(id=RequestId("e")),
    Reload(id=RequestId("r")),
)
INVALID = "invalid_request"
ANYTHING = "anything"
"""Only bytes that were changed at random may be answered by whatever they happen to say."""

pack = msgpack.packb


@dataclass(frozen=True, slots=True)
class Hostile:
    """One thing that a hostile client says.

    Attributes:
        kind: which of `KINDS`.
        messages: the frames of each message, in order.
        id: what the answers will carry; empty if the id cannot be read.
        answers: the code of each error, `reply`, or `done` and the reason.
    """

    kind: str
    messages: tuple[list[bytes], ...]
    id: str = ""
    answers: tuple[str, ...] = (INVALID,)


Dice = random.Random
Said = tuple[tuple[list[bytes], ...], str, tuple[str, ...]]
"""The messages, the id that can be read, and the answers."""


def refused(*frames: bytes, id: str = "") -> Said:
    """Return one message that must be refused."""
    return (list(frames),), id, (INVALID,)


def _request(id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "generate", "id": id, "model": "no such model", **fields}


def _garbage(dice: Dice, id: str) -> Said:
    return refused(*(dice.randbytes(dice.randrange(200)) for _ in range(dice.randint(1, 4))))


def _truncated(dice: Dice, id: str) -> Said:
    first, *rest = encode(dice.choice(HARMLESS))
    return refused(first[: dice.randrange(len(first))], *rest)


def _changed(dice: Dice, id: str) -> Said:
    first, *rest = encode(dice.choice(HARMLESS))
    damaged = bytearray(first)
    for _ in range(dice.randint(1, 4)):
        damaged[dice.randrange(len(damaged))] = dice.randrange(256)
    return ([bytes(damaged), *rest],), "", (ANYTHING,)


def _deep(dice: Dice, id: str) -> Said:
    opening, depth = dice.choice((b"\x91", b"\x81\xa1a")), dice.choice((600, 5000, 20_000))
    return refused(opening * depth + b"\xc0")


def _declared(dice: Dice, id: str) -> Said:
    """It declares a length that it does not have."""
    return refused(dice.choice((b"\xdf", b"\xdd", b"\xdb", b"\xc6", b"\xc9")) + b"\xff\xff\xff\xff")


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


def _wrong_type(dice: Dice, id: str) -> Said:
    field, values = dice.choice(WRONG_TYPES)
    header = _request(id) | {field: dice.choice(values)}
    return refused(pack(header), b"\x80", id="" if field == "id" else id)


def _not_a_number(dice: Dice, id: str) -> Said:
    field = dice.choice(("timeout_s", "queue_timeout_s", "first_token_timeout_s"))
    number = dice.choice((float("nan"), float("inf"), float("-inf")))
    return refused(pack(_request(id, **{field: number})), b"\x80", id=id)


def _version(dice: Dice, id: str) -> Said:
    header: dict[str, Any] = {"type": "ping", "id": id}
    header["v"] = dice.choice((0, 1, -1, 2**63, None, "1", [], 1.5))
    return ([pack(header)],), id, ("unsupported_version",)


def _frame_count(dice: Dice, id: str) -> Said:
    ping = encode(Ping(id=RequestId("p")))
    return refused(*dice.choice(([b""], [b"", b""], 3 * ping, 500 * [b"\xc0"])))


def _reserved(dice: Dice, id: str) -> Said:
    return refused(b"\xc1" * dice.randint(1, 50), *encode(dice.choice(HARMLESS))[1:])


LARGE_HEADERS = tuple(
    pack({"id": value})
    for size in (MAX_HEADER_BYTES + 1, MAX_HEADER_BYTES + 1_000_000)
    for value in ("x" * size, [None] * size, ["x" * 4096] * (size // 4096))
)
HUGE = tuple(
    pack({"type": "ping", "id": "h", "v": 2, "client": value})
    for value in ({str(n): n for n in range(65)}, {str(n): n for n in range(5000)},
                  [0] * 1025, [0] * 60_000, "x" * 4097)
)  # fmt: skip
LARGE_BODY = bytes(MAX_BODY_BYTES + 1)
BAD_BODIES = (
    b"", b"\x80", b"\xc1", b"\xdf\xff\xff\xff\xff", b"\x91" * 100_000 + b"\xc0",
    *map(pack, ([1, 2, 3], {"prompt": 7}, {"prompt": "x", "max_tokens": -1},
                {"prompt": "x", "temperature": float("nan")}, {"prompt": "x", "surprise": {}},
                {"prompt_tokens": [2**40]}, {"prompt": "x", "messages": []})),
)  # fmt: skip


def _duplicate(dice: Dice, id: str) -> Said:
    body = pack({"prompt": "twice", "max_tokens": 1_000_000})
    header = pack(_request(id, model="m"))
    cancel = encode(Cancel(id=RequestId(id)))
    return ([header, body], [header, body], cancel), id, ("duplicate_id", "done cancelled")


def _unknown_id(dice: Dice, id: str) -> Said:
    """Cancel what is not there; it may have overtaken its request, so nothing answers it."""
    return (encode(Cancel(id=RequestId(id))),), id, ()


def _odd(dice: Dice, id: str) -> Said:
    """Say what the decoder lets pass, as it must: odd, but a message."""
    body: dict[str, Any] = {"prompt": "odd", "max_tokens": 1}
    header: dict[str, Any] = _request(id, model="m")
    answer = "done length"
    which = dice.randrange(7)
    if which == 0:
        header |= {"timeout_s": 9e14, "client": dice.choice(("", "\x00", "é" * 2048, "‮"))}
    elif which == 1:
        header["id"] = id = (id + "\x00é\U0001f600" + "x" * 128)[:128]
    elif which == 2:
        header["model"] = dice.choice(("\x00", "../m", "M", "m ", "x" * 128))
        answer = "unknown_model"
    elif which == 3:
        body["prompt"] = dice.choice(("\x00" * 50, "\ud7ff" * 50, "‮‮", " " * 2000))
    else:
        return refused(pack(header), dice.choice(BAD_BODIES), id=id)
    return ([pack(header), pack(body)],), id, (answer,)


MAKERS: dict[str, tuple[Callable[[Dice, str], Said], int]] = {
    "garbage": (_garbage, 100),
    "truncated": (_truncated, 100),
    "deep": (_deep, 100),
    "declared length": (_declared, 100),
    "wrong type": (_wrong_type, 200),
    "NaN": (_not_a_number, 100),
    "wrong version": (_version, 100),
    "frame count": (_frame_count, 100),
    "reserved bytes": (_reserved, 100),
    "oversized header": (lambda dice, id: refused(dice.choice(LARGE_HEADERS)), 20),
    "huge map or list": (lambda dice, id: refused(dice.choice(HUGE)), 100),
    "duplicate id": (_duplicate, 20),
    "unknown id": (_unknown_id, 50),
    "odd": (_odd, 100),
    "oversized body": (
        lambda dice, id: refused(pack(_request(id, model="m")), LARGE_BODY, id=id),
        1,
    ),
}
"""What may stand in one window with others, and how often it is drawn."""

KINDS = (*MAKERS, "changed bytes")


def hostile(dice: Dice, sequence: Iterator[int] | None = None) -> Iterator[Hostile]:
    """Draw without end: one of each kind first, then by weight; ids carry numbers in sequence."""
    numbers = count() if sequence is None else sequence
    for kind in MAKERS:
        yield Hostile(kind, *MAKERS[kind][0](dice, f"{kind} {next(numbers)}"))
    kinds, weights = [*MAKERS], [weight for _, weight in MAKERS.values()]
    while True:
        (kind,) = dice.choices(kinds, weights)
        yield Hostile(kind, *MAKERS[kind][0](dice, f"hostile {next(numbers)}"))


def changed_bytes(dice: Dice) -> Hostile:
    """Return a message of which some bytes were changed; it may still be one."""
    return Hostile("changed bytes", *_changed(dice, ""))


HARMFUL = (_garbage, _truncated, _changed, _deep, _declared, _wrong_type, _not_a_number, _version,
           _frame_count, _reserved)  # fmt: skip


def hostile_frames(dice: Dice) -> list[bytes]:
    """Return one multipart message that is no request."""
    return dice.choice(HARMFUL)(dice, "x")[0][0]
