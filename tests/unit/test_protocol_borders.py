"""Frames, words, errors and launches: the last that is taken and the first that is refused."""

from __future__ import annotations

import dataclasses
import re
import sys
from enum import Enum
from typing import Any
from unittest.mock import ANY

import msgpack
import pytest

from mlxsup.protocol import states
from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.client_messages import (
    CLIENT_MESSAGES,
    SUPERVISOR_TO_CLIENT,
    Done,
    Generate,
    Ping,
    Restart,
    StatusQuery,
    Stop,
    Usage,
)
from mlxsup.protocol.codec import (
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    DecodeError,
    Decoder,
    decode_body,
    encode,
    encode_body,
)
from mlxsup.protocol.errors import RETRYABLE, ErrorCode, RemoteError
from mlxsup.protocol.ids import (
    Generation,
    ModelName,
    RequestId,
    RequestKey,
    pack_tokens,
    unpack_tokens,
)
from mlxsup.protocol.launch import (
    MAX_LAUNCH_SPEC_BYTES,
    PERMANENT_EXITS,
    ExitCode,
    LaunchSettings,
    LaunchSpec,
    worker_argv,
)
from mlxsup.protocol.parameters import sampling_defaults
from mlxsup.protocol.version import VERSION
from mlxsup.protocol.worker_messages import (
    SUPERVISOR_TO_WORKER,
    WORKER_TO_SUPERVISOR,
    Dispatch,
    Step,
)

STRICT = Decoder(CLIENT_MESSAGES, is_strict=True)


def body(**values: Any) -> RequestBody:
    return RequestBody.from_wire({"prompt": "p"} | values)


# ---------------------------------------------------------------- frames


def decode(header: dict[Any, Any], *more: bytes, decoder: Decoder[Any] = STRICT) -> Any:
    return decoder.decode([msgpack.packb(header), *more])


PING = {"type": "ping", "id": "a"}


def test_a_header_of_just_the_limit_is_read() -> None:
    padded = msgpack.packb(PING)
    with pytest.raises(DecodeError, match="not msgpack"):
        STRICT.decode([padded + bytes(MAX_HEADER_BYTES - len(padded))])
    with pytest.raises(DecodeError, match=f"at most {MAX_HEADER_BYTES} bytes, not "):
        STRICT.decode([padded + bytes(MAX_HEADER_BYTES - len(padded) + 1)])


def test_containers_of_just_the_limit_are_read() -> None:
    for header, words in (
        ({"type": "ping", "id": [0] * 1024}, "id takes text"),
        ({"type": "x" * 4096}, "unknown type"),
        ({str(n): n for n in range(64)}, "unknown type"),
    ):
        with pytest.raises(DecodeError, match=words):
            decode(header)


def test_names_of_just_the_limit_are_read() -> None:
    assert decode({"type": "ping", "id": "x" * 128}) == Ping(id=RequestId("x" * 128))
    for model in ("", "x" * 129):
        with pytest.raises(DecodeError, match="model takes text of 1 to 128 characters") as caught:
            decode({"type": "load", "id": "a", "model": model})
        assert caught.value.id == "a"


def test_a_body_of_just_the_limit_is_read() -> None:
    header = {"type": "generate", "id": "a", "model": "m"}
    assert len(decode(header, bytes(MAX_BODY_BYTES)).body) == MAX_BODY_BYTES
    with pytest.raises(DecodeError, match=f"a body has at most {MAX_BODY_BYTES} bytes, not"):
        decode(header, bytes(MAX_BODY_BYTES + 1))
    room = MAX_BODY_BYTES - len(encode_body(body(prompt="x" * 70_000))) + 70_000
    assert len(encode_body(body(prompt="x" * room))) == MAX_BODY_BYTES
    with pytest.raises(
        RemoteError, match=f"^a request body has at most {MAX_BODY_BYTES} bytes, not"
    ):
        encode_body(body(prompt="x" * (room + 1)))


@pytest.mark.parametrize("number", [-1e14, 0, 5, 9.9e14])
def test_numbers_are_read_as_floats(number: float) -> None:
    found = decode({"type": "stop", "id": "a", "timeout_s": number})
    assert (found.timeout_s, type(found.timeout_s)) == (number, float)


