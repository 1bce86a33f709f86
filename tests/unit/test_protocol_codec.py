"""The codec: what it refuses and says of it, limits, defaults, words and errors."""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol import states
from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.client_messages import (
    CLIENT_MESSAGES,
    SUPERVISOR_TO_CLIENT,
    Alive,
    Done,
    Generate,
    Ping,
    Stop,
    Usage,
)
from mlxsup.protocol.codec import (
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    MAX_TEXT_BYTES,
    DecodeError,
    Decoder,
    decode_body,
    encode,
    encode_body,
)
from mlxsup.protocol.errors import RETRYABLE, ErrorCode, RemoteError
from mlxsup.protocol.ids import ModelName, RequestId, RequestKey, pack_tokens, unpack_tokens
from mlxsup.protocol.worker_messages import (
    SUPERVISOR_TO_WORKER,
    WORKER_TO_SUPERVISOR,
    Dispatch,
    Step,
)

from support.bad.input import FRAMES, HEADERS, VALUES, WRONG_FIELDS, BadInput

CLIENTS = Decoder(CLIENT_MESSAGES, is_strict=True)


def pack(value: object) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


PING = {"type": "ping", "id": "a"}
GENERATE = {"type": "generate", "id": "a", "model": "m"}
UNKNOWN = (
    "; known are add_model, attach, cancel, cancel_request, configure, generate, load,"
    " pause, ping, prioritize, reload, remove_model, requests, restart, resume, settings, status,"
    " stop, subscribe, unload"
)
NOT_MSGPACK = "the header is not msgpack within the limits: "
# At each limit and beyond it, beside the table of the bad input that a daemon is sent: how the
# error begins, the id that it names, and the frames.
REFUSED: list[tuple[str, str, list[bytes]]] = [
    ("a message has one or two frames, not 0", "", []),
    (NOT_MSGPACK, "", [pack({"type": "ping", "id": [0] * 1025})]),
    ("id must be text of at most 128 characters", "", [pack({"type": "ping", "id": [0] * 1024})]),
    (NOT_MSGPACK, "", [pack({str(n): n for n in range(65)})]),
    ("unknown type 'None'", "", [pack({str(n): n for n in range(64)})]),
    (NOT_MSGPACK, "", [pack({"type": "x" * 4097})]),
    (f"unknown type {'x' * 64!r}{UNKNOWN}", "a", [pack({"type": "x" * 4096, "id": "a"})]),
    ("unknown type 'alive'", "", encode(Alive())),
    *(
        (
            "timeout_s must be a finite number",
            "a",
            [pack({"type": "stop", "id": "a", "timeout_s": n})],
        )
        for n in (float("-inf"), 1e15, -1e15, True)
    ),
    ("a body has at most", "a", [pack(GENERATE), bytes(MAX_BODY_BYTES + 1)]),
    ("the header is not msgpack", "", [pack(PING).ljust(MAX_HEADER_BYTES, b"\0")]),
    (f"a header has at most {MAX_HEADER_BYTES}", "", [bytes(MAX_HEADER_BYTES + 1)]),
]


def refusal(case: BadInput) -> DecodeError | None:
    try:
        CLIENTS.decode(case.sends[-1])
    except DecodeError as error:
        return error
    return None


def test_bad_input_is_refused_by_the_decoder() -> None:
    for case in (*FRAMES, *HEADERS, *WRONG_FIELDS):
        error = refusal(case)
        assert error is not None, case.name
        assert case.words in error.message, case.name
        assert (error.code, error.id) == (case.code, case.id), case.name


def test_values_are_left_to_the_core() -> None:
    assert [case.name for case in VALUES if refusal(case)] == []


@pytest.mark.parametrize(
    ("words", "named", "frames"), [pytest.param(*row, id=row[0][:40]) for row in REFUSED]
)
def test_frames_are_refused_with_what_was_wrong(
    words: str, named: str, frames: list[bytes]
) -> None:
    with pytest.raises(DecodeError) as caught:
        CLIENTS.decode(frames)
    assert str(caught.value) == caught.value.message
    assert caught.value.message.startswith(words)
    assert (caught.value.code, caught.value.id) == (ErrorCode.INVALID_REQUEST, named)


SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(max_size=8)
)

JSON = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=8), SCALARS)


@given(st.dictionaries(st.sampled_from(["type", "id", "v", "model", "now", "client"]), JSON))
def test_any_map_is_a_message_or_a_decode_error(header: dict[str, object]) -> None:
    try:
        CLIENTS.decode([pack(header)])
    except DecodeError:
        pass


@given(JSON)
def test_any_body_is_a_request_or_its_own_error(value: object) -> None:
    try:
        decode_body(pack(value))
    except RemoteError:
        pass


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_tokens_survive_packing(tokens: list[int]) -> None:
    assert unpack_tokens(pack_tokens(tokens)) == tokens


# ---------------------------------------------------------------- limits


def body(**values: Any) -> RequestBody:
    return RequestBody.from_wire({"prompt": "p"} | values)


