"""A short way through the usual message to a client: pieces of plain text, a token each.

There is one for every step of an engine, and a reader that has slept since the step before finds
none of its code in the processor's caches: what counts is how much different code a message
touches. A message that is unusual in any way is left to the codec, which reads everything and says
what is wrong.
"""

from __future__ import annotations

from mlxsup.protocol.codec import NOT_MSGPACK, unpack
from mlxsup.protocol.ids import MAX_ID_CHARACTERS, RequestId

BEGIN = b"\x82\xa4type\xa6deltas\xa6deltas"
"""How the message `Deltas` begins; the list of them follows."""

TEXT = b"\x81\xa4text"
"""How a `DeltaBody` begins that holds only a text."""

TextPiece = tuple[RequestId, int, int, str]
"""The request, the number of the piece, its token, and its text, which is part of the answer."""


def read_text_pieces(frame: bytes) -> list[TextPiece] | None:
    """Return the pieces of a `Deltas`; None for another message, or if any of them is unusual."""
    if not frame.startswith(BEGIN):
        return None
    pieces: list[TextPiece] = []
    try:
        for delta in unpack(frame[len(BEGIN) :]):
            id, seq, tokens, body = delta["id"], delta["seq"], delta["tokens"], delta["body"]
            if not (
                len(delta) == 4
                and type(id) is str
                and 1 <= len(id) <= MAX_ID_CHARACTERS
                and type(seq) is int
                and type(tokens) is type(body) is bytes
                and len(tokens) == 4
                and body.startswith(TEXT)
                and type(text := unpack(body[len(TEXT) :])) is str
            ):
                return None
            pieces.append((RequestId(id), seq, int.from_bytes(tokens, "little"), text))
    except (*NOT_MSGPACK, LookupError):
        return None
    return pieces
