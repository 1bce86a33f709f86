"""A chat in a pipe and on a terminal: its turns, its commands and its files."""

from __future__ import annotations

import json
import re
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxsup.protocol.client_messages import Generate, StatusQuery
from mlxsup.protocol.codec import decode_body
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import FinishReason

from support.cli.cli import COLUMNS, ESCAPE, PROMPT, Terminal, run_cli
from support.client.scripted_supervisor import (
    Peer,
    ScriptedSupervisor,
    answer,
    fail,
    finish,
    scripted_supervisor,
    send_pieces,
)
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.eventually import eventually

ENDLESS = {"step_s": 0.02, "answer_tokens": 100_000}

NARROW = 40
"""The columns of a terminal in which every line must be folded."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    models = {
        "alpha": fake(),
        "slow": fake(fake=ENDLESS),
        "cold": fake(preload=False, fake={"load_s": 1.5, "load_steps": 10}),
    }
    with Daemon(models) as daemon, daemon.client() as client:
        wait_for_state(client, "alpha", "READY")
        wait_for_state(client, "slow", "READY")
        yield daemon


def test_each_line_of_a_pipe_is_a_turn_of_one_conversation(tmp_path: Path) -> None:
    def script(peer: Peer, message: Message) -> None:
        if isinstance(message, StatusQuery):
            answer(peer, message, models=[{"name": "m"}])
        elif isinstance(message, Generate):
            send_pieces(peer, message.id, ["yes", "!"])
            finish(peer, message.id, 2)

    with scripted_supervisor(tmp_path / "client.sock", script) as supervisor:
        done = run_cli(
            *("chat", "m", "--system", "Be brief.", "--endpoint", supervisor.endpoint),
            stdin="one\\\ntwo\n\nthree\n/clear\nfour\n/exit\nnever sent\n",
            HOME=str(tmp_path),
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "yes!\nyes!\nyes!\n", "")
        said = [sent.body for sent in supervisor.got(Generate)]
    assert [body.count(b"content") for body in said] == [2, 4, 2]
    assert all(b"Be brief." in body for body in said)
    assert b"one\ntwo" in said[1]
    assert b"yes!" in said[1]
    assert b"one\ntwo" not in said[2]
    # What a script says is no history.
    assert not (tmp_path / ".mlxsup").exists()


def test_a_failed_turn_of_a_pipe_ends_the_chat(tmp_path: Path) -> None:
    def script(peer: Peer, message: Message) -> None:
        if isinstance(message, StatusQuery):
            answer(peer, message, models=[{"name": "m"}])
        elif isinstance(message, Generate):
            send_pieces(peer, message.id, ["ye"])
            fail(peer, message.id, "worker_crashed", "its worker crashed", tokens_sent=1)

    with scripted_supervisor(tmp_path / "client.sock", script) as supervisor:
        where = ("--endpoint", supervisor.endpoint)
        done = run_cli("chat", "m", *where, stdin="one\ntwo\n")
        assert (done.returncode, done.stdout) == (1, "ye")
        assert done.stderr.startswith("error: its worker crashed (after 1 token)\nhint: ")
        assert len(supervisor.got(Generate)) == 1
        done = run_cli("chat", "m", "--json", *where, stdin="one\n")
        assert json.loads(done.stdout)["error"]["code"] == "worker_crashed"
        # A person may try again, with a conversation that does not hold what failed.
        with Terminal("chat", "m", *where, HOME=str(tmp_path)) as terminal:
            for _ in range(2):
                terminal.expect(PROMPT)
                terminal.type("one\r")
                terminal.expect("its worker crashed")
            terminal.expect(PROMPT)
            terminal.type("\x04")
            terminal.end()
            assert terminal.process.returncode == 0
        bodies = {sent.body for sent in supervisor.got(Generate)[-2:]}
        assert len(bodies) == 1


def test_text_that_is_no_utf_8_is_a_usage_error(daemon: Daemon) -> None:
    done = run_cli("chat", "alpha", "--endpoint", daemon.endpoint, stdin="\udcff\n")
    assert (done.returncode, done.stdout) == (64, "")
    assert "not UTF-8" in done.stderr


def test_interrupt_cancels_the_answer_and_not_the_chat_D4(daemon: Daemon, tmp_path: Path) -> None:
    variables = {"HOME": str(tmp_path), "MLXSUP_ENDPOINT": daemon.endpoint}
    with Terminal("chat", "slow", **variables) as terminal, daemon.client() as client:
        for _ in range(3):
            terminal.expect(PROMPT)
            terminal.type("go on\r")
            terminal.expect("\n")
            eventually(lambda: row(client, "slow")["running"])
            terminal.type("\x03")
            terminal.expect("cancelled")
            eventually(lambda: not row(client, "slow")["running"])
        # At the prompt it empties the line, also one that continues.
        terminal.expect(PROMPT)
        terminal.type("never sent \\\rnor this")
        terminal.expect("nor this")
        terminal.type("\x03")
        terminal.expect(PROMPT)
        terminal.type("/exit\r")
        terminal.end()
        assert terminal.process.returncode == 0
    assert "Traceback" not in terminal.seen
    history = tmp_path / ".mlxsup" / "history"
    typed = [json.loads(line) for line in history.read_text().splitlines()]
    assert typed == ["go on", "/exit"], "the same turn is kept once"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_earlier_turns_can_be_called_back_and_a_turn_can_have_lines(
    daemon: Daemon, tmp_path: Path
) -> None:
    history = tmp_path / ".mlxsup" / "history"
    history.parent.mkdir()
    history.write_text('"from long ago"\n')
    variables = {"HOME": str(tmp_path), "MLXSUP_ENDPOINT": daemon.endpoint}
    with Terminal("chat", "alpha", "--max-tokens", "2", **variables) as terminal:
        terminal.expect(PROMPT)
        terminal.type("\x1b[A")
        terminal.expect("from long ago")
        terminal.type("\r")
        terminal.expect(PROMPT)
        terminal.type("```\rcode\r```\r")
        terminal.expect(PROMPT)
        terminal.type("\x1b[200~pasted\\\ntogether\x07\n\x1b[201~\r")
        assert "\x07" not in terminal.expect(PROMPT)
        terminal.type("first\x1b\rsecond\r")
        terminal.expect(PROMPT)
        terminal.type("/he\t\r")
        shown = terminal.expect(PROMPT)
        assert "Ctrl-C cancels an answer" in shown
        # The terminal would break a longer line in the middle of a word.
        assert max(map(len, ESCAPE.sub("", shown).replace("\r", "\n").splitlines())) <= COLUMNS
        terminal.type("/clear\r/nonsense\r")
        terminal.expect("conversation cleared")
        terminal.expect("unknown command /nonsense")
        terminal.expect(PROMPT)
        terminal.type("\x04")
        terminal.end()
        assert terminal.process.returncode == 0
    assert [json.loads(line) for line in history.read_text().splitlines()] == [
        "from long ago",
        "```\ncode\n```",
        "pasted\\\ntogether\x07\n",
        "first\nsecond",
        "/help",
        "/clear",
        "/nonsense",
    ]


def test_a_chat_that_is_ended_gives_the_terminal_back(daemon: Daemon, tmp_path: Path) -> None:
    variables = {"HOME": str(tmp_path), "MLXSUP_ENDPOINT": daemon.endpoint, "NO_COLOR": "1"}
    with Terminal("chat", "alpha", **variables) as terminal:
        terminal.expect(PROMPT)
        terminal.type("half a turn")
        terminal.expect("half a turn")
        terminal.type("\x03")
        terminal.expect(PROMPT)
        terminal.process.terminate()
        terminal.expect("\x1b[?2004l\n")
        seen = terminal.end()
        assert terminal.process.returncode == -signal.SIGTERM
    colours = re.findall(r"\x1b\[[\d;]*(?:3|4|9)\d[\d;]*m", seen)
    assert colours == []


def test_where_nothing_can_be_drawn_lines_are_read(daemon: Daemon, tmp_path: Path) -> None:
    where = {"HOME": str(tmp_path), "MLXSUP_ENDPOINT": daemon.endpoint, "TERM": "dumb"}
    with Terminal("chat", "alpha", "--max-tokens", "2", **where) as terminal:
        terminal.expect("> ")
        terminal.type("one\\\n")
        terminal.expect("| ")
        terminal.type("two\n")
        terminal.expect("> ")
        terminal.type("/nonsense\n")
        terminal.expect("unknown command /nonsense")
        terminal.expect("> ")
        terminal.type("\x04")
        seen = terminal.end()
        assert (terminal.process.returncode, "\x1b" in seen) == (0, False)


def test_a_person_who_waits_is_told_for_what_and_the_line_is_gone_afterwards(
    daemon: Daemon, tmp_path: Path
) -> None:
    with daemon.client() as client:
        client.unload("cold")
    where = {"HOME": str(tmp_path), "MLXSUP_ENDPOINT": daemon.endpoint}
    variables = {**where, "COLUMNS": str(NARROW)}
    with Terminal("chat", "cold", "--max-tokens", "4", **variables) as terminal:
        terminal.expect(PROMPT)
        terminal.type("hello\r")
        terminal.expect("loading")
        terminal.expect("\r\x1b[K")
        terminal.expect(PROMPT)
        terminal.type("\x04")
        seen = terminal.end()
        assert terminal.process.returncode == 0
    shown = ESCAPE.sub("", seen)
    assert "weights" in shown
    # What is rewritten in place never wraps, and says so if it is cut.
    redrawn = [ESCAPE.sub("", part).split("\r")[0] for part in seen.split("\r\x1b[K")[1:-1]]
    lines = [line for line in redrawn if "\n" not in line]
    assert lines
    assert max(map(len, lines)) < NARROW
    assert all(line.endswith("…") for line in lines if len(line) == NARROW - 1)


FITS = 3
"""Messages beyond which the scripted context is full."""


class Answers:
    """A script: two models, answers that are numbered, and a context of three messages."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, peer: Peer, message: Message) -> None:
        if isinstance(message, StatusQuery):
            answer(peer, message, models=[{"name": "m"}, {"name": "other"}])
        elif isinstance(message, Generate):
            said = [m for m in sent(message)["messages"] if m["role"] != "system"]
            if len(said) > FITS:
                words = "the prompt has 99 tokens; the context of 32 leaves no room"
                fail(peer, message.id, "context_length_exceeded", words, model="m")
                return
            self._count += 1
            send_pieces(peer, message.id, [f"answer {self._count}"])
            is_cut = said[-1]["content"] == "long"
            reason = FinishReason.LENGTH if is_cut else FinishReason.STOP
            finish(peer, message.id, 1, reason)


