"""The identifiers that name a model, a request, its caller and one life of a worker."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import NamedTuple, NewType

ModelName = NewType("ModelName", str)
"""A model's name for users: the key of a `[models.*]` table."""

RequestId = NewType("RequestId", str)
"""Chosen by the client; unique among the open requests of one connection."""

RequestKey = NewType("RequestKey", int)
"""Chosen by the supervisor; never used twice in its life. Workers know requests by it, so an id
that a client reuses at once is a new request everywhere (D7)."""

Generation = NewType("Generation", int)
"""How many times a model's worker has been spawned, from 1; events of earlier ones are dropped."""

ConnectionId = NewType("ConnectionId", bytes)
"""The routing id that the client socket gave a connection."""


class Caller(NamedTuple):
    """A client that waits for a command to complete."""

    connection: ConnectionId
    id: RequestId


TERMINAL = "terminal"
"""The name of a client that stands for its terminal, more exactly for the session of its process,
as all others of that session do that give it."""


MAX_ID_CHARACTERS = 128

DEFAULT_REVISION = "main"
"""The revision of a repository that is meant if none is named."""

LAST_REQUEST = "last"
"""Instead of the id of a request: the one that came last."""


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Return token ids as little-endian unsigned 32-bit integers, the form in which they travel.

    Raises:
        OverflowError: an id is negative or does not fit in 32 bits.
    """
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def pack_token(token: int) -> bytes:
    """Return one token id as `pack_tokens` makes it.

    Raises:
        OverflowError: the id is negative or does not fit in 32 bits.
    """
    return token.to_bytes(4, "little")


def unpack_tokens(packed: bytes) -> list[int]:
    """Return the inverse of `pack_tokens`.

    Raises:
        ValueError: the length is not a multiple of four bytes.
    """
    if len(packed) == 4:  # as of nearly every piece
        return [int.from_bytes(packed, "little")]
    tokens = array("I")
    tokens.frombytes(packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tolist()
