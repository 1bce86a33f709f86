"""Every kind of bad input gets its typed error, and a stream beside it does not change.

The cases are data, in tests/support/bad_*.py.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import random
import socket as sockets
import subprocess
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from mlxsup.client import Client, RequestError
from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.client_messages import CLIENT_MESSAGES, Cancel, Subscribe
from mlxsup.protocol.codec import MAX_FRAME_BYTES, DecodeError, Decoder, encode
from mlxsup.protocol.parameters import SAMPLING

from support import warm
from support.bad_bodies import BODIES, CLIENT_ONLY
from support.bad_commands import COMMANDS, BadCommand
from support.bad_input import (
    FRAMES,
    HEADERS,
    HELLO_BODY,
    REQUESTS,
    SMALL,
    SMALL_CONTEXT,
    BadBody,
    BadInput,
    Frames,
    generate,
    header,
    pack,
)
from support.bad_input_daemon import large_and_small, undisturbed
from support.daemon import Daemon, row
from support.raw_client import RawClient
from support.streams import Reader

RAW: dict[str, tuple[BadInput, ...]] = {
    "Frames": FRAMES,
    "Headers": HEADERS,
    "Requests and commands": REQUESTS,
    "Bodies": tuple(case.as_input() for case in BODIES),
}
"""All that is sent through a raw socket, by heading."""


ENDS = ("done", "failed", "reply")
GARBAGE_MESSAGES = 2000
GARBAGE_SEED = 20261121
WINDOW = 32


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with large_and_small(Daemon) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def live(daemon: Daemon) -> Iterator[Reader]:
    """A stream beside all of these tests; in the end nothing of it may have changed."""
    with undisturbed(daemon) as reader:
        yield reader


@pytest.fixture(autouse=True)
def live_goes_on(live: Reader) -> Iterator[None]:
    yield
    assert live.error is None


RAW_CASES = [
    pytest.param(case, id=f"{title}: {case.name}") for title, cases in RAW.items() for case in cases
]


@pytest.mark.parametrize("case", RAW_CASES)
def test_bad_message_gets_its_error_C7_D7_G6_H10(daemon: Daemon, case: BadInput) -> None:
    with RawClient(daemon.endpoint) as raw:
        for frames in case.sends:
            raw.say(frames)
        answer = raw.hear_error()
        error = answer["error"]
        assert (answer["id"], error["code"], error["retryable"]) == (case.id, case.code, False)
        assert case.words in error["message"]
        # The same connection is as good as before, and nothing else is on its way.
        raw.say([header("ping", id="after")])
        reply = raw.hear()
        assert (reply["type"], reply["id"]) == ("reply", "after")


CLIENT_PARAMETERS = set(inspect.signature(Client.generate).parameters)

CLIENT_CASES = [
    pytest.param(case, id=case.name)
    for case in (*BODIES, *CLIENT_ONLY)
    if isinstance(case.body, dict) and case.body.keys() <= CLIENT_PARAMETERS - {"model"}
]


@pytest.mark.parametrize("case", CLIENT_CASES)
def test_client_raises_the_same_error_C7(daemon: Daemon, case: BadBody) -> None:
    def read_all(client: Client) -> None:
        assert isinstance(case.body, dict)
        stream = client.generate(case.model, **case.body)
        assert not case.is_known_to_client, "it was sent"
        for _ in stream:
            pass

    with daemon.client() as client:
        with pytest.raises(RequestError) as caught:
            read_all(client)
        assert client.status()["queue"]["waiting"] == 0, "the client continues"
    assert caught.value.code == case.code
    assert case.words in caught.value.message


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=ascii(" ".join(case.arguments)[:60])) for case in COMMANDS]
)
def test_command_says_one_sentence(daemon: Daemon, case: BadCommand) -> None:
    target = ("--endpoint", daemon.endpoint) if len(case.arguments) > 1 else ()

    def say(*more: str) -> subprocess.CompletedProcess[bytes]:
        command = Daemon.command(*case.arguments, *target, *more)
        return warm.run(command, stdin=case.standard_input, timeout_s=60.0)

    said = say()
    assert (said.returncode, said.stdout) == (case.status, b""), said.stderr
    assert case.words in said.stderr.decode()
    assert b"Traceback" not in said.stderr
    if target:
        as_json = say("--json")
        assert (as_json.returncode, as_json.stderr) == (case.status, b"")
        error = json.loads(as_json.stdout)["error"]
        assert case.words in f"{error['message']} {error['hint']}"


def test_prompt_over_the_context_reaches_no_engine_I6(daemon: Daemon) -> None:
    with daemon.client() as client:
        steps = row(client, SMALL)["steps"]
        for body in (
            {"prompt": "y" * SMALL_CONTEXT},
            {"prompt": "y" * 1_000_000},
            {"prompt": "y", "max_tokens": SMALL_CONTEXT},
        ):
            with pytest.raises(RequestError) as caught:
                client.complete(SMALL, **body)
            assert caught.value.code == "context_length_exceeded"
            assert caught.value.detail["context_length"] == SMALL_CONTEXT
        assert row(client, SMALL)["steps"] == steps, "nothing reached the engine"


def test_frame_over_16_MiB_ends_its_connection(daemon: Daemon) -> None:
    with RawClient(daemon.endpoint) as raw:
        raw.say([header("ping", id="first")])
        assert raw.hear()["id"] == "first"
        raw.say(generate(bytes(MAX_FRAME_BYTES + 1)))
        assert raw.monitor.poll(30_000), "the connection was not closed"


def raw_bytes(daemon: Daemon, sent: bytes, *, is_ended: bool) -> bytes:
    """Sends bytes below ZeroMQ; returns what comes back until the daemon closes."""
    received = b""
    with sockets.socket(sockets.AF_UNIX) as raw:
        raw.settimeout(60)
        raw.connect(daemon.endpoint.removeprefix("ipc://"))
        try:
            raw.sendall(sent)
            if is_ended:
                raw.shutdown(sockets.SHUT_WR)
            while piece := raw.recv(4096):
                received += piece
        except ConnectionError:
            pass  # it was closed before everything was sent
    return received


def test_bytes_that_are_not_zeromq_are_no_messages(daemon: Daemon) -> None:
    draw = random.Random(GARBAGE_SEED)
    for sent in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", *(draw.randbytes(200) for _ in range(20))):
        # The first protocol of ZeroMQ had no greeting, so a part of this may be read as frames.
        received = raw_bytes(daemon, sent, is_ended=True)
        assert not any(kind in received for kind in (b"reply", b"done", b"deltas", b"event"))


def test_connection_that_never_greets_is_closed(daemon: Daemon) -> None:
    assert b"type" not in raw_bytes(daemon, b"", is_ended=False)


# ---------------------------------------------------------------- 2,000 garbage messages

_SEEDS: tuple[Frames, ...] = (
    generate(HELLO_BODY, id="g", client="garbage"),
    generate(HELLO_BODY, id="g", model="nobody", timeout_s=5.0),
    [header("cancel", id="c")],
    [header("ping", id="p")],
    [header("status", id="s")],
    [header("load", id="l", model="nobody")],
    [header("restart", id="r", model="nobody", now=True)],
)
"""What is mutated: nothing that a few changed bits could turn into harm that was asked for."""


def _value(draw: random.Random, depth: int = 0) -> Any:
    kinds: list[Any] = [
        None, True, -1, 2**63, 1.5, float("nan"), float("-inf"), "", "k", "x" * 200, b"\x00", "é\0",
    ]  # fmt: skip
    pick = draw.randrange(len(kinds) + (2 if depth < 4 else 0))
    if pick < len(kinds):
        return kinds[pick]
    items = [_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    return items if pick == len(kinds) else {f"k{n}": item for n, item in enumerate(items)}


def _mutated(draw: random.Random) -> Frames:
    frames = [bytearray(frame) for frame in draw.choice(_SEEDS)]
    for _ in range(draw.randrange(1, 4)):
        frame = draw.choice(frames)
        match draw.randrange(5):
            case 0 if frame:
                frame[draw.randrange(len(frame))] ^= 1 << draw.randrange(8)
            case 1:
                del frame[draw.randrange(len(frame) + 1) :]
            case 2:
                frame += draw.randbytes(draw.randrange(1, 20))
            case 3:
                position = draw.randrange(len(frame) + 1)
                frame[position:position] = draw.randbytes(draw.randrange(1, 4))
            case _:
                frames.append(bytearray(draw.randbytes(draw.randrange(8))))
    return [bytes(frame) for frame in frames]


def _with_wrong_values(draw: random.Random) -> Frames:
    frames = list(draw.choice(_SEEDS))
    values = msgpack.unpackb(frames[0])
    name = draw.choice([*values, "v", "timeout_s", "body", "path", "colour"])
    values[name] = _value(draw)
    frames[0] = pack(values)
    return frames


def _with_wrong_body(draw: random.Random) -> Frames:
    names = [*RequestBody.__dataclass_fields__, "path", "colour"]
    body = {draw.choice(names): _value(draw) for _ in range(draw.randrange(1, 4))}
    # Long enough to be wrong in every way, short enough to be done where it is right.
    if body.get("max_tokens") is None:
        body["max_tokens"] = 1
    return generate(pack(body), id=f"b{draw.randrange(10**9)}")


def garbage(draw: random.Random) -> Frames:
    """One message: random bytes, a mutated one, or one with values that do not belong."""
    match draw.randrange(4):
        case 0:
            return [draw.randbytes(draw.randrange(120)) for _ in range(draw.randrange(1, 5))]
        case 1:
            return _mutated(draw)
        case 2:
            return _with_wrong_values(draw)
        case _:
            return _with_wrong_body(draw)


def test_garbage_messages_get_one_answer_each(
    daemon: Daemon,
) -> None:
    draw = random.Random(GARBAGE_SEED)
    decoder = Decoder(CLIENT_MESSAGES, is_strict=True)
    owed = answered = 0
    codes: dict[str, int] = {}

    def take(raw: RawClient) -> int:
        message = raw.hear()
        assert message["type"] in (*ENDS, "notice", "event"), message
        if message["type"] == "failed":
            code = message["error"]["code"]
            codes[code] = codes.get(code, 0) + 1
        return int(message["type"] in ENDS)

    with RawClient(daemon.endpoint) as raw:
        for _ in range(GARBAGE_MESSAGES):
            frames = garbage(draw)
            try:
                message = decoder.decode(frames)
                owed += not isinstance(message, Cancel | Subscribe)
            except DecodeError:
                owed += 1
            raw.say(frames)
            while owed - answered >= WINDOW:
                answered += take(raw)
        # What runs by now ends by itself or with this; each gets its one end in either case.
        raw.say([header("status", id="last")])
        owed += 1
        while answered < owed:
            answered += take(raw)
        raw.say([header("ping", id="end")])
        assert raw.hear()["id"] == "end", "an answer too many"
    assert owed > GARBAGE_MESSAGES * 0.9
    assert codes["invalid_request"] > GARBAGE_MESSAGES * 0.6
    assert "internal" not in codes
    assert "worker_crashed" not in codes


def test_seeds_of_the_garbage_are_messages() -> None:
    """The seeds of the mutations are messages: else they would prove nothing."""
    decoder = Decoder(CLIENT_MESSAGES, is_strict=True)
    for frames in _SEEDS:
        encode(decoder.decode(frames))


def test_every_parameter_and_field_has_a_case() -> None:
    names = " ".join(case.name for case in BODIES)
    for parameter in {*RequestBody.__dataclass_fields__, *SAMPLING} - {"sampling"}:
        assert f"`{parameter}`" in names, f"no bad body for {parameter}"
    names = " ".join(case.name for case in RAW["Headers"])
    for cls in CLIENT_MESSAGES:
        for field in (f.name for f in dataclasses.fields(cls)):
            assert field in ("id", "v", "body") or f"`{cls.TYPE}` with `{field}`" in names