@pytest.fixture
def supervisor(path: Path) -> Iterator[ScriptedSupervisor]:
    with scripted_supervisor(path, Answers()) as running:
        yield running


def sent(message: Generate) -> dict[str, Any]:
    return decode_body(message.body).to_wire()


def said(supervisor: ScriptedSupervisor) -> list[list[str]]:
    """The texts of each request so far."""
    return [[m["content"] for m in sent(g)["messages"]] for g in supervisor.got(Generate)]


def chat(supervisor: ScriptedSupervisor, *lines: str) -> tuple[int, str, str]:
    where = ("--endpoint", supervisor.endpoint)
    done = run_cli("chat", "m", *where, stdin="".join(f"{line}\n" for line in lines))
    return done.returncode, done.stdout, done.stderr


# ---------------------------------------------------------------- in a pipe


def test_commands_change_what_is_sent_and_say_nothing_in_a_pipe(
    supervisor: ScriptedSupervisor,
) -> None:
    status, out, err = chat(
        supervisor,
        "one", "/system Be brief.", "two", "/retry", "/clear", "/system -", "/set temperature 0.5",
        "/set top_k 3", "/set think off", "three", "/set temperature -", "/model other", "/retry",
        "/etc is a folder", "/exit", "never sent",
    )  # fmt: skip
    assert (status, err) == (0, "")
    assert out == "".join(f"answer {number}\n" for number in range(1, 7))
    assert said(supervisor) == [
        ["one"],
        ["Be brief.", "one", "answer 1", "two"],
        ["Be brief.", "one", "answer 1", "two"],
        ["three"],
        ["three"],
        ["three", "answer 5", "/etc is a folder"],
    ]
    parameters = [
        {name: value for name, value in sent(g).items() if name != "messages"}
        for g in supervisor.got(Generate)
    ]
    off = {"enable_thinking": False, "thinking": False}
    kept = {"top_k": 3, "chat_template_kwargs": off}
    assert parameters == [{}, {}, {}, {"temperature": 0.5, **kept}, kept, kept]
    assert [g.model for g in supervisor.got(Generate)] == ["m"] * 4 + ["other"] * 2


