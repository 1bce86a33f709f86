"""docs/protocol.md: its client runs against a real daemon, its tables are those of the code."""

from __future__ import annotations

import dataclasses
import re
import struct
import subprocess
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import msgpack
import pytest

from mlxsup.protocol import client_messages, codec, worker_messages
from mlxsup.protocol.body import MAX_STOP_LENGTH, MAX_STOP_STRINGS, RequestBody
from mlxsup.protocol.delta_body import DeltaBody
from mlxsup.protocol.errors import RETRYABLE, ErrorCode
from mlxsup.protocol.ids import pack_tokens, unpack_tokens
from mlxsup.protocol.launch import LaunchSpec
from mlxsup.protocol.message import Message
from mlxsup.protocol.packed_rows import PackedRow, Row
from mlxsup.protocol.parameters import SAMPLING, Sampling
from mlxsup.protocol.states import (
    Batching,
    Channel,
    FinishReason,
    LoadPhase,
    NoticeKind,
    PauseReason,
    Priority,
    RowState,
    WaitReason,
    WorkerPhase,
)
from mlxsup.protocol.version import PROTOCOL_VERSION
from mlxsup.supervisor.sockets import clients
from mlxsup.supervisor.sockets import limits as limits_of_connections
from mlxsup.worker.engines.fake.text import answer_tokens, decode_tokens, encode_text

from support.daemon import Daemon, fake
from support.documents import rows_of, section
from support.raw_client import RawClient

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"
TEXT = DOCUMENT.read_text()
PROMPT = "the raw client's prompt"