def decode(header: dict[Any, Any], *more: bytes, decoder: Decoder[Any] = CLIENTS) -> Any:
    return decoder.decode([msgpack.packb(header), *more])


def test_body_of_just_the_limit_is_read() -> None:
    assert len(decode(GENERATE, bytes(MAX_BODY_BYTES)).body) == MAX_BODY_BYTES
    assert decode({"type": "ping", "id": "x" * 128}) == Ping(id=RequestId("x" * 128))
    room = MAX_TEXT_BYTES - len(encode_body(body(prompt="x" * 70_000))) + 70_000
    assert len(encode_body(body(prompt="x" * room))) == MAX_TEXT_BYTES
    longer = body(prompt="x" * (room + 1))
    for refused in (lambda: encode_body(longer), lambda: decode_body(pack(longer.to_wire()))):
        with pytest.raises(RemoteError, match=f"at most {MAX_TEXT_BYTES} bytes besides its pict"):
            refused()
    with pytest.raises(RemoteError, match=f"^a request body has at most {MAX_BODY_BYTES} bytes"):
        encode_body(body(prompt="x" * MAX_BODY_BYTES))
    picture = {"type": "image", "data": bytes(MAX_TEXT_BYTES)}
    shown = body(prompt=None, messages=[{"role": "user", "content": [picture, picture]}])
    assert len(encode_body(shown)) > 2 * MAX_TEXT_BYTES


def test_another_version_is_refused_with_the_id() -> None:
    with pytest.raises(DecodeError) as caught:
        decode({**PING, "v": "2" * 50})
    assert caught.value.code is ErrorCode.UNSUPPORTED_VERSION
    assert caught.value.id == "a"
    assert caught.value.message == "this daemon speaks protocol version 2, not " + "2" * 20


def test_lenient_decoder_ignores_what_newer_processes_say() -> None:
    lenient = Decoder(SUPERVISOR_TO_CLIENT, is_strict=False)
    assert decode({"type": "alive", "colour": 1}, decoder=lenient) == lenient.decode(
        [msgpack.packb({"type": "alive"})]
    )
    long = {"type": "reply", "id": "a", "value": {str(n): "x" * 5000 for n in range(100)}}
    assert len(decode(long, decoder=lenient).value) == 100
    with pytest.raises(DecodeError, match="not msgpack"):
        decode({"type": "alive", "x": msgpack.ExtType(1, b"x")}, decoder=lenient)
    with pytest.raises(DecodeError, match="not msgpack"):
        decode({"type": "alive", 1: 1}, decoder=lenient)


def test_parts_are_refused_with_their_path() -> None:
    worker = Decoder(WORKER_TO_SUPERVISOR, is_strict=False)
    for rows, words in (
        (5, "rows must be a list"),
        ([5], "rows must be lists of key, tokens, body, and a map if there is more"),
        ([[1, b""]], "rows must be lists of key, tokens, body"),
        ([[1, b"", b"", {}, {}]], "rows must be lists of key, tokens, body"),
        ([["x", b"", b""]], "rows.key must be an integer"),
        ([[True, b"", b""]], "rows.key must be an integer"),
        ([[1, "x", b""]], "rows.tokens must be bytes"),
        ([[1, b"", "x"]], "rows.body must be bytes"),
        ([[1, b"12345", b"\x80"]], "rows.tokens must be 4 bytes for each token"),
        ([[1, b"1234", b""]], "rows.body is empty, though there are tokens"),
        ([[1, b"", b"", []]], "rows must be a map of the other fields at the end of a list"),
        ([[1, b"", b"", {"key": 2}]], "rows must be a map of the other fields"),
        ([[1, b"", b"", {"finish": "loud"}]], "rows.finish must be one of stop, length, cancelled"),
        ([[1, b"", b"", {"finish": []}]], "rows.finish must be one of"),
        ([[1, b"", b"", {"colour": 1}]], "unknown field rows.colour; known are body, cached_"),
        ([[1, b"", b"", {"c" * 65: 1}]], f"unknown field rows.{'c' * 64}; known are "),
        ([[1, b"1234", b"", {"finish": "stop"}]], "rows.body is empty, though there are tokens"),
    ):
        with pytest.raises(DecodeError, match="^" + re.escape(words)):
            decode({"type": "step", "step": 1, "rows": rows}, decoder=worker)
    ready = {"type": "ready", "context_length": 1, "fingerprint": "", "backend": ""}
    for window, words in ((0, ""), (-1, "0 or more"), (1.0, "0 or more"), (True, "0 or more")):
        with nullcontext() if not words else pytest.raises(DecodeError, match=words):
            decode({**ready, "cache_layers": [{"layers": 0, "window": window}]}, decoder=worker)
    with pytest.raises(DecodeError, match=r"^versions must be a map with texts as keys$"):
        decode({**ready, "versions": []}, decoder=worker)


