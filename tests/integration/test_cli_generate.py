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
from mlxsup.protocol.ids import RequestId
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

PROMPT = "What is the capital of France?"


def script_of(
    *models: str, texts: tuple[str, ...] = ("Par", "is"), reason: FinishReason = FinishReason.STOP
) -> Script:
    """A daemon with these models, all of which give the same answer."""

    def script(peer: Peer, message: Message) -> None:
        if isinstance(message, StatusQuery):
            answer(peer, message, models=[{"name": name} for name in models])
        elif isinstance(message, Generate):
            send_pieces(peer, message.id, list(texts))
            finish(peer, message.id, len(texts), reason)

    return script


def run(supervisor: ScriptedSupervisor, *arguments: str) -> tuple[int, str, str]:
    done = run_cli("generate", *arguments, "--endpoint", supervisor.endpoint)
    return done.returncode, done.stdout, done.stderr


def sent(supervisor: ScriptedSupervisor) -> dict[str, Any]:
    """The body of the latest request."""
    return decode_body(supervisor.got(Generate)[-1].body).to_wire()


def test_the_prompt_is_a_message_for_the_template_unless_it_is_raw(path: Path) -> None:
    with scripted_supervisor(path, script_of("m")) as supervisor:
        assert run(supervisor, "m", PROMPT) == (0, "Paris", "")
        user = {"role": "user", "content": PROMPT}
        assert sent(supervisor) == {"messages": [user], "messages_as_text": True}
        assert run(supervisor, "m", PROMPT, "--system", "Be brief.") == (0, "Paris", "")
        system = {"role": "system", "content": "Be brief."}
        assert sent(supervisor) == {"messages": [system, user], "messages_as_text": True}
        assert run(supervisor, "m", PROMPT, "--raw") == (0, "Paris", "")
        assert sent(supervisor) == {"prompt": PROMPT}


@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        (["--top-k", "5", "--min-p", "0.1"], {"top_k": 5, "min_p": 0.1}),
        (
            ["--no-think"],
            {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}},
        ),
        (["--think"], {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}),
        (
            ["--schema", "SCHEMA"],
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "integer"}},
                }
            },
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_become_parameters(
    path: Path, tmp_path: Path, options: list[str], parameters: dict[str, Any]
) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "integer"}')
    given = [str(schema) if option == "SCHEMA" else option for option in options]
    with scripted_supervisor(path, script_of("m")) as supervisor:
        assert run(supervisor, "m", PROMPT, *given) == (0, "Paris", "")
        body = sent(supervisor)
    assert {name: body[name] for name in body if not name.startswith("messages")} == parameters


def test_the_only_model_need_not_be_named(path: Path) -> None:
    with scripted_supervisor(path, script_of("m")) as supervisor:
        assert run(supervisor, PROMPT) == (0, "Paris", "")
        assert supervisor.got(Generate)[0].model == "m"
        assert sent(supervisor)["messages"][0]["content"] == PROMPT
        # Its name alone is no prompt.
        status, out, err = run(supervisor, "m")
        assert (status, out) == (64, "")
        assert "Missing argument 'PROMPT'" in err
        assert len(supervisor.got(Generate)) == 1
        chatted = run_cli("chat", "--endpoint", supervisor.endpoint, stdin="hi\n")
        assert (chatted.returncode, chatted.stdout) == (0, "Paris\n")


def test_one_of_several_models_must_be_named(path: Path) -> None:
    with scripted_supervisor(path, script_of("b", "a")) as supervisor:
        status, out, err = run(supervisor, PROMPT)
        assert (status, out) == (64, "")
        assert err.splitlines()[0] == "error: name a model; configured: a, b"
        assert "`mlxsup generate a PROMPT" in err
        status, out, err = run(supervisor, PROMPT, "--json")
        assert json.loads(out)["error"]["code"] == "usage"
        assert supervisor.got(Generate) == []


@pytest.mark.parametrize(
    ("texts", "reason", "remark"),
    [
        ((), FinishReason.STOP, "the answer is empty: the model ended it at once"),
        ((" ", "\n"), FinishReason.STOP, "the answer is nothing but white space"),
        (("x",), FinishReason.LENGTH, ""),
    ],
)
def test_an_empty_answer_says_so_on_stderr(
    path: Path, texts: tuple[str, ...], reason: FinishReason, remark: str
) -> None:
    with scripted_supervisor(path, script_of("m", texts=texts, reason=reason)) as supervisor:
        told = f"{remark}\n" if remark else ""
        assert run(supervisor, "m", PROMPT) == (0, "".join(texts), told)
        where = ("--endpoint", supervisor.endpoint)
        done = run_cli("generate", "m", PROMPT, "--json", *where)
        assert (json.loads(done.stdout)["text"], done.stderr) == ("".join(texts), "")
        with Terminal("generate", "m", PROMPT, *where) as terminal:
            shown = ESCAPE.sub("", terminal.end()).splitlines()
        assert ([remark] == shown[-1:]) == bool(remark)


