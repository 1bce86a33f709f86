"""Rows of a step and their bodies: how they arrive, what is refused, and what nobody reads."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.client_messages import SUPERVISOR_TO_CLIENT, ClientDelta, Deltas
from mlxsup.protocol.codec import DecodeError, Decoder, encode
from mlxsup.protocol.delta_body import DeltaBody, pack_body, read_body
from mlxsup.protocol.ids import RequestId, RequestKey, pack_tokens
from mlxsup.protocol.message import Logprobs, TokenLogprob
from mlxsup.protocol.packed_rows import PackedRow, Row, read_rows
from mlxsup.protocol.states import Channel, FinishReason, PauseReason, RowState
from mlxsup.protocol.worker_messages import WORKER_TO_SUPERVISOR, RowDelta, Step

from support.pieces import unpacked

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
def test_a_row_arrives_as_it_was_made(rows: list[RowDelta]) -> None:
    for row in rows:
        if not (row.text or row.tokens):  # nobody is shown anything of it
            row.channel, row.logprobs = Channel.CONTENT, None
    assert unpacked(arrived(*rows)) == rows


@given(st.lists(ROWS, max_size=4))
def test_what_arrived_travels_on_as_the_same_bytes(rows: list[RowDelta]) -> None:
    step = Step(step=1, rows=rows)
    assert encode(Step(step=1, rows=arrived(*rows))) == encode(step)


@given(st.binary(min_size=1, max_size=300), TOKENS)
def test_nobody_reads_a_body_on_its_way(body: bytes, tokens: bytes) -> None:
    [row] = arrived(PackedRow(key=RequestKey(1), tokens=tokens, body=body))
    assert (row.body, row.tokens) == (body, tokens)
    delta = ClientDelta(id=RequestId("r"), seq=7, tokens=row.tokens, body=row.body)
    [frame] = encode(Deltas(deltas=[delta]))
    assert body in frame
    assert CLIENTS.decode([frame]) == Deltas(deltas=[delta])


def test_a_row_with_nothing_to_show_has_no_body() -> None:
    ended = RowDelta(key=RequestKey(1), channel=Channel.REASONING, finish=FinishReason.STOP)
    assert ended.body == b""
    half = RowDelta(key=RequestKey(1), tokens=pack_tokens([5]))
    assert half.body == b"\x80", "half a character"
    stopped = RowDelta(key=RequestKey(1), finish=FinishReason.STOP, stop="x")
    assert read_body(stopped.body).stop == "x", "a stop string that was complete before a crash"


@given(BODIES)
def test_a_body_is_read_as_it_was_packed(body: DeltaBody) -> None:
    assert read_body(pack_body(body.text, body.channel, body.logprobs, body.stop)) == body


def test_a_plain_body_is_its_text_and_nothing_else() -> None:
    assert msgpack.unpackb(pack_body("x", Channel.CONTENT)) == {"text": "x"}
    assert msgpack.unpackb(pack_body("", Channel.CONTENT)) == {}


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.binary()
VALUES = SCALARS | st.text(max_size=8)
PLAIN = VALUES | st.lists(VALUES, max_size=5) | st.dictionaries(st.text(max_size=8), VALUES)
FIELDS = st.sampled_from(["text", "channel", "logprobs", "tokens", "finish", "key"])


@given(st.lists(st.lists(VALUES | st.dictionaries(FIELDS, PLAIN), max_size=5) | PLAIN) | PLAIN)
def test_whatever_a_worker_sends_as_rows_is_rows_or_a_decode_error(rows: object) -> None:
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
def test_whatever_a_body_holds_is_a_body_or_a_decode_error(packed: bytes) -> None:
    try:
        body = read_body(packed)
    except DecodeError:
        return
    assert isinstance(body.text, str)
    assert isinstance(body.channel, Channel)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1], "the body of a piece is not a msgpack map"),
        ({"text": 1}, "text takes text"),
        ({"channel": "loud"}, "channel takes one of content, reasoning, tool_call"),
        ({"logprobs": [{"chosen": {"token": 1}}]}, "the field logprobs.chosen.logprob is missing"),
        ({"text": msgpack.ExtType(1, b"x")}, "the body of a piece is not msgpack within"),
    ],
)
def test_a_body_is_refused_with_what_was_wrong(value: object, words: str) -> None:
    with pytest.raises(DecodeError) as caught:
        read_body(msgpack.packb(value))
    assert caught.value.message.startswith(words)


def test_a_body_that_never_ends_is_refused() -> None:
    for packed in (b"", b"\x81", b"\x91" * 100_000, b"\xdf\xff\xff\xff\xff", b"\x80\x80"):
        with pytest.raises(DecodeError):
            read_body(packed)


def test_a_newer_worker_may_say_more() -> None:
    assert read_body(msgpack.packb({"text": "x", "colour": 1})) == DeltaBody(text="x")
    token = {"token": 1, "logprob": 0.0}
    logprobs = [{"chosen": {**token, "colour": 1}, "top": [], "colour": 1}]
    read = read_body(msgpack.packb({"text": "x", "logprobs": logprobs}))
    assert read.logprobs == [Logprobs(chosen=TokenLogprob(token=1, logprob=0.0))]


def test_rows_are_equal_by_their_fields_whichever_way_they_were_read() -> None:
    [plain, ended, short] = read_rows(
        [[1, b"\0\0\0\0", b"\x80"], [1, b"\0\0\0\0", b"\x80", {"cached_tokens": 3}], [1, b"", b""]],
        "rows",
    )
    assert plain == PackedRow(key=RequestKey(1), tokens=b"\0\0\0\0", body=b"\x80")
    assert ended == PackedRow(key=RequestKey(1), tokens=b"\0\0\0\0", body=b"\x80", cached_tokens=3)
    assert short == PackedRow(key=RequestKey(1))
    assert plain != ended
    assert plain != 1
