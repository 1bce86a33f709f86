"""The short way through pieces of text: it reads as the codec does, or leaves it to that."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.client_messages import SUPERVISOR_TO_CLIENT, Alive, Deltas
from mlxsup.protocol.codec import DecodeError, Decoder, pack
from mlxsup.protocol.delta_body import pack_body, read_body
from mlxsup.protocol.ids import pack_tokens, unpack_tokens
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import Channel
from mlxsup.protocol.text_pieces import TextPiece, read_text_pieces

from support.pieces import frame_of, piece

CODEC = Decoder(SUPERVISOR_TO_CLIENT, is_strict=False)

PIECES = st.builds(
    piece,
    id=st.text(min_size=1, max_size=3),
    seq=st.integers(0, 2**40),
    text=st.text(min_size=1, max_size=40),
    tokens=st.integers(0, 2**32 - 1).map(lambda token: pack_tokens([token])),
)


def read_by_codec(frame: bytes) -> list[TextPiece] | None:
    """What is in the frame; None if it is anything else than pieces of text, a token each."""
    try:
        message = CODEC.decode([frame])
        assert isinstance(message, Deltas)
        bodies = [read_body(delta.body) for delta in message.deltas]
        assert all((body.channel, body.logprobs, body.stop) == (Channel.CONTENT, None, None)
                   for body in bodies)  # fmt: skip
        tokens = [unpack_tokens(delta.tokens) for delta in message.deltas]
        return [
            (delta.id, delta.seq, token, body.text)
            for delta, [token], body in zip(message.deltas, tokens, bodies, strict=True)
        ]
    except (AssertionError, DecodeError, ValueError):
        return None


def packed(**values: Any) -> bytes:
    """A message with one piece, with these of its fields instead."""
    usual = {
        "id": "a",
        "seq": 0,
        "tokens": pack_tokens([7]),
        "body": pack_body("x", Channel.CONTENT),
    }
    one = {name: value for name, value in {**usual, **values}.items() if value is not None}
    return pack({"type": "deltas", "deltas": [one]})


@given(st.lists(PIECES, max_size=4))
def test_the_usual_message_is_read(deltas: list[Any]) -> None:
    frame = frame_of(Deltas(deltas=deltas))
    found = read_text_pieces(frame)
    assert found is not None
    assert found == read_by_codec(frame)
    assert len(found) == len(deltas)


@given(st.lists(PIECES, min_size=1, max_size=3), st.data())
def test_a_message_that_was_changed_anywhere_is_read_as_the_codec_reads_it_or_left_to_it(
    deltas: list[Any], data: st.DataObject
) -> None:
    frame = bytearray(frame_of(Deltas(deltas=deltas)))
    place = data.draw(st.integers(0, len(frame) - 1))
    frame[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    assert read_text_pieces(bytes(frame)) in (None, read_by_codec(bytes(frame)))


@pytest.mark.parametrize("unusual", [
    packed(id=""), packed(id="a" * 129), packed(id=b"a"), packed(id=None), packed(id=5),
    packed(seq=None), packed(seq=1.0), packed(seq=True), packed(seq="0"),
    packed(tokens=None), packed(tokens=b""), packed(tokens=b"123"), packed(tokens=b"12345678"),
    packed(tokens="1234"), packed(body=None), packed(body=b""), packed(body="\x81\xa4text"),
    packed(body=b"\x80"), packed(body=b"\x81\xa4text"), packed(body=b"\x81\xa4text\x05"),
    packed(body=b"\x81\xa4text\xa1\xff"), packed(body=b"\x81\xa4text\xc1"),
    packed(body=b"\x81\xa4text\xa1xy"), packed(body=b"\x81\xa4text" + b"\x91" * 5000),
    packed(body=pack_body("x", Channel.REASONING)),
    packed(body=pack_body("x", Channel.CONTENT, [])),
    packed(body=pack_body("x", Channel.CONTENT, stop="x")), packed(more=1),
    packed(body=b"\x81\xa4stop\xa1x"),
    packed()[:-1], packed() + b"\x00", b"", b"\x82\xa4type\xa6deltas\xa6deltas",
    b"\x82\xa4type\xa6deltas\xa6deltas\x05", b"\x82\xa4type\xa6deltas\xa6deltas\x91\x05",
    b"\x82\xa4type\xa6deltas\xa6deltas\x91\x90", b"\x82\xa4type\xa6deltas\xa6deltas\x81\x05\x05",
    pack({"type": "deltas", "deltas": [], "more": 1}), frame_of(Alive()),
])  # fmt: skip
def test_what_is_unusual_is_left_to_the_codec(unusual: bytes) -> None:
    assert read_text_pieces(packed()) == [("a", 0, 7, "x")]
    assert read_text_pieces(unusual) is None


def test_an_id_may_have_128_characters() -> None:
    assert read_text_pieces(packed(id="a" * 128)) == [("a" * 128, 0, 7, "x")]


@pytest.mark.parametrize("message", SUPERVISOR_TO_CLIENT, ids=lambda message: message.TYPE)
def test_no_message_to_a_client_has_a_second_frame(message: type[Message]) -> None:
    assert "body" not in message.__slots__