@pytest.mark.parametrize("number", [1e15, -1e15, True, "1", float("-inf")])
def test_what_is_no_number_is_refused(number: object) -> None:
    with pytest.raises(DecodeError, match="timeout_s takes a finite number"):
        decode({"type": "stop", "id": "a", "timeout_s": number})


def test_another_version_is_refused_with_the_id() -> None:
    with pytest.raises(DecodeError) as caught:
        decode({**PING, "v": "2" * 50})
    assert caught.value.code is ErrorCode.UNSUPPORTED_VERSION
    assert caught.value.id == "a"
    assert caught.value.message == "this daemon speaks protocol version 2, not " + "2" * 20


def test_our_own_newer_processes_may_say_more_and_strangers_may_not() -> None:
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


def test_parts_of_messages_are_checked_with_their_path() -> None:
    worker = Decoder(WORKER_TO_SUPERVISOR, is_strict=False)
    for rows, words in (
        (5, "rows takes a list"),
        ([5], "rows takes lists of key, tokens, body, and a map if there is more"),
        ([[1, b""]], "rows takes lists of key, tokens, body"),
        ([[1, b"", b"", {}, {}]], "rows takes lists of key, tokens, body"),
        ([["x", b"", b""]], "rows.key takes an integer"),
        ([[True, b"", b""]], "rows.key takes an integer"),
        ([[1, "x", b""]], "rows.tokens takes bytes"),
        ([[1, b"", "x"]], "rows.body takes bytes"),
        ([[1, b"12345", b"\x80"]], "rows.tokens takes 4 bytes for each token"),
        ([[1, b"1234", b""]], "rows.body is empty, though there are tokens"),
        ([[1, b"", b"", []]], "rows takes a map of the other fields at the end of a list"),
        ([[1, b"", b"", {"key": 2}]], "rows takes a map of the other fields"),
        ([[1, b"", b"", {"finish": "loud"}]], "rows.finish takes one of stop, length, cancelled"),
        ([[1, b"", b"", {"finish": []}]], "rows.finish takes one of"),
        ([[1, b"", b"", {"colour": 1}]], "unknown field rows.colour; known are body, cached_"),
        ([[1, b"", b"", {"c" * 65: 1}]], f"unknown field rows.{'c' * 64}; known are "),
        ([[1, b"1234", b"", {"finish": "stop"}]], "rows.body is empty, though there are tokens"),
    ):
        with pytest.raises(DecodeError, match="^" + re.escape(words)):
            decode({"type": "step", "step": 1, "rows": rows}, decoder=worker)
    ready = {"type": "ready", "context_length": 1, "fingerprint": "", "backend": ""}
    with pytest.raises(DecodeError, match=r"^versions takes a map$"):
        decode({**ready, "versions": []}, decoder=worker)


def test_what_is_left_out_is_what_the_page_says() -> None:
    stop = decode({"type": "stop", "id": "a"})
    assert stop == Stop(id=RequestId("a"), now=False, timeout_s=None, v=2)
    assert not decode({"type": "status", "id": "a"}).debug
    assert not decode({"type": "restart", "id": "a", "model": "m"}).now
    generate = decode({"type": "generate", "id": "a", "model": "m"}, b"")
    assert (generate.notices, generate.resume, generate.client) == (False, True, None)
    assert StatusQuery(id=RequestId("a"), debug=True) != StatusQuery(id=RequestId("a"))
    assert Restart(id=RequestId("a"), model=ModelName("m")).v == 2


def test_an_unknown_type_is_shown_shortened_with_the_id_and_all_that_are_known() -> None:
    with pytest.raises(DecodeError) as caught:
        decode({"type": "c" * 65, "id": "a"})
    assert caught.value.id == "a"
    assert caught.value.message == (
        f"unknown type {'c' * 64!r}; known are attach, cancel, cancel_request, generate, load,"
        " log_level, pause, ping, prioritize, reload, requests, restart, resume, status, stop,"
        " subscribe, unload"
    )


def test_a_message_equals_what_says_that_it_does_and_shows_all_its_fields() -> None:
    stop = Stop(id=RequestId("a"), timeout_s=2.0)
    assert repr(stop) == "Stop(id='a', now=False, timeout_s=2.0, v=2)"
    assert stop == ANY
    assert stop != Ping(id=RequestId("a"))


