"""Frames that no honest client sends, from a seed."""

from __future__ import annotations

import random

import msgpack
from mlxsup.protocol.codec import encode
from mlxsup.protocol.ids import ModelName, RequestId
from mlxsup.protocol.messages import Cancel, Generate, Message, Ping, Reload, StatusQuery, Subscribe

HARMLESS: tuple[Message, ...] = (
    Generate(id=RequestId("x"), model=ModelName("no such model"), body=b"\x80"),
    Cancel(id=RequestId("x")),
    Ping(id=RequestId("p")),
    StatusQuery(id=RequestId("s")),
    Subscribe(id=RequestId("e")),
    Reload(id=RequestId("r")),
)
ODD_VALUES = (
    None, True, -1, 2**63, -(2**63), 1e308, float("nan"), float("inf"), "", "\x00", "é" * 5000,
    b"", b"\xff" * 200, [], [[[[]]]], {}, {"a": {"b": {}}}, list(range(2000)),
)  # fmt: skip
RESERVED = b"\xc1"


def hostile_frames(dice: random.Random) -> list[bytes]:
    """One multipart message: damaged, deep, oversized, of wrong types, or plain noise."""
    kind = dice.randrange(8)
    frames = encode(dice.choice(HARMLESS))
    if kind == 0:
        return [dice.randbytes(dice.randrange(200)) for _ in range(dice.randint(1, 4))]
    if kind == 1:  # truncated
        return [frames[0][: dice.randrange(len(frames[0]))], *frames[1:]]
    if kind == 2:  # some bytes changed
        damaged = bytearray(frames[0])
        for _ in range(dice.randint(1, 4)):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        return [bytes(damaged), *frames[1:]]
    if kind == 3:  # deep
        depth = dice.choice((10, 600, 5000))
        return [dice.choice((b"\x91", b"\x81\xa1a")) * depth + b"\xc0"]
    if kind == 4:  # declares more than it has
        return [dice.choice((b"\xdf", b"\xdd", b"\xdb", b"\xc6")) + b"\xff\xff\xff\xff"]
    if kind == 5:  # a field of a wrong type, or one too many
        header = msgpack.unpackb(frames[0])
        name = dice.choice([*header, "type", "v", "id", "body", "surprise"])
        header[name] = dice.choice(ODD_VALUES)
        return [msgpack.packb(header), *frames[1:]]
    if kind == 6:  # frames too many or too few
        return frames * dice.randint(2, 5) if dice.random() < 0.5 else [b""]
    return [RESERVED * dice.randint(1, 50), *frames[1:]]
