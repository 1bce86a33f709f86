"""What `generate` sends, and what it shows of an answer and of waiting for it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlxsup.client import Client
from mlxsup.protocol.client_messages import Deltas, Generate, Notice, Ping, StatusQuery
from mlxsup.protocol.codec import decode_body
from mlxsup.protocol.ids import RequestId, pack_tokens
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import Channel, FinishReason, NoticeKind

from support.cli.cli import ESCAPE, Piped, Terminal, command, environment, run_cli
from support.client.pieces import piece
from support.client.scripted_supervisor import (
    Peer,
    Script,
    ScriptedSupervisor,
    answer,
    finish,
    scripted_supervisor,
    send_pieces,
)
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.gateway.pictures import PNG

PROMPT = "What is the capital of France?"
USER = {"role": "user", "content": PROMPT}
SYSTEM = {"role": "system", "content": "Be brief."}
OFF, ON = ({"enable_thinking": thinks, "thinking": thinks} for thinks in (False, True))
FORMAT = {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}


def script_of(
    *models: str,
    texts: tuple[str, ...] = ("Par", "is"),
    reason: FinishReason = FinishReason.STOP,
    channel: Channel = Channel.CONTENT,
    capabilities: Sequence[str] = (),
) -> Script:
    """A daemon with these models, all of which give the same answer."""
    rows = [{"name": name, "aliases": [], "capabilities": [*capabilities]} for name in models]

    def script(peer: Peer, message: Message) -> None:
        if isinstance(message, StatusQuery):
            answer(peer, message, models=rows)
        elif isinstance(message, Generate):
            for seq, text in enumerate(texts):
                tokens = pack_tokens([seq])
                delta = piece(message.id, seq, text, tokens=tokens, channel=channel)
                peer.send(Deltas(deltas=[delta]))
            finish(peer, message.id, len(texts), reason)

    return script


def run(supervisor: ScriptedSupervisor, *arguments: str) -> tuple[int, str, str]:
    done = run_cli("generate", *arguments, "--endpoint", supervisor.endpoint)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("options", "body"),
    [
        ([], {"messages": [USER]}),
        (["--system", "Be brief."], {"messages": [SYSTEM, USER]}),
        (["--raw"], {"prompt": PROMPT}),
        (["--top-k", "5", "--min-p", "0.1"], {"messages": [USER], "top_k": 5, "min_p": 0.1}),
        (["--stop", "a", "--stop", "b"], {"messages": [USER], "stop": ["a", "b"]}),
        (["--no-think"], {"messages": [USER], "chat_template_kwargs": OFF}),
        (["--think"], {"messages": [USER], "chat_template_kwargs": ON}),
        (["--schema", "schema.json"], {"messages": [USER], "response_format": FORMAT}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_prompt_and_options_become_a_body(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    body: dict[str, Any],
) -> None:
    (tmp_path / "schema.json").write_text('{"type": "integer"}')
    monkeypatch.chdir(tmp_path)
    with scripted_supervisor(path, script_of("m")) as supervisor:
        assert run(supervisor, "m", PROMPT, *options) == (0, "Paris\n", "")
        sent = decode_body(supervisor.got(Generate)[-1].body).to_wire()
    assert sent == ({"messages_as_text": True} if "messages" in body else {}) | body


@pytest.mark.parametrize("command", ["generate", "embed"])
def test_options_of_a_request_reach_the_daemon(path: Path, command: str) -> None:
    options = {"--priority": "batch", "--client": "me", "--timeout": "90s", "--keep-alive": "10m"}
    given = [word for option in options.items() for word in option]
    can = ["embeddings" if command == "embed" else "text"]
    with scripted_supervisor(path, script_of("m", capabilities=can)) as supervisor:
        run_cli(command, "m", PROMPT, *given, "--endpoint", supervisor.endpoint)
        [asked] = supervisor.got(Generate)
    sent = (asked.priority, asked.client, asked.timeout_s, asked.keep_alive)
    assert sent == ("batch", "me", 90.0, 600.0)


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (["--dimensions", "64"], {"dimensions": 64}),
        (["--input-type", "query"], {"input_type": "query"}),
        (["--truncate"], {"truncate": True}),
    ],
    ids=str,
)
def test_options_of_embeddings_are_in_the_body(
    path: Path, options: list[str], fields: dict[str, Any]
) -> None:
    with scripted_supervisor(path, script_of("m", capabilities=["embeddings"])) as supervisor:
        where = ("--endpoint", supervisor.endpoint)
        run_cli("embed", "m", "-", *options, *where, stdin="a\n \n\nb\n")
        [asked] = supervisor.got(Generate)
    assert decode_body(asked.body).to_wire().items() >= ({"texts": ["a", "b"]} | fields).items()


def test_pictures_are_sent_before_the_prompt(path: Path, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(PNG)
    (tmp_path / "note.png").write_text("hello")
    cat = ("--image", f"{tmp_path}/cat.png")
    with scripted_supervisor(path, script_of("m")) as supervisor:
        assert run(supervisor, "m", PROMPT, *cat, *cat) == (0, "Paris\n", "")
        [asked] = supervisor.got(Generate)
        [message] = decode_body(asked.body).to_wire()["messages"]
        picture = {"type": "image", "data": PNG, "at": "cat.png"}
        assert message["content"] == [picture, picture, {"type": "text", "text": PROMPT}]
        for options, words in (
            ((*cat, "--raw"), "--raw cannot be combined with --image"),
            (("--image", f"{tmp_path}/none"), "No such file or directory"),
            (("--image", f"{tmp_path}/note.png"), "must be PNG, JPEG, WebP"),
        ):
            status, out, err = run(supervisor, "m", PROMPT, *options)
            assert (status, out) == (64, "")
            assert words in err
        assert len(supervisor.got(Generate)) == 1
    with scripted_supervisor(path, script_of("m", capabilities=["text"])) as supervisor:
        status, out, err = run(supervisor, "m", PROMPT, *cat)
        assert (status, out) == (1, "")
        assert "m takes text only, no pictures" in err
        assert supervisor.got(Generate) == []


def test_only_one_model_need_not_be_named(path: Path) -> None:
    with scripted_supervisor(path, script_of("m")) as supervisor:
        assert run(supervisor, PROMPT) == (0, "Paris\n", "")
        [asked] = supervisor.got(Generate)
        assert asked.model == "m"
        assert decode_body(asked.body).to_wire()["messages"] == [USER]
        # Its name alone is no prompt.
        status, out, err = run(supervisor, "m")
        assert (status, out, "Missing argument 'PROMPT'" in err) == (64, "", True)
        chatted = run_cli("chat", "--endpoint", supervisor.endpoint, stdin="hi\n")
        assert (chatted.returncode, chatted.stdout) == (0, "Paris\n")
    with scripted_supervisor(path, script_of("b", "a")) as supervisor:
        status, out, err = run(supervisor, PROMPT)
        assert (status, out) == (64, "")
        assert err.splitlines()[0] == "error: name a model: a, b"
        assert "`mlxsup generate a PROMPT" in err
        status, out, err = run(supervisor, PROMPT, "--json")
        assert json.loads(out)["error"]["code"] == "usage"
        assert supervisor.got(Generate) == []


@pytest.mark.parametrize(
    ("texts", "reason", "channel", "status", "remark"),
    [
        (
            (" ", "\n"), FinishReason.STOP, Channel.CONTENT, 0,
            "the answer contains only white space",
        ),
        (("Par",), FinishReason.CANCELLED, Channel.CONTENT, 1, "cancelled after 1 token"),
        (
            ("Let me see",), FinishReason.LENGTH, Channel.REASONING, 0,
            "no answer: the model reached the token limit while it was still reasoning",
        ),
    ],
    ids=["white space", "cancelled", "reasoning"],
)  # fmt: skip
def test_odd_answer_is_remarked_on_stderr(
    path: Path,
    texts: tuple[str, ...],
    reason: FinishReason,
    channel: Channel,
    status: int,
    remark: str,
) -> None:
    script = script_of("m", texts=texts, reason=reason, channel=channel)
    text = "" if channel is Channel.REASONING else "".join(texts)
    with scripted_supervisor(path, script) as supervisor:
        told = f"{remark}\n" if remark else ""
        line = text if not text or text.endswith("\n") else f"{text}\n"
        assert run(supervisor, "m", PROMPT, "--max-tokens", "1") == (status, line, told)
        code, out, err = run(supervisor, "m", PROMPT, "--json")
        value = json.loads(out)
        assert (code, value["text"], value["finish_reason"], err) == (status, text, reason, "")
        with Terminal("generate", "m", PROMPT, "--endpoint", supervisor.endpoint) as terminal:
            shown = ESCAPE.sub("", terminal.end()).splitlines()
        assert not remark or shown[-1] == remark


ANSWERS_PROMPT = "[[fault slow=0.02]] tell"
THOUGHT = "[[say <think>hm</think>well]]"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon({"m": fake()}) as daemon, daemon.client() as client:
        wait_for_state(client, "m", "READY")
        yield daemon


def generate(daemon: Daemon, prompt: str, *more: str) -> list[str]:
    return ["generate", "m", prompt, "--endpoint", daemon.endpoint, *more]


def kill_worker(daemon: Daemon) -> None:
    with daemon.client() as client:
        os.kill(row(client, "m")["pid"], signal.SIGKILL)


def test_in_a_pipe_the_answer_is_the_same_after_a_crash_F10(daemon: Daemon) -> None:
    arguments = generate(daemon, ANSWERS_PROMPT, "--max-tokens", "100")
    whole = run_cli(*arguments).stdout
    with subprocess.Popen(
        command(*arguments),
        bufsize=0,  # `read` takes no more than it gives, and leaves the rest to `communicate`
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as asked:
        assert asked.stdout is not None
        first = asked.stdout.read(1)
        kill_worker(daemon)
        rest, errors = asked.communicate(timeout=60)
    assert (first + rest).decode() == whole
    # A machine that is busy takes more than a second to load it again, and says so.
    assert re.sub(r"(?m)^\d\d:\d\d:\d\dZ m: .+\n", "", errors.decode()) == ""


def test_thoughts_are_for_a_terminal_and_not_in_what_a_program_reads(daemon: Daemon) -> None:
    done = run_cli(*generate(daemon, THOUGHT, "--max-tokens", "40"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "well\n", "")
    with Terminal(*generate(daemon, THOUGHT, "--max-tokens", "40")) as terminal:
        seen = terminal.end()
    assert "\x1b[2mm\x1b[0m\nwell" in seen
    assert ESCAPE.sub("", seen).split("\r")[-1].endswith("hm\nwell\n")


TOTAL = 2000


class Waits:
    """A script: the first notices come at once, the others and the answer after a `Ping`."""

    def __init__(self, first: Sequence[Notice], then: Sequence[Notice]) -> None:
        self._first, self._then = first, then
        self._asked: tuple[Peer, RequestId] | None = None

    def __call__(self, peer: Peer, message: Message) -> None:
        if isinstance(message, Generate):
            self._asked = peer, message.id
            self._send(self._first)
        elif isinstance(message, StatusQuery):
            answer(peer, message, models=[{"name": "m"}])
        elif isinstance(message, Ping):
            assert self._asked is not None
            self._send(self._then)
            asker, request_id = self._asked
            send_pieces(asker, request_id, ["Paris"])
            finish(asker, request_id, 1)
            answer(peer, message)

    def _send(self, notices: Sequence[Notice]) -> None:
        assert self._asked is not None
        peer, request_id = self._asked
        for notice in notices:
            peer.send(Notice(id=request_id, kind=notice.kind, detail=notice.detail))


def reading(done: int) -> Notice:
    detail = {"done": done, "total": TOTAL}
    return Notice(id=RequestId(""), kind=NoticeKind.PREFILLING, detail=detail)


def loading(phase: str, fraction: float) -> Notice:
    detail = {"state": "LOADING", "phase": phase, "fraction": fraction}
    return Notice(id=RequestId(""), kind=NoticeKind.LOADING, detail=detail)


def queued(expected_s: float) -> Notice:
    detail = {"position": 1, "reason": "load", "expected_s": expected_s}
    return Notice(id=RequestId(""), kind=NoticeKind.QUEUED, detail=detail)


def said_by(
    path: Path, first: Sequence[Notice], then: Sequence[Notice], *command: str
) -> list[str]:
    """What stands on standard error, without the times; the first line stood there by itself."""
    with (
        scripted_supervisor(path, Waits(first, then)) as supervisor,
        Piped(*command, "--endpoint", supervisor.endpoint) as piped,
    ):
        lines = [piped.note()]
        with Client(supervisor.endpoint) as other:
            other.ping()
        code, out, err = piped.end()
    assert (code, out) == (0, "Paris\n")
    said = [*lines, *err.splitlines(keepends=True)]
    assert all(re.match(r"\d\d:\d\d:\d\dZ m: .+\n", line) for line in said), said
    return [line[len("00:00:00Z m: ") :].rstrip("\n") for line in said]


def test_a_long_prompt_is_a_line_for_each_quarter(path: Path) -> None:
    first, then = map(reading, range(0, 420, 10)), map(reading, range(420, TOTAL + 1, 10))
    said = said_by(path, list(first), list(then), "generate", "m", "x")
    assert said == [
        f"reading the prompt: {done:,} of {TOTAL:,} tokens ({done * 100 // TOTAL}%)"
        for done in (410, 500, 1000, 1500, 2000)
    ]


def test_a_load_is_a_line_for_each_quarter_and_an_estimate_is_none(path: Path) -> None:
    first = [queued(9.0), loading("import", 0.0)]
    then = [
        queued(8.0),
        *(loading("weights", number / 50) for number in range(26)),
        queued(7.0),
        loading("warmup", 1.0),
    ]
    said = said_by(path, first, then, "generate", "m", "x")
    assert said == [
        "loading the model, starting",
        "waiting: position 1, the model is loading, about 8s",
        *(f"loading the model, {share}%, reading weights" for share in (26, 50)),
        "loading the model, 100%, warming up",
    ]
