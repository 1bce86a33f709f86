"""Pieces of streams with what clients are shown, packed as workers do and read as clients do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mlxsup.protocol.client_messages import ClientDelta, Deltas
from mlxsup.protocol.codec import encode
from mlxsup.protocol.delta import DeltaBody, pack_body, read_body
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.message import Message
from mlxsup.protocol.step_batch import Row
from mlxsup.protocol.worker_messages import RowDelta


def piece(
    id: str,
    seq: int,
    text: str = "",
    *,
    tokens: bytes = b"",
    **more: Any,
) -> ClientDelta:
    """Return a piece of a stream; `more` are further fields of its `DeltaBody`."""
    body = pack_body(DeltaBody(text=text, **more))
    return ClientDelta(id=RequestId(id), seq=seq, tokens=tokens, body=body)


def frame_of(message: Message) -> bytes:
    """Return a message to a client, as it travels."""
    [frame] = encode(message)
    return frame


def body_of(one: ClientDelta | Row) -> DeltaBody:
    """Return the body that a client is shown; an empty one if there is none."""
    return read_body(one.body) if one.body else DeltaBody()


def texts_of(message: Deltas) -> list[str]:
    """Return the text of each piece."""
    return [body_of(delta).text for delta in message.deltas]


def unpacked(rows: Iterable[Row]) -> list[RowDelta]:
    """Return the rows that a worker has sent, as it made them."""
    return [_unpacked(row) for row in rows]


def _unpacked(row: Row) -> RowDelta:
    body = body_of(row)
    return RowDelta(
        key=row.key,
        text=body.text,
        tokens=row.tokens,
        channel=body.channel,
        logprobs=body.logprobs,
        stop=body.stop,
        stop_token=body.stop_token,
        sampling=body.sampling,
        prompt_tokens=body.prompt_tokens,
        vector=body.vector,
        is_prompt=row.is_prompt,
        warning=row.warning,
        finish=row.finish,
        paused=row.paused,
        pause_reason=row.pause_reason,
        prefill_s=row.prefill_s,
        cached_tokens=row.cached_tokens,
    )
