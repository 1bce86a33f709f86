"""docs/protocol.md: its client runs against a real daemon, its tables are those of the code."""

from __future__ import annotations

import dataclasses
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import msgpack
import pytest

from mlxsup.protocol import client_messages, codec
from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.delta import DeltaBody
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.ids import MAX_ID_CHARACTERS
from mlxsup.protocol.parameters import SAMPLING
from mlxsup.protocol.states import (
    Batching,
    Channel,
    FinishReason,
    LoadPhase,
    NoticeKind,
    PauseReason,
    Priority,
    WaitReason,
)
from mlxsup.protocol.tasks import Task
from mlxsup.protocol.version import PROTOCOL_VERSION
from mlxsup.supervisor.sockets import clients, limits
from mlxsup.worker.engines.fake.text import answer_tokens, decode_tokens, encode_text

from support.client.raw_client import RawClient
from support.daemon.daemon import Daemon, fake

TEXT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
PROMPT = "the raw client's prompt"


def section(title: str) -> str:
    """Return what stands under a heading of the document, up to the next heading."""
    (found,) = re.findall(rf"^#+ {title}\n(.*?)(?=^#|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    return str(found)


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


def test_client_of_the_document_streams_an_answer_or_says_what_is_wrong(
    daemon: Daemon, program: Path, tmp_path: Path
) -> None:
    lines = program.read_text().splitlines()
    assert len(lines) < 40
    imports = {line.split()[1] for line in lines if line.startswith(("import ", "from "))}
    assert imports == {"sys", "msgpack", "zmq"}
    expected = decode_tokens(answer_tokens(encode_text(PROMPT), 32))
    unknown = "unknown_model: there is no model 'nobody'; configured: cold, m\n"
    for endpoint, model, said in (
        (daemon.endpoint, "m", (0, f"{expected}\n[length, 32 pieces]\n", "")),
        (daemon.endpoint, "nobody", (1, "", unknown)),
        (f"ipc://{tmp_path}/none.sock", "m", (1, "", "no daemon answers\n")),
    ):
        # -I: nothing of this checkout is on the path, and nothing of mlxsup is needed.
        command = [sys.executable, "-I", str(program), endpoint, model, PROMPT]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout, done.stderr) == said


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
        assert set(done) <= {"type", *fields_of(client_messages.Done), *OF_ALL}
        say(raw, "generate", {"prompt": "hi", "max_tokens": 2}, id="x", model="m")
        pieces = []
        while (message := raw.hear_any())["type"] != "done":
            pieces += message.get("deltas", [])
        assert [piece["seq"] for piece in pieces] == [0, 1]
        assert message["seq"] == 2
        packed = b"".join(piece["tokens"] for piece in pieces)
        tokens = list(struct.unpack(f"<{len(packed) // 4}I", packed))
        assert tokens == answer_tokens(encode_text("hi"), 2)


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
            assert set(event["value"]) == set(names_in(row_of("event")[2]))
            states.append(event["value"]["to"])
        assert list(dict.fromkeys(states)) == ["PENDING", "LOADING", "READY"]
        say(watching, "cancel", id="second")
        say(watching, "ping", id="heard")
        assert watching.hear()["id"] == "heard"
        say(raw, "unload", id="u", model="cold")
        assert raw.hear()["type"] == "reply"
        say(watching, "ping", id="p")
        assert watching.hear()["id"] == "p", "it was cancelled"


# ---------------------------------------------------------------- the tables

ENUMERATIONS: tuple[type[Enum], ...] = (
    Channel,
    FinishReason,
    PauseReason,
    Priority,
    WaitReason,
    LoadPhase,
    Batching,
    Task,
)

MESSAGES = (
    *client_messages.CLIENT_MESSAGES,
    *client_messages.SUPERVISOR_TO_CLIENT,
)

STRUCTURES: tuple[type[Any], ...] = (
    client_messages.ClientDelta,
    DeltaBody,
    client_messages.Usage,
    client_messages.Timings,
)

OF_ALL = {"id", "v", "body"}
"""Fields that the text describes once: the name, the version and the second frame."""

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if line.startswith("| ")
]


def names_in(cell: str) -> list[str]:
    """The names in a cell, without remarks in brackets."""
    return re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", cell))


def row_of(kind: str) -> list[str]:
    """The row of a type of message."""
    [row] = [row for row in ROWS if len(row) == 3 and kind in names_in(row[0])]
    return row


def fields_of(cls: type[Any]) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)} - OF_ALL


def test_each_message_and_structure_has_a_row_with_its_fields() -> None:
    for cls in MESSAGES:
        row = row_of(cls.TYPE)
        named = set(names_in(row[1]))
        assert fields_of(cls) - named == set(), cls
        if row[0] == f"`{cls.TYPE}`":
            assert named - fields_of(cls) - OF_ALL == set(), cls
    for structure in STRUCTURES:
        [row] = [row for row in ROWS if row[0] == structure.__name__]
        assert set(names_in(row[1])) == {field.name for field in dataclasses.fields(structure)}


def test_words_and_names_are_those_of_the_code() -> None:
    named = set(names_in(section("The body")))
    parameters = {field.name for field in dataclasses.fields(RequestBody)} - {"sampling"}
    assert named >= parameters | set(SAMPLING)
    for kind in ENUMERATIONS:
        [row] = [row for row in ROWS if row[0] == kind.__name__]
        assert set(names_in(row[1])) == {str(member.value) for member in kind}, kind
    start = ROWS.index(["notice", "detail"]) + 1
    notices = [row[0].strip("`") for row in ROWS[start : start + len(NoticeKind)]]
    assert notices == [member.value for member in NoticeKind]
    codes = re.findall(r"^\| (`.*?) \|", section("Errors"), re.MULTILINE)
    assert sorted(names_in(" ".join(codes))) == sorted(code.value for code in ErrorCode)


def refusal(value: object) -> str:
    """Why a header with this value somewhere is no message."""
    decoder = codec.Decoder((client_messages.Ping,), is_strict=True)
    with pytest.raises(codec.DecodeError) as caught:
        decoder.decode([msgpack.packb({"type": "ping", "id": "p", "more": value})])
    return caught.value.message


def test_limits_are_those_of_the_code() -> None:
    rows = dict(row for row in ROWS if len(row) == 2)
    shown = {
        name: [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", value)]
        for name, value in rows.items()
    }
    header, items, entries, characters, ids = shown["header"]
    assert (header, ids) == (codec.MAX_HEADER_BYTES, MAX_ID_CHARACTERS)
    for whole, larger in (
        ([0] * items, [0] * (items + 1)),
        (dict.fromkeys(map(str, range(entries))), dict.fromkeys(map(str, range(entries + 1)))),
        ("x" * characters, "x" * (characters + 1)),
    ):
        assert "within the limits" not in refusal(whole)
        assert "within the limits" in refusal(larger)
    assert shown["body; all frames of a message"] == [codec.MAX_BODY_BYTES, codec.MAX_FRAME_BYTES]
    connections = [limits.MAX_CONNECTIONS, limits.MAX_OF_ONE_PROCESS, limits.KEPT_FOR_NEWCOMERS]
    assert shown["connections"] == connections
    per_connection = shown["open requests and commands of one connection"]
    assert per_connection == [clients.MAX_OPEN_PER_CONNECTION]
    assert shown["unread bytes"] == [
        clients.MAX_UNSENT_BYTES, clients.MAX_UNSENT_IN_ALL_BYTES, int(clients.MAX_UNSENT_S),
    ]  # fmt: skip
    assert f"now **{PROTOCOL_VERSION}**" in TEXT