def test_an_answer_that_somebody_has_cancelled_is_no_success(path: Path) -> None:
    script = script_of("m", texts=("Par",), reason=FinishReason.CANCELLED)
    with scripted_supervisor(path, script) as supervisor:
        assert run(supervisor, "m", PROMPT) == (1, "Par", "cancelled after 1 token\n")
        done = run_cli("generate", "m", PROMPT, "--json", "--endpoint", supervisor.endpoint)
        assert (json.loads(done.stdout)["finish_reason"], done.stderr) == ("cancelled", "")
        assert done.returncode == 1


def test_an_answer_that_is_all_reasoning_says_why(path: Path) -> None:
    def script(peer: Peer, message: Message) -> None:
        if isinstance(message, Generate):
            thought = piece(message.id, 0, "Let me see", channel=Channel.REASONING)
            peer.send(Deltas(deltas=[thought]))
            finish(peer, message.id, 1, FinishReason.LENGTH)

    with scripted_supervisor(path, script) as supervisor:
        status, out, err = run(supervisor, "m", PROMPT, "--max-tokens", "1")
    assert (status, out) == (0, "")
    assert err == "no answer: the limit of tokens came while the model was still reasoning\n"


REMARK = "the worker ended; the answer continues when it is back"
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


def test_an_interrupted_answer_says_so_in_a_line_and_loses_nothing_F10(daemon: Daemon) -> None:
    whole = run_cli(*generate(daemon, ANSWERS_PROMPT, "--max-tokens", "100")).stdout
    with Terminal(*generate(daemon, ANSWERS_PROMPT, "--max-tokens", "100")) as terminal:
        terminal.expect(whole[:4])
        kill_worker(daemon)
        terminal.expect(REMARK)
        seen = ESCAPE.sub("", terminal.end())
    before, after = seen.split(f"\n{REMARK}\n")
    # What stood on the terminal was not written over, and nothing comes twice.
    assert before.split("\r")[-1] + after.split("\r")[-1] == whole + "\n"


def test_in_a_pipe_the_answer_is_the_same_and_the_remark_beside_it_F10(daemon: Daemon) -> None:
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
    # A machine that is busy shows the load, too, because that takes more than a second then.
    assert re.sub(r"(?m)^\d\d:\d\d:\d\dZ m: .+\n", "", errors.decode()) == f"{REMARK}\n"


def test_thoughts_are_for_a_terminal_and_not_in_what_a_program_reads(daemon: Daemon) -> None:
    done = run_cli(*generate(daemon, THOUGHT, "--max-tokens", "40"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "well", "")
    with Terminal(*generate(daemon, THOUGHT, "--max-tokens", "40")) as terminal:
        seen = terminal.end()
    assert "\x1b[2mm\x1b[0m\nwell" in seen
    assert ESCAPE.sub("", seen).split("\r")[-1].endswith("hm\nwell\n")


def test_what_ends_an_answer_can_be_said(daemon: Daemon) -> None:
    def tokens(prompt: str, *more: str) -> list[int]:
        done = run_cli(*generate(daemon, prompt, "--json", *more))
        assert done.returncode == 0, done.stderr
        ids: list[int] = json.loads(done.stdout)["token_ids"]
        return ids

    short = "[[answer 3]] tell"
    assert len(tokens(short)) == 3
    assert len(tokens(short, "--min-tokens", "5")) == 5
    assert len(tokens(short, "--ignore-eos", "--max-tokens", "9")) == 9
    free = tokens("tell", "--max-tokens", "9")
    ends = ["--stop-token-id", str(free[4]), "--stop-token-id", "1"]
    assert tokens("tell", "--max-tokens", "9", *ends) == free[: free.index(free[4])]


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
    assert (code, out) == (0, "Paris")
    said = [*lines, *err.splitlines(keepends=True)]
    assert all(re.match(r"\d\d:\d\d:\d\dZ m: .+\n", line) for line in said), said
    return [line[len("00:00:00Z m: ") :].rstrip("\n") for line in said]


def test_a_long_prompt_is_a_line_for_each_tenth(path: Path) -> None:
    first, then = map(reading, range(0, 420, 10)), map(reading, range(420, TOTAL + 1, 10))
    said = said_by(path, list(first), list(then), "generate", "m", "x")
    tokens = [410, *range(600, TOTAL + 1, 200)]
    assert said == [
        f"reading the prompt, {done} of {TOTAL} tokens ({done * 100 // TOTAL}%)" for done in tokens
    ]


def test_a_load_is_a_line_for_each_phase_and_tenth_and_an_estimate_is_none(path: Path) -> None:
    first = [queued(9.0), loading("import", 0.0)]
    then = [
        queued(8.0),
        *(loading("weights", number / 50) for number in range(26)),
        queued(7.0),
        loading("warm-up", 0.0),
    ]
    said = said_by(path, first, then, "generate", "m", "x")
    assert said == [
        "loading, import",
        "queued, position 1, about 8s",
        "loading, weights",
        *(f"loading, weights {number}0%" for number in range(1, 6)),
        "loading, warm-up",
    ]
