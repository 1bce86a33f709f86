"""The part of a piece that a client is shown: packed by the worker, and passed on unread.

The supervisor copies these bytes from a worker's message into a client's. Only the client reads
them, and a body that cannot be read concerns one stream.
"""

from __future__ import annotations

from typing import Any

from .codec import pack, read_part, to_map, unpack_map
from .message import Logprobs, Record, record
from .states import Channel


@record
class DeltaBody(Record):
    """The text of a piece, and what is known of its tokens.

    Attributes:
        text: new text; may be empty while a character or a stop string may be incomplete.
        channel: which part of the answer it belongs to.
        logprobs: those of each new token, if the request asked for them.
        stop: in the last piece, the stop string that has ended the answer, if one has.
        sampling: in the first piece, the fields of `parameters.Sampling` that differ from their
            defaults; None if none does.
        stop_token: the same for one of the request's `stop_token_ids`.
        prompt_tokens: the next ids of the prompt, packed as `ids.pack_tokens` does, if the request
            asked for them.
        vector: what a text became, packed by `pooling.pack_vector`, if that was asked for; the
            token of the piece is the number of the text.
    """

    text: str = ""
    channel: Channel = Channel.CONTENT
    logprobs: list[Logprobs] | None = None
    stop: str | None = None
    sampling: dict[str, float] | None = None
    stop_token: int | None = None
    prompt_tokens: bytes = b""
    vector: bytes | None = None


def pack_body(body: Any) -> bytes:
    """Return the bytes of a body; fields with their default are left out.

    Args:
        body: a `DeltaBody`, or what has its fields.
    """
    return pack(to_map(body, DeltaBody))


def pack_text(text: str, channel: Channel) -> bytes:
    """Return the bytes of a body that has a text and nothing else, as `pack_body` makes them."""
    if text and channel is Channel.CONTENT:  # as nearly all
        return pack({"text": text})
    return pack_body(DeltaBody(text=text, channel=channel))


def read_body(packed: bytes) -> DeltaBody:
    """Return the body of these bytes; fields that a newer worker adds are ignored.

    Raises:
        DecodeError: they are not a body.
    """
    value = unpack_map(packed, "the body of a piece")
    if len(value) == 1 and type(text := value.get("text")) is str:
        return DeltaBody(text=text)  # as nearly all are
    return read_part(DeltaBody, value, is_strict=False)