def test_a_conversation_is_saved_and_continued(
    supervisor: ScriptedSupervisor, tmp_path: Path
) -> None:
    file = tmp_path / "my talk.json"
    assert chat(supervisor, "/system Be brief.", "one", f"/save {file}")[0] == 0
    assert json.loads(file.read_text())["messages"][1]["content"] == "answer 1"
    assert chat(supervisor, "gone", f"/load {file}", "two", "/save")[0] == 0
    assert said(supervisor)[-1] == ["Be brief.", "one", "answer 1", "two"]
    assert len(json.loads(file.read_text())["messages"]) == 4


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/set temperature hot", "/set temperature takes a number, or - for the default"),
        ("/set temperature 11", "temperature takes a number from 0 to 10, not 11"),
        ("/set think maybe", "/set think takes on or off"),
        ("/set colour red", "/set knows no colour; it knows max-tokens, temperature"),
        ("/model nobody", "no model is called 'nobody'; configured: m, other"),
        ("/retry", "there is nothing to answer again"),
        ("/save", "/save takes the name of a file"),
        ("/save /nowhere/at/all", "cannot write /nowhere/at/all: No such file"),
        ("/load", "/load takes the name of a file"),
        ("/load /nowhere/at/all", "cannot read /nowhere/at/all: No such file"),
        ("/load /dev/null", "/dev/null is no conversation that /save has written"),
    ],
)
def test_a_command_that_cannot_be_carried_out_ends_the_chat_of_a_pipe(
    supervisor: ScriptedSupervisor, line: str, words: str
) -> None:
    status, out, err = chat(supervisor, line, "/exit")
    assert (status, out) == (1, "")
    assert words in err
    assert supervisor.got(Generate) == []


