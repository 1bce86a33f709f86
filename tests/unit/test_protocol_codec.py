"""What the codec refuses, and that it says what was wrong; limits against hostile headers."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.client_messages import CLIENT_MESSAGES, Alive, Generate, Ping
from mlxsup.protocol.codec import (
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    DecodeError,
    Decoder,
    decode_body,
    encode,
    encode_body,
)
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import ModelName, RequestId, pack_tokens, unpack_tokens

CLIENTS = Decoder(CLIENT_MESSAGES, is_strict=True)


def pack(value: object) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


PING = {"type": "ping", "id": "a"}

UNREADABLE = "the header is not msgpack within the limits: "
REFUSED: dict[str, tuple[list[bytes], str]] = {
    "no frame": ([], "a message has one or two frames, not 0"),
    "three frames": ([b"", b"", b""], "a message has one or two frames, not 3"),
    "an empty frame": ([b""], UNREADABLE),
    "reserved byte": ([b"\xc1"], UNREADABLE),
    "truncated": ([pack(PING)[:-1]], UNREADABLE),
    "trailing bytes": ([pack(PING) + b"\x00"], UNREADABLE),
    "not a map": ([pack([1])], "the header is not a msgpack map"),
    "keys that are no text": ([pack({1: 2})], UNREADABLE),
    "an extension type": ([pack(msgpack.ExtType(4, b"xx"))], UNREADABLE),
    "a long array": ([pack({"type": "ping", "id": [0] * 1025})], UNREADABLE),
    "a large map": ([pack({str(n): n for n in range(65)})], UNREADABLE),
    "a long text": ([pack({"type": "x" * 4097})], UNREADABLE),
    "deep nesting": ([b"\x91" * 2000 + b"\xc0"], UNREADABLE),
    "an oversized header": ([b"\x00" * (MAX_HEADER_BYTES + 1)], "a header has at most"),
    "no type": (
        [pack({"id": "a"})],
        "unknown type 'None'; known are attach, cancel, cancel_request,",
    ),
    "an unknown type": (
        [pack({"type": "pong", "id": "a"})],
        "unknown type 'pong'; known are attach, cancel, cancel_request,",
    ),
    "an unknown field": ([pack({**PING, "colour": 1})], "unknown field colour; known are id, v"),
    "a missing field": ([pack({"type": "load", "id": "a"})], "the field model is missing"),
    "an id that is no text": (
        [pack({"type": "ping", "id": 5})],
        "id takes text of at most 128 characters",
    ),
    "an empty id": ([pack({"type": "ping", "id": ""})], "id takes text of 1 to 128 characters"),
    "a long id": (
        [pack({"type": "ping", "id": "x" * 129})],
        "id takes text of at most 128 characters",
    ),
    "a wrong boolean": (
        [pack({"type": "restart", "id": "a", "model": "m", "now": 1})],
        "now takes true or false",
    ),
    "not a number": (
        [pack({"type": "stop", "id": "a", "timeout_s": float("nan")})],
        "timeout_s takes a finite number",
    ),
    "infinite": (
        [pack({"type": "stop", "id": "a", "timeout_s": float("inf")})],
        "timeout_s takes a finite number",
    ),
    "a body too many": ([pack(PING), b"x"], "ping takes one frame"),
    "a body too few": (
        [pack({"type": "generate", "id": "a", "model": "m"})],
        "generate takes two frames, header and body",
    ),
    "a body in the header": (
        [pack({"type": "generate", "id": "a", "model": "m", "body": b"x"}), b"x"],
        "generate takes two frames, header and body",
    ),
    "an oversized body": (
        [pack({"type": "generate", "id": "a", "model": "m"}), bytes(MAX_BODY_BYTES + 1)],
        "a body has at most",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_what_was_wrong(name: str) -> None:
    frames, words = REFUSED[name]
    with pytest.raises(DecodeError) as caught:
        CLIENTS.decode(frames)
    assert str(caught.value) == caught.value.message
    assert caught.value.message.startswith(words)
    assert caught.value.code is ErrorCode.INVALID_REQUEST


def test_the_answer_can_be_addressed_where_the_id_was_readable() -> None:
    with pytest.raises(DecodeError) as caught:
        CLIENTS.decode([pack({"type": "load", "id": "a"})])
    assert caught.value.id == "a"


@pytest.mark.parametrize(
    "frames",
    [[], [b"\xc1"], [pack([])], [pack({"type": "ping", "id": 5})], [pack({"type": "load"})]],
)
def test_nobody_is_addressed_if_no_id_could_be_read(frames: list[bytes]) -> None:
    with pytest.raises(DecodeError) as caught:
        CLIENTS.decode(frames)
    assert caught.value.id == ""


def test_a_message_names_its_type_and_its_fields() -> None:
    assert repr(Ping(id=RequestId("a"))).startswith("Ping(id='a'")


def test_another_version_is_named_as_such() -> None:
    with pytest.raises(DecodeError) as caught:
        CLIENTS.decode([pack({**PING, "v": 99})])
    assert caught.value.code is ErrorCode.UNSUPPORTED_VERSION


def test_a_message_of_another_link_is_refused() -> None:
    with pytest.raises(DecodeError):
        CLIENTS.decode(encode(Alive()))


def test_an_empty_body_is_a_body() -> None:
    message = Generate(id=RequestId("a"), model=ModelName("m"), body=b"")
    assert CLIENTS.decode(encode(message)) == message


@given(st.lists(st.binary(max_size=200), max_size=3))
def test_any_bytes_are_a_message_or_a_decode_error(frames: list[bytes]) -> None:
    try:
        CLIENTS.decode(frames)
    except DecodeError:
        pass


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


def test_ping_is_what_the_documentation_shows() -> None:
    assert encode(Ping(id=RequestId("a"))) == [pack(PING)]


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_tokens_survive_packing(tokens: list[int]) -> None:
    assert unpack_tokens(pack_tokens(tokens)) == tokens


BODIES: dict[str, tuple[dict[str, object], str]] = {
    "no input": ({}, "exactly one of prompt"),
    "two inputs": ({"prompt": "a", "prompt_tokens": [1]}, "exactly one of prompt"),
    "an empty prompt": ({"prompt": ""}, "at least one character"),
    "a prompt that is no text": ({"prompt": 5}, "a string"),
    "no tokens": ({"prompt_tokens": []}, "at least one"),
    "tokens that are no numbers": ({"prompt_tokens": ["a"]}, "takes integers"),
    "negative tokens": ({"prompt_tokens": [-1]}, "ids from 0"),
    "no messages": ({"messages": []}, "at least one message"),
    "a message without a role": ({"messages": [{"content": "x"}]}, "a role"),
    "max_tokens of nothing": ({"prompt": "a", "max_tokens": 0}, "an integer from 1"),
    "max_tokens that is a fraction": ({"prompt": "a", "max_tokens": 1.5}, "an integer from 1"),
    "max_tokens that is true": ({"prompt": "a", "max_tokens": True}, "an integer from 1"),
    "temperature below 0": ({"prompt": "a", "temperature": -0.1}, "from 0 to 10"),
    "temperature not a number": ({"prompt": "a", "temperature": float("nan")}, "from 0 to 10"),
    "temperature as text": ({"prompt": "a", "temperature": "1"}, "from 0 to 10"),
    "top_p of nothing": ({"prompt": "a", "top_p": 0.0}, "above 0"),
    "top_p above 1": ({"prompt": "a", "top_p": 1.1}, "above 0"),
    "an empty stop": ({"prompt": "a", "stop": [""]}, "at least one character"),
    "a stop that is no list": ({"prompt": "a", "stop": "x"}, "a list of strings"),
    "too many stops": ({"prompt": "a", "stop": ["x"] * 17}, "at most 16"),
    "a negative seed": ({"prompt": "a", "seed": -1}, "an integer from 0"),
    "an unknown parameter": ({"prompt": "a", "colour": 1}, "unknown parameter 'colour'"),
    "lone surrogates": ({"prompt": "\ud800"}, "UTF-8"),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_is_refused_by_parameter_and_range(name: str) -> None:
    value, words = BODIES[name]
    with pytest.raises(RemoteError) as caught:
        RequestBody.from_wire(value)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert words in caught.value.message


def test_a_body_travels_without_its_defaults_and_equal_ones_are_equal_bytes() -> None:
    body = RequestBody(prompt="hello", max_tokens=4)
    assert msgpack.unpackb(encode_body(body)) == {"prompt": "hello", "max_tokens": 4}
    assert encode_body(body) == encode_body(RequestBody(max_tokens=4, prompt="hello"))
    assert decode_body(encode_body(body)) == body


def test_an_error_never_repeats_a_prompt() -> None:
    secret = "the secret " * 50
    with pytest.raises(RemoteError) as caught:
        RequestBody.from_wire({"messages": [secret]})
    assert "secret" not in caught.value.message