# ---------------------------------------------------------------- the client


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The document's client, as a file."""
    (code,) = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    path = tmp_path_factory.mktemp("client") / "raw.py"
    path.write_text(code)
    return path


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    cold = fake(preload=False, fake={"load_s": 0.2, "prefill_tokens_per_step": 8})
    with Daemon({"m": fake(), "cold": cold}) as running:
        with running.client() as client:
            client.load("m")
        yield running


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # -P -I: nothing of this checkout is on the path, and nothing of mlxsup is needed.
    return subprocess.run(
        [sys.executable, "-I", str(program), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_client_has_fewer_than_40_lines_and_needs_nothing_of_ours(program: Path) -> None:
    lines = program.read_text().splitlines()
    assert len(lines) < 40
    imports = {line.split()[1] for line in lines if line.startswith(("import ", "from "))}
    assert imports == {"sys", "msgpack", "zmq"}


def test_the_client_streams_an_answer(daemon: Daemon, program: Path) -> None:
    said = run(program, daemon.endpoint, "m", PROMPT)
    expected = decode_tokens(answer_tokens(encode_text(PROMPT), 32))
    assert said.returncode == 0, said.stderr
    assert said.stdout == f"{expected}\n[length, 32 pieces]\n"
    assert said.stderr == ""


def test_the_client_shows_an_error(daemon: Daemon, program: Path) -> None:
    said = run(program, daemon.endpoint, "nobody", PROMPT)
    assert said.returncode == 1
    assert said.stderr == "unknown_model: no model is called 'nobody'; configured: cold, m\n"


def test_the_client_notices_that_there_is_no_daemon(program: Path, tmp_path: Path) -> None:
    said = run(program, f"ipc://{tmp_path}/none.sock", "m", PROMPT)
    assert (said.returncode, said.stderr) == (1, "no daemon answers\n")


# ---------------------------------------------------------------- the conversation


def say(raw: RawClient, kind: str, body: dict[str, Any] | None = None, **values: Any) -> None:
    frames = [msgpack.packb({"type": kind, **values})]
    raw.say(frames if body is None else [*frames, msgpack.packb(body)])


ENDLESS = {"prompt": "[[fault slow=0.01]]"}


def test_commands_get_one_reply_and_cancels_none(daemon: Daemon) -> None:
    with RawClient(daemon.endpoint) as raw:
        say(raw, "cancel", id="nobody")
        say(raw, "ping", id="p")
        assert raw.hear() == {"type": "reply", "id": "p", "value": {}}
        say(raw, "status", id="s")
        assert "flight" not in raw.hear()["value"]
        say(raw, "status", id="s", debug=True)
        assert {one["model"] for one in raw.hear()["value"]["flight"]} == {"m"}


def test_signs_of_life_then_a_cancel_then_the_id_again_D7(daemon: Daemon) -> None:
    with RawClient(daemon.endpoint) as raw:
        say(raw, "generate", ENDLESS, id="x", model="m")
        seen: set[str] = set()
        while seen != {"deltas", "alive"}:
            seen.add(raw.hear_any()["type"])
        say(raw, "cancel", id="x")
        done = raw.hear()
        assert (done["type"], done["id"], done["finish_reason"]) == ("done", "x", "cancelled")
        assert set(done) <= {"type", *codec_fields(client_messages.Done)}
        say(raw, "generate", {"prompt": "hi", "max_tokens": 2}, id="x", model="m")
        pieces = []
        while (message := raw.hear_any())["type"] != "done":
            pieces += message.get("deltas", [])
        assert [piece["seq"] for piece in pieces] == [0, 1]
        assert message["seq"] == 2
        packed = b"".join(piece["tokens"] for piece in pieces)
        tokens = list(struct.unpack(f"<{len(packed) // 4}I", packed))
        assert tokens == answer_tokens(encode_text("hi"), 2)


def codec_fields(cls: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def test_events_until_a_cancel_and_notices_until_the_answer(daemon: Daemon) -> None:
    with RawClient(daemon.endpoint) as watching, RawClient(daemon.endpoint) as raw:
        say(watching, "subscribe", id="first")
        say(watching, "subscribe", id="second")
        superseded = watching.hear_error()
        assert (superseded["id"], superseded["error"]["code"]) == ("first", "superseded")
        say(watching, "ping", id="p")
        assert watching.hear()["id"] == "p", "a subscription is not confirmed"
        body = {"prompt": "twenty tokens of one", "max_tokens": 1}
        say(raw, "generate", body, id="x", model="cold", notices=True)
        kinds = []
        while (message := raw.hear())["type"] == "notice":
            kinds.append(message["kind"])
        assert message["type"] == "done"
        assert list(dict.fromkeys(kinds)) == ["queued", "loading", "prefilling"]
        states = []
        while "READY" not in states:
            event = watching.hear()
            assert (event["type"], event["id"]) == ("event", "second")
            assert set(event["value"]) == set(re.findall(r"`(\w+)`", event_meaning()))
            states.append(event["value"]["to"])
        assert list(dict.fromkeys(states)) == ["PENDING", "LOADING", "READY"]
        say(watching, "cancel", id="second")
        say(watching, "ping", id="heard")
        assert watching.hear()["id"] == "heard"
        say(raw, "unload", id="u", model="cold")
        assert raw.hear()["type"] == "reply"
        say(watching, "ping", id="p")
        assert watching.hear()["id"] == "p", "it was cancelled"


def event_meaning() -> str:
    return next(row[3] for row in rows_of(section(TEXT, "`event`")) if row[0] == "`value`")


# ---------------------------------------------------------------- the tables

ENUMERATIONS: tuple[type[Enum], ...] = (
    Channel,
    FinishReason,
    NoticeKind,
    PauseReason,
    Priority,
    RowState,
    WaitReason,
    LoadPhase,
    WorkerPhase,
    Batching,
)

NESTED = (
    client_messages.ClientDelta,
    DeltaBody,
    client_messages.Usage,
    client_messages.Timings,
    worker_messages.Acceptance,
    PackedRow,
    worker_messages.PrefillProgress,
)

PLAIN = {str: "text", bytes: "bytes", int: "integer", float: "number", bool: "boolean"}
TRAVELS_AS = {Row: PackedRow}


def type_words(hint: Any) -> str:
    """A field's type, as the document calls it."""
    if isinstance(hint, typing.NewType):
        return type_words(hint.__supertype__)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        (inner,) = [argument for argument in arguments if argument is not type(None)]
        return f"{type_words(inner)} or nil"
    if origin in (list, Sequence):
        return f"list of {type_words(TRAVELS_AS.get(arguments[0], arguments[0]))}"
    if origin is dict:
        return "map"
    return PLAIN.get(hint) or str(hint.__name__)


def default_words(field: dataclasses.Field[Any]) -> str:
    """A field's default, as the document shows it."""
    if field.default_factory is not dataclasses.MISSING:
        return "empty"
    value = field.default
    if value is dataclasses.MISSING:
        return ""
    words = {None: "nil", True: "true", False: "false", "": '""', b"": "empty"}
    if value is None or isinstance(value, bool | bytes) or value == "":
        return words[value]
    return str(value.value if isinstance(value, Enum) else value)


def expected_rows(cls: type[Any], *, with_body: bool) -> list[list[str]]:
    hints = typing.get_type_hints(cls)
    return [
        [f"`{field.name}`", type_words(hints[field.name]), default_words(field)]
        for field in dataclasses.fields(cls)
        if with_body or field.name != "body"
    ]


MESSAGES = (
    *client_messages.CLIENT_MESSAGES,
    *client_messages.SUPERVISOR_TO_CLIENT,
    *worker_messages.SUPERVISOR_TO_WORKER,
    *worker_messages.WORKER_TO_SUPERVISOR,
)


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.TYPE)
def test_every_message_has_its_fields_types_and_defaults(cls: type[Message]) -> None:
    rows = rows_of(section(TEXT, f"`{cls.TYPE}`"))
    # The body is the second frame, which the text around the table says.
    assert [row[:3] for row in rows] == expected_rows(cls, with_body=False)


@pytest.mark.parametrize("cls", NESTED, ids=lambda cls: cls.__name__)
def test_every_part_of_a_message_has_its_fields(cls: type[Any]) -> None:
    rows = rows_of(section(TEXT, cls.__name__))
    assert [row[:3] for row in rows] == expected_rows(cls, with_body=True)


def test_the_body_has_its_parameters() -> None:
    rows = rows_of(section(TEXT, "The body"))
    expected = expected_rows(RequestBody, with_body=True)
    place = [row[0] for row in expected].index("`sampling`")
    hints = typing.get_type_hints(Sampling)
    # On the wire they are among the others.
    expected[place : place + 1] = [
        [f"`{name}`", f"{type_words(hints[name])} or nil", "nil"] for name in SAMPLING
    ]
    assert [row[:3] for row in rows] == expected
    assert f"up to {MAX_STOP_STRINGS} texts of up to {MAX_STOP_LENGTH} characters" in TEXT


def test_every_message_stands_under_its_direction_and_no_other_does() -> None:
    chapters = (
        ("## From client to daemon", "###", client_messages.CLIENT_MESSAGES),
        ("## From daemon to client", "###", client_messages.SUPERVISOR_TO_CLIENT),
        ("### From supervisor to worker", "####", worker_messages.SUPERVISOR_TO_WORKER),
        ("### From worker to supervisor", "####", worker_messages.WORKER_TO_SUPERVISOR),
    )
    for title, level, classes in chapters:
        chapter = section(TEXT, title.lstrip("# "))
        found = re.findall(rf"^{level} `(\w+)`$", chapter, re.MULTILINE)
        assert found == [cls.TYPE for cls in classes], title


def test_enumerations_errors_and_launch_keys_are_those_of_the_code() -> None:
    words = {row[0]: row[1] for row in rows_of(section(TEXT, "Words"))}
    assert words == {
        enum.__name__: ", ".join(f"`{member.value}`" for member in enum) for enum in ENUMERATIONS
    }
    rows = rows_of(section(TEXT, "Errors"))
    assert [row[0] for row in rows] == [f"`{code.value}`" for code in ErrorCode]
    for code, retryable, *_ in rows:
        expected = "yes" if ErrorCode(code.strip("`")) in RETRYABLE else "no"
        assert retryable == expected or (code, retryable) == ("`load_failed`", "if a crash")
    hints = typing.get_type_hints(LaunchSpec)
    assert [row[:2] for row in rows_of(section(TEXT, "The launch spec"))] == [
        [f"`{field.name}`", type_words(hints[field.name])]
        for field in dataclasses.fields(LaunchSpec)
    ]


def refusal(value: object) -> str:
    """Why a header with this value somewhere is no message."""
    decoder = codec.Decoder((client_messages.Ping,), is_strict=True)
    with pytest.raises(codec.DecodeError) as caught:
        decoder.decode([msgpack.packb({"type": "ping", "id": "p", "more": value})])
    return caught.value.message


def test_the_limits_are_those_of_the_code() -> None:
    limits = [int(row[1]) for row in rows_of(section(TEXT, "Limits"))]
    items, entries, characters = limits[1:4]
    for whole, larger in (
        ([0] * items, [0] * (items + 1)),
        (dict.fromkeys(map(str, range(entries))), dict.fromkeys(map(str, range(entries + 1)))),
        ("x" * characters, "x" * (characters + 1)),
    ):
        assert "within the limits" not in refusal(whole)
        assert "within the limits" in refusal(larger)
    assert limits == [
        codec.MAX_HEADER_BYTES,
        *limits[1:4],
        codec.MAX_ID_CHARACTERS,
        codec.MAX_BODY_BYTES,
        codec.MAX_FRAME_BYTES,
        limits_of_connections.MAX_CONNECTIONS,
        limits_of_connections.MAX_OF_ONE_PROCESS,
        clients.MAX_OPEN_PER_CONNECTION,
        clients.MAX_UNSENT_BYTES,
        clients.MAX_UNSENT_IN_ALL_BYTES,
        int(clients.MAX_UNSENT_S),
    ]
    assert f"**version {PROTOCOL_VERSION}**" in TEXT


def test_tokens_are_packed_as_the_document_says() -> None:
    tokens = [0, 1, 2**32 - 1, 70000]
    packed = pack_tokens(tokens)
    assert list(struct.unpack(f"<{len(packed) // 4}I", packed)) == tokens == unpack_tokens(packed)