# ---------------------------------------------------------------- on a terminal


def test_a_person_sees_what_a_command_has_done_and_errors_end_nothing(
    supervisor: ScriptedSupervisor, tmp_path: Path
) -> None:
    variables = {"HOME": str(tmp_path), "MLXSUP_ENDPOINT": supervisor.endpoint}
    with Terminal("chat", "m", **variables) as terminal:
        for typed, shown in (
            ("/?", "answer the latest turn again"),
            ("/system", "no system prompt"),
            ("/system Be brief.", "system prompt set"),
            ("/set", "everything is as the model's entry says"),
            ("/set seed 7", "seed 7"),
            ("/set seed x", "/set seed takes an integer"),
            ("/model", "m answers; configured: m, other"),
            ("/model other", "other answers from now on"),
            ("/retry", "there is nothing to answer again"),
            ("/nonsense", "unknown command /nonsense"),
            ("one", "answer 1"),
            ("/retry", "answer 2"),
            (f"/save {tmp_path}/a", f"saved to {tmp_path}/a"),
            ("/clear", "conversation cleared"),
            (f"/load {tmp_path}/a", "loaded 1 answered turn"),
        ):
            terminal.expect(PROMPT)
            terminal.type(f"{typed}\r")
            terminal.expect(shown)
        terminal.expect(PROMPT)
        terminal.type('"""two\rlines"""\r')
        terminal.expect("answer 3")
        terminal.expect(PROMPT)
        terminal.type("\x04")
        terminal.end()
        assert terminal.process.returncode == 0
    assert said(supervisor)[-1] == ["Be brief.", "one", "answer 2", "two\nlines"]
    assert sent(supervisor.got(Generate)[-1])["seed"] == 7


def test_a_full_context_names_the_way_out(supervisor: ScriptedSupervisor, tmp_path: Path) -> None:
    where = {"HOME": str(tmp_path), "MLXSUP_ENDPOINT": supervisor.endpoint}
    variables = {**where, "COLUMNS": str(NARROW)}
    with Terminal("chat", "m", **variables) as terminal:
        for typed, shown in (
            ("one", "answer 1"),
            ("long", "the context is full: `/clear` forgets the conversation"),
            ("three", "leaves no room"),
            ("/clear", "conversation cleared"),
            ("four", "answer 3"),
        ):
            terminal.expect(PROMPT)
            terminal.type(f"{typed}\r")
            before = terminal.expect(shown)
        terminal.expect(PROMPT)
        terminal.type("\x04")
        seen = ESCAPE.sub("", terminal.end())
        assert terminal.process.returncode == 0
    assert "hint: `/clear` forgets the conversation; `/save FILE` before it keeps" in seen
    assert "Traceback" not in before + seen
    status, out, err = chat(supervisor, "a", "b", "c")
    assert (status, out) == (1, "answer 4\nanswer 5\n")
    assert "hint: `/clear` forgets the conversation" in err