def test_an_empty_body_travels_as_a_frame_and_no_body_as_none() -> None:
    assert encode(Ping(id=RequestId("a"))) == [msgpack.packb(PING)]
    frames = encode(Generate(id=RequestId("a"), model=ModelName("m"), body=b""))
    assert [len(frames), frames[1]] == [2, b""]
    resumed = encode(Dispatch(key=RequestKey(1)))
    assert Decoder(SUPERVISOR_TO_WORKER, is_strict=False).decode(resumed) == Dispatch(
        key=RequestKey(1)
    )


def test_what_cannot_travel_is_the_callers_error() -> None:
    deep: list[Any] = []
    for _ in range(2000):
        deep = [deep]
    for value in (deep, {1, 2}, 2**70):
        with pytest.raises(RemoteError, match=r"^the request cannot be encoded: ") as caught:
            encode_body(body(prompt=None, messages=[{"role": "user", "content": value}]))
        assert caught.value.code is ErrorCode.INVALID_REQUEST


def test_a_body_that_is_no_msgpack_is_refused_as_a_request() -> None:
    for frame in (b"\xc1", msgpack.packb({1: 2}), msgpack.packb(msgpack.ExtType(1, b"x"))):
        with pytest.raises(RemoteError, match=r"^the body is not msgpack within the limits: "):
            decode_body(frame)


def test_nested_parts_leave_out_their_defaults_too() -> None:
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


# ---------------------------------------------------------------- words and errors

WORDS = [one for one in vars(states).values() if isinstance(one, type) and issubclass(one, Enum)]


@pytest.mark.parametrize("words", [one for one in WORDS if list(one)], ids=lambda one: one.__name__)
def test_a_word_travels_as_it_is_named(words: type[Enum]) -> None:
    for member in words:
        name = member.name if words is states.State else member.name.lower()
        assert member.value == name


def test_error_codes_travel_as_they_are_named() -> None:
    assert [code.value for code in ErrorCode] == [code.name.lower() for code in ErrorCode]


def test_the_sets_of_states_are_those_of_the_architecture() -> None:
    state = states.State
    assert {*state} - states.HAS_PROCESS == {
        state.STOPPED, state.PENDING, state.BACKOFF, state.FAILED,
    }  # fmt: skip
    assert {state.READY, state.DRAINING} == states.SERVES


def test_an_error_travels_with_all_that_it_says() -> None:
    error = RemoteError(ErrorCode.OVERLOADED, "full", detail={"running": 4})
    again = RemoteError.from_wire(error.to_wire())
    assert (again, hash(again), str(again)) == (error, hash(error), "full")
    assert (again.code, again.retryable, again.detail) == ("overloaded", True, {"running": 4})
    assert repr(error) == "RemoteError(overloaded, 'full', detail={'running': 4})"
    assert error.to_wire() == {
        "code": "overloaded", "message": "full", "retryable": True, "detail": {"running": 4},
    }  # fmt: skip
    for other in (
        RemoteError(ErrorCode.INTERNAL, "full", retryable=True, detail={"running": 4}),
        RemoteError(ErrorCode.OVERLOADED, "empty", detail={"running": 4}),
        RemoteError(ErrorCode.OVERLOADED, "full", retryable=False, detail={"running": 4}),
        RemoteError(ErrorCode.OVERLOADED, "full"),
        "full",
    ):
        assert error != other
    assert {code for code in ErrorCode if RemoteError(code, "x").retryable} == RETRYABLE


@pytest.mark.parametrize(
    "wrong",
    [
        {"code": "unheard of"}, {"code": 5}, {"message": None}, {"retryable": 1}, {"detail": []},
    ],
)  # fmt: skip
def test_what_is_no_error_is_not_read_as_one(wrong: dict[str, Any]) -> None:
    wire = {"code": "internal", "message": "m", "retryable": False}
    assert RemoteError.from_wire(wire).detail == {}
    with pytest.raises(
        ValueError, match=r"^an error needs a known code, a message, retryable and a detail map$"
    ):
        RemoteError.from_wire(wire | wrong)
    with pytest.raises(ValueError, match="a known code"):
        RemoteError.from_wire([])