def test_empty_body_travels_as_a_frame() -> None:
    assert encode(Ping(id=RequestId("a"))) == [msgpack.packb(PING)]
    frames = encode(Generate(id=RequestId("a"), model=ModelName("m"), body=b""))
    assert [len(frames), frames[1]] == [2, b""]
    resumed = encode(Dispatch(key=RequestKey(1)))
    assert Decoder(SUPERVISOR_TO_WORKER, is_strict=False).decode(resumed) == Dispatch(
        key=RequestKey(1)
    )


def test_value_that_cannot_travel_is_an_error_of_the_caller() -> None:
    deep: list[Any] = []
    for _ in range(2000):
        deep = [deep]
    for value in (deep, {1, 2}, 10**400):
        with pytest.raises(RemoteError, match=r"^the request cannot be encoded: ") as caught:
            encode_body(body(prompt=None, messages=[{"role": "user", "content": value}]))
        assert caught.value.code is ErrorCode.INVALID_REQUEST


def test_integers_of_more_than_64_bits_become_floating_point_numbers() -> None:
    numbers = [2**64, 2**64 - 1, -(2**63), -(2**63) - 1, 10**30, True, 1.5]
    sent = body(prompt=None, messages=[{"role": "user", "content": [{"limits": numbers}]}])
    read = decode_body(encode_body(sent))
    assert isinstance(read, RequestBody)
    [message] = read.messages or []
    [arrived] = message["content"]
    assert arrived["limits"] == [2.0**64, 2**64 - 1, -(2**63), -(2.0**63), 1e30, True, 1.5]
    assert [type(n) for n in arrived["limits"]] == [float, int, int, float, float, bool, float]


def test_body_that_is_no_msgpack_is_refused() -> None:
    for frame in (b"\xc1", msgpack.packb({1: 2}), msgpack.packb(msgpack.ExtType(1, b"x"))):
        with pytest.raises(RemoteError, match=r"^the body is not msgpack within the limits: "):
            decode_body(frame)


def test_encoded_messages_and_bodies_leave_out_their_defaults() -> None:
    done = Done(
        id=RequestId("a"),
        seq=1,
        finish_reason=states.FinishReason.STOP,
        usage=Usage(prompt_tokens=2),
    )
    [frame] = encode(done)
    assert msgpack.unpackb(frame) == {
        "type": "done", "id": "a", "seq": 1, "finish_reason": "stop", "usage": {"prompt_tokens": 2},
    }  # fmt: skip
    assert msgpack.unpackb(encode(Step(step=4))[0]) == {"type": "step", "step": 4}
    body = RequestBody(max_tokens=4, prompt="hello")
    assert msgpack.unpackb(encode_body(body)) == {"prompt": "hello", "max_tokens": 4}
    assert decode_body(encode_body(body)) == body


def test_decoded_messages_have_their_defaults() -> None:
    stop = decode({"type": "stop", "id": "a"})
    assert stop == Stop(id=RequestId("a"), now=False, timeout_s=None, v=2)
    limit_s = decode({"type": "stop", "id": "a", "timeout_s": 5}).timeout_s
    assert (limit_s, type(limit_s)) == (5.0, float)
    generate = decode({"type": "generate", "id": "a", "model": "m"}, b"")
    assert (generate.notices, generate.resume, generate.client) == (False, True, None)


def test_error_travels_with_all_that_it_says() -> None:
    error = RemoteError(ErrorCode.OVERLOADED, "full", detail={"running": 4})
    wire = {"code": "overloaded", "message": "full", "retryable": True, "detail": {"running": 4}}
    again = RemoteError.from_wire(error.to_wire())
    assert (error.to_wire(), again, str(again)) == (wire, error, "full")
    assert (again.code, again.retryable, again.detail) == ("overloaded", True, {"running": 4})
    assert {code for code in ErrorCode if RemoteError(code, "x").retryable} == RETRYABLE
    assert not RemoteError.from_wire(wire | {"retryable": False}).retryable, "the sender knows"


@pytest.mark.parametrize(
    "wrong",
    [
        {"code": 5}, {"message": None}, {"retryable": 1}, {"detail": []},
    ],
)  # fmt: skip
def test_map_that_is_no_error_is_refused(wrong: dict[str, Any]) -> None:
    wire = {"code": "internal", "message": "m", "retryable": False}
    assert RemoteError.from_wire(wire).detail == {}
    assert RemoteError.from_wire(wire | {"code": "of a newer daemon"}).code == "internal"
    frame = pack({"type": "failed", "id": "a", "error": wire | wrong})
    words = r"^error is wrong: an error needs a code, a message, retryable and a detail map$"
    with pytest.raises(DecodeError, match=words):
        Decoder(SUPERVISOR_TO_CLIENT, is_strict=False).decode([frame])
    with pytest.raises(ValueError, match="a code, a message"):
        RemoteError.from_wire([])


def test_tokens_travel_alike_from_big_endian_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "byteorder", "little")
    native = pack_tokens([1, 2**32 - 2])
    monkeypatch.setattr(sys, "byteorder", "big")
    swapped = pack_tokens([1, 2**32 - 2])
    assert swapped == native[3::-1] + native[:3:-1]
    assert unpack_tokens(swapped) == [1, 2**32 - 2]
