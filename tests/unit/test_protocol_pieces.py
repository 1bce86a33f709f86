"""Rows of a step and pieces of a stream: how they travel, and what is refused."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.client.text_pieces import TextPiece, read_text_pieces
from mlxsup.protocol.client_messages import SUPERVISOR_TO_CLIENT, Alive, ClientDelta, Deltas
from mlxsup.protocol.codec import PACK_BYTES, DecodeError, Decoder, encode, pack, unpack_map
from mlxsup.protocol.delta import DeltaBody, pack_body, read_body
from mlxsup.protocol.ids import RequestId, RequestKey, pack_tokens, unpack_tokens
from mlxsup.protocol.message import Logprobs, TokenLogprob
from mlxsup.protocol.states import Channel, FinishReason, PauseReason, RowState
from mlxsup.protocol.step_batch import PackedRow, Row
from mlxsup.protocol.worker_messages import WORKER_TO_SUPERVISOR, RowDelta, Step

from support.client.pieces import frame_of, piece, unpacked

WORKERS = Decoder(WORKER_TO_SUPERVISOR, is_strict=False)

CLIENTS = Decoder(SUPERVISOR_TO_CLIENT, is_strict=False)

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=3).map(pack_tokens)

NUMBERS = st.floats(-9999, 0)

TOKEN_LOGPROBS = st.builds(
    TokenLogprob,
    token=st.integers(0, 2**32),
    logprob=NUMBERS,
    text=st.text(max_size=3),
    raw_bytes=st.binary(max_size=3),
)

LOGPROBS = st.builds(Logprobs, chosen=TOKEN_LOGPROBS, top=st.lists(TOKEN_LOGPROBS, max_size=3))

BODIES = st.builds(
    DeltaBody,
    text=st.text(max_size=8),
    channel=st.sampled_from(Channel),
    logprobs=st.none() | st.lists(LOGPROBS, max_size=2),
    stop=st.none() | st.text(min_size=1, max_size=8),
    sampling=st.none() | st.just({"temperature": 0.5, "top_k": 3}),
)

NEWS: dict[str, st.SearchStrategy[Any]] = {
    "key": st.integers(0, 2**63).map(RequestKey),
    "tokens": TOKENS,
    "warning": st.none() | st.text(max_size=8),
    "finish": st.none() | st.sampled_from(FinishReason),
    "paused": st.none() | st.sampled_from(RowState),
    "pause_reason": st.none() | st.sampled_from(PauseReason),
    "prefill_s": st.none() | st.floats(0, 100),
    "cached_tokens": st.integers(0, 9),
}

ROWS = st.builds(
    lambda body, **news: RowDelta(
        text=body.text, channel=body.channel, logprobs=body.logprobs, stop=body.stop, **news
    ),
    body=BODIES,
    **NEWS,
)


def arrived(*rows: Row) -> list[Row]:
    """The rows as the supervisor reads them."""
    step = WORKERS.decode(encode(Step(step=1, rows=rows)))
    assert isinstance(step, Step)
    return list(step.rows)


@given(st.lists(ROWS, max_size=4))
def test_row_arrives_as_it_was_made_and_travels_on_as_the_same_bytes(rows: list[RowDelta]) -> None:
    for row in rows:
        if not (row.text or row.tokens):  # nothing of it is shown
            row.channel, row.logprobs = Channel.CONTENT, None
    came = arrived(*rows)
    assert encode(Step(step=1, rows=came)) == encode(Step(step=1, rows=rows))
    assert unpacked(came) == rows


@given(st.binary(min_size=1, max_size=300), TOKENS)
def test_body_is_not_read_on_its_way(body: bytes, tokens: bytes) -> None:
    [row] = arrived(PackedRow(key=RequestKey(1), tokens=tokens, body=body))
    assert (row.body, row.tokens) == (body, tokens)
    delta = ClientDelta(id=RequestId("r"), seq=7, tokens=row.tokens, body=row.body)
    [frame] = encode(Deltas(deltas=[delta]))
    assert body in frame
    assert CLIENTS.decode([frame]) == Deltas(deltas=[delta])


def test_row_with_nothing_to_show_has_no_body() -> None:
    ended = RowDelta(key=RequestKey(1), channel=Channel.REASONING, finish=FinishReason.STOP)
    assert ended.body == b""
    half = RowDelta(key=RequestKey(1), tokens=pack_tokens([5]))
    assert half.body == b"\x80", "half a character"
    stopped = RowDelta(key=RequestKey(1), finish=FinishReason.STOP, stop="x")
    assert read_body(stopped.body).stop == "x", "a stop string that was complete before a crash"


@given(BODIES)
def test_body_is_read_as_it_was_packed(body: DeltaBody) -> None:
    assert read_body(pack_body(body)) == body


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.binary()

VALUES = SCALARS | st.text(max_size=8)

PLAIN = VALUES | st.lists(VALUES, max_size=5) | st.dictionaries(st.text(max_size=8), VALUES)

FIELDS = st.sampled_from(["text", "channel", "logprobs", "tokens", "finish", "key"])


@given(st.lists(st.lists(VALUES | st.dictionaries(FIELDS, PLAIN), max_size=5) | PLAIN) | PLAIN)
def test_any_rows_are_rows_or_a_decode_error(rows: object) -> None:
    try:
        step = WORKERS.decode([msgpack.packb({"type": "step", "step": 1, "rows": rows})])
    except DecodeError:
        return
    assert isinstance(step, Step)
    for row in step.rows:
        assert isinstance(row, PackedRow)
        assert (type(row.key), type(row.tokens), type(row.body)) == (int, bytes, bytes)
        assert len(row.tokens) % 4 == 0
        assert row.body or not row.tokens


@given(st.binary(max_size=60) | st.dictionaries(FIELDS, PLAIN).map(msgpack.packb))
def test_any_body_is_a_body_or_a_decode_error(packed: bytes) -> None:
    try:
        body = read_body(packed)
    except DecodeError:
        return
    assert isinstance(body.text, str)
    assert isinstance(body.channel, Channel)


ENDLESS = (b"", b"\x81", b"\x91" * 100_000, b"\xdf\xff\xff\xff\xff", b"\x80\x80")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1], "the body of a piece is not a msgpack map"),
        *((packed, "the body of a piece is not") for packed in ENDLESS),
        ({"text": 1}, "text must be text"),
        ({"text": None}, "text must be text"),
        ({"channel": "loud"}, "channel must be one of content, reasoning, tool_call, prompt"),
        ({"logprobs": [{"chosen": {"token": 1}}]}, "the field logprobs.chosen.logprob is missing"),
        ({"text": msgpack.ExtType(1, b"x")}, "the body of a piece is not msgpack within"),
    ],
)
def test_body_is_refused_with_what_was_wrong(value: object, words: str) -> None:
    with pytest.raises(DecodeError) as caught:
        read_body(value if isinstance(value, bytes) else msgpack.packb(value))
    assert caught.value.message.startswith(words)


def test_newer_worker_may_say_more() -> None:
    assert read_body(msgpack.packb({"text": "x", "colour": 1})) == DeltaBody(text="x")
    assert read_body(pack({"newer": 1})) == read_body(pack({})) == DeltaBody()
    token = {"token": 1, "logprob": 0.0}
    logprobs = [{"chosen": {**token, "colour": 1}, "top": [], "colour": 1}]
    read = read_body(msgpack.packb({"text": "x", "logprobs": logprobs}))
    assert read.logprobs == [Logprobs(chosen=TokenLogprob(token=1, logprob=0.0))]


# ---------------------------------------------------------------- pieces for a client

LACKING = object()
PIECE: dict[str, Any] = {"id": "r", "seq": 0, "tokens": b"\1\0\0\0", "body": b"\x80"}


def decoded_piece(piece: object) -> Any:
    return CLIENTS.decode([pack({"type": "deltas", "deltas": [piece]})])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *(({lacking: LACKING}, f"deltas.{lacking} is missing") for lacking in PIECE),
        *(({lacking: LACKING, "other": 1}, f"deltas.{lacking} is missing") for lacking in PIECE),
        ({"id": ""}, "deltas.id"),
        ({"id": "x" * 129}, "deltas.id"),
        ({"id": 7}, "deltas.id"),
        ({"seq": True}, "deltas.seq"),
        ({"seq": "0"}, "deltas.seq"),
        ({"tokens": "text"}, "deltas.tokens"),
        ({"body": None}, "deltas.body"),
    ],
)
def test_wrong_field_of_a_piece_is_named(change: dict[str, Any], said: str) -> None:
    piece = {name: value for name, value in (PIECE | change).items() if value is not LACKING}
    with pytest.raises(DecodeError, match=said):
        decoded_piece(piece)
    assert decoded_piece(PIECE | {"more": 1}) == decoded_piece(PIECE), "a newer daemon may say more"


@pytest.mark.parametrize("deltas", [{}, "text", None])
def test_pieces_are_a_list(deltas: object) -> None:
    with pytest.raises(DecodeError, match="deltas must be a list"):
        CLIENTS.decode([pack({"type": "deltas", "deltas": deltas})])
    with pytest.raises(DecodeError, match="deltas must be a map"):
        decoded_piece(deltas or [])


def test_small_message_takes_no_large_buffer() -> None:
    tracemalloc.start()
    try:
        pack({"type": "deltas"})
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 10 * PACK_BYTES
    large = bytes(10 * PACK_BYTES)
    assert unpack_map(pack({"body": large}), "a map") == {"body": large}


# ---------------------------------------------------------------- the short way through text

PIECES = st.builds(
    piece,
    id=st.text(min_size=1, max_size=3),
    seq=st.integers(0, 2**40),
    text=st.text(min_size=1, max_size=40),
    tokens=st.integers(0, 2**32 - 1).map(lambda token: pack_tokens([token])),
)


def read_by_codec(frame: bytes) -> list[TextPiece] | None:
    """Return the pieces of text, a token each, of a frame; None if it is anything else."""
    try:
        message = CLIENTS.decode([frame])
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
        "body": pack_body(DeltaBody(text="x")),
    }
    one = {name: value for name, value in {**usual, **values}.items() if value is not None}
    return pack({"type": "deltas", "deltas": [one]})


@given(st.lists(PIECES, max_size=4))
def test_short_way_reads_as_the_codec(deltas: list[Any]) -> None:
    frame = frame_of(Deltas(deltas=deltas))
    found = read_text_pieces(frame)
    assert found is not None
    assert found == read_by_codec(frame)
    assert len(found) == len(deltas)


@given(st.lists(PIECES, min_size=1, max_size=3), st.data())
def test_short_way_leaves_changed_bytes_to_the_codec(
    deltas: list[Any], data: st.DataObject
) -> None:
    frame = bytearray(frame_of(Deltas(deltas=deltas)))
    place = data.draw(st.integers(0, len(frame) - 1))
    frame[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    assert read_text_pieces(bytes(frame)) in (None, read_by_codec(bytes(frame)))


HALF = b"\x81\xa4text"
UNUSUAL = [
    *(packed(id=id) for id in ("", "a" * 129, b"a", None, 5)),
    *(packed(seq=seq) for seq in (None, 1.0, True, "0")),
    *(packed(tokens=tokens) for tokens in (None, b"", b"123", b"12345678", "1234")),
    *(packed(body=body) for body in (
        None, b"", "\x81\xa4text", b"\x80", HALF, HALF + b"\x05", HALF + b"\xa1\xff",
        HALF + b"\xc1", HALF + b"\xa1xy", HALF + b"\x91" * 5000, b"\x81\xa4stop\xa1x",
        *map(pack_body, (
            DeltaBody(text="x", channel=Channel.REASONING), DeltaBody(text="x", logprobs=[]),
            DeltaBody(text="x", stop="x"))))),
    packed(more=1), packed()[:-1], packed() + b"\x00", b"",
    *(b"\x82\xa4type\xa6deltas\xa6deltas" + end
      for end in (b"", b"\x05", b"\x91\x05", b"\x91\x90", b"\x81\x05\x05")),
    pack({"type": "deltas", "deltas": [], "more": 1}), frame_of(Alive()),
]  # fmt: skip


def test_short_way_leaves_unusual_pieces_to_the_codec() -> None:
    assert read_text_pieces(packed()) == [("a", 0, 7, "x")]
    assert read_text_pieces(packed(id="a" * 128)) == [("a" * 128, 0, 7, "x")]
    assert [one for one in UNUSUAL if read_text_pieces(one) is not None] == []


def test_no_message_to_a_client_has_a_second_frame() -> None:
    assert [message for message in SUPERVISOR_TO_CLIENT if "body" in message.__slots__] == []