def test_tokens_travel_alike_from_a_machine_that_has_the_large_end_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "byteorder", "little")
    native = pack_tokens([1, 2**32 - 2])
    monkeypatch.setattr(sys, "byteorder", "big")
    swapped = pack_tokens([1, 2**32 - 2])
    assert swapped == native[3::-1] + native[:3:-1]
    assert unpack_tokens(swapped) == [1, 2**32 - 2]


# ---------------------------------------------------------------- the launch

SPEC = LaunchSpec(
    model=ModelName("m"),
    generation=Generation(1),
    token="t",
    endpoint="ipc:///x",
    supervisor_pid=1,
    engine="fake",
    path="/x",
    max_concurrency=4,
    step_timeout_s=30.0,
    decode_stall_target_ms=250,
)


def test_a_launch_that_says_no_more_changes_nothing() -> None:
    least = LaunchSpec(
        model=ModelName("m"), generation=Generation(1), token="", endpoint="", supervisor_pid=1
    )
    said = {field.name: getattr(least, field.name) for field in dataclasses.fields(least)[:13]}
    said |= {"known_batching": least.known_batching, "learned_dir": least.learned_dir}
    said |= {"log_level": least.log_level}
    assert said == {
        "path": "", "engine": "mlx", "max_concurrency": 8, "step_timeout_s": 30.0,
        "decode_stall_target_ms": 250, "context_length": 0, "deterministic": False,
        "memory_limit_bytes": None, "cache_limit_bytes": None, "wired_limit_bytes": 0,
        "prefix_cache_bytes": None, "sampling": sampling_defaults(), "fake": {},
        "known_batching": None, "learned_dir": None, "log_level": "info",
    }  # fmt: skip


def test_a_launch_is_a_models_settings_and_what_is_said_of_one_life() -> None:
    settings = {f.name: getattr(SPEC, f.name) for f in dataclasses.fields(LaunchSettings)}
    others = {
        f.name: getattr(SPEC, f.name) for f in dataclasses.fields(SPEC) if f.name not in settings
    }
    assert LaunchSpec.of(LaunchSettings(**settings), **others) == SPEC


def test_a_launch_is_one_line_that_is_read_as_it_was_written() -> None:
    line = SPEC.to_line()
    assert line.count(b"\n") == 1
    assert LaunchSpec.from_line(line) == SPEC
    assert MAX_LAUNCH_SPEC_BYTES == 65536, "as the message says"
    at_most = dataclasses.replace(SPEC, token="t" * (MAX_LAUNCH_SPEC_BYTES - len(line) + 1))
    assert LaunchSpec.from_line(at_most.to_line()) == at_most
    for wrong in (line[:-1], dataclasses.replace(at_most, path="/xx").to_line()):
        with pytest.raises(
            ValueError, match=r"^a launch spec is one line of JSON of at most 64 KiB$"
        ):
            LaunchSpec.from_line(wrong)
    for keys in (b"[]\n", b"{}\n", line.replace(b'"token"', b'"tokens"')):
        with pytest.raises(ValueError, match=r"^a launch spec has exactly the keys cache_limit"):
            LaunchSpec.from_line(keys)
    with pytest.raises(ValueError, match=r"^a launch spec is nested less deeply$"):
        LaunchSpec.from_line(b"[" * (MAX_LAUNCH_SPEC_BYTES - 1) + b"\n")


def test_a_worker_is_started_without_the_working_folder_in_its_path() -> None:
    assert worker_argv("/bin/python") == ["/bin/python", "-P", "-m", "mlxsup.worker"]


def test_which_exits_cannot_heal() -> None:
    assert {int(code) for code in PERMANENT_EXITS} == {64, 65, 66, 69}
    assert {code.name: int(code) for code in ExitCode if code not in PERMANENT_EXITS} == {
        "ASKED": 0, "STEP_ERROR": 70, "WORKER_FAULT": 71, "GPU_FAULT_ELSEWHERE": 72,
        "STUCK_PROMPT": 73, "OUT_OF_MEMORY": 75, "LINK_BROKEN": 76,
    }  # fmt: skip


def test_the_version_is_three_numbers() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", VERSION)
