"""Pieces of streams that arrive: the usual ones are read on a shorter way, and no less strictly."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from mlxsup.protocol.client_messages import SUPERVISOR_TO_CLIENT, ClientDelta, Deltas
from mlxsup.protocol.codec import PACK_BYTES, DecodeError, Decoder, encode, pack, unpack_map
from mlxsup.protocol.delta_body import DeltaBody, pack_body, read_body
from mlxsup.protocol.ids import RequestId
from mlxsup.protocol.states import Channel

PIECE: dict[str, Any] = {"id": "r", "seq": 0, "tokens": b"\1\0\0\0", "body": b"\x80"}
DECODER = Decoder(SUPERVISOR_TO_CLIENT, is_strict=False)


def decoded(piece: object) -> Any:
    return DECODER.decode([pack({"type": "deltas", "deltas": [piece]})])


def test_what_was_sent_is_what_is_read() -> None:
    sent = Deltas(
        deltas=[
            ClientDelta(id=RequestId(f"r{number}"), seq=number, tokens=b"\1\0\0\0", body=b"\x80")
            for number in range(3)
        ]
    )
    assert DECODER.decode(encode(sent)) == sent


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"id": ""}, "deltas.id"),
        ({"id": "x" * 129}, "deltas.id"),
        ({"id": 7}, "deltas.id"),
        ({"seq": True}, "deltas.seq"),
        ({"seq": "0"}, "deltas.seq"),
        ({"tokens": "text"}, "deltas.tokens"),
        ({"body": None}, "deltas.body"),
    ],
)
def test_a_piece_with_a_wrong_field_is_refused_by_its_name(
    change: dict[str, Any], said: str
) -> None:
    with pytest.raises(DecodeError, match=said):
        decoded(PIECE | change)


@pytest.mark.parametrize("lacking", PIECE)
def test_a_piece_that_lacks_a_field_is_refused_by_its_name(lacking: str) -> None:
    with pytest.raises(DecodeError, match=f"deltas.{lacking} is missing"):
        decoded({name: value for name, value in PIECE.items() if name != lacking})
    renamed = {("other" if name == lacking else name): value for name, value in PIECE.items()}
    with pytest.raises(DecodeError, match=f"deltas.{lacking} is missing"):
        decoded(renamed)


def test_a_newer_daemon_may_say_more_of_a_piece() -> None:
    assert decoded(PIECE | {"more": 1}) == decoded(PIECE)


@pytest.mark.parametrize("deltas", [{}, "text", None])
def test_pieces_are_a_list(deltas: object) -> None:
    with pytest.raises(DecodeError, match="deltas takes a list"):
        DECODER.decode([pack({"type": "deltas", "deltas": deltas})])
    with pytest.raises(DecodeError, match="deltas takes a map"):
        decoded(deltas or [])


def test_a_body_with_only_text_is_read_as_any_other() -> None:
    assert read_body(pack_body("the", Channel.CONTENT)) == DeltaBody(text="the")
    thought = DeltaBody(text="hm", channel=Channel.REASONING)
    assert read_body(pack_body("hm", Channel.REASONING)) == thought
    assert read_body(pack({"text": "the", "newer": 1})) == DeltaBody(text="the")
    assert read_body(pack({"newer": 1})) == read_body(pack({})) == DeltaBody()


@pytest.mark.parametrize("body", [{"text": 7}, {"text": None}, {"channel": "x"}, ["text"]])
def test_a_body_that_is_none_is_refused(body: object) -> None:
    with pytest.raises(DecodeError):
        read_body(pack(body))


def test_a_small_message_takes_no_large_buffer() -> None:
    tracemalloc.start()
    try:
        pack({"type": "deltas"})
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 10 * PACK_BYTES
    large = bytes(10 * PACK_BYTES)
    assert unpack_map(pack({"body": large}), "a map") == {"body": large}
