"""What can be typed in `mlxsup chat` besides turns, and the way out of a full context."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxsup.protocol.client_messages import Generate, StatusQuery
from mlxsup.protocol.codec import decode_body
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import FinishReason

from support.cli import ESCAPE, Terminal, run_cli
from support.scripted_supervisor import (
    Peer,
    ScriptedSupervisor,
    answer,
    fail,
    finish,
    scripted_supervisor,
    send_pieces,
)

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
            terminal.expect("> ")
            terminal.type(f"{typed}\r")
            terminal.expect(shown)
        terminal.expect("> ")
        terminal.type('"""two\r')
        terminal.expect("| ")
        terminal.type('lines"""\r')
        terminal.expect("answer 3")
        terminal.expect("> ")
        terminal.type("\x04")
        terminal.end()
        assert terminal.process.returncode == 0
    assert said(supervisor)[-1] == ["Be brief.", "one", "answer 2", "two\nlines"]
    assert sent(supervisor.got(Generate)[-1])["seed"] == 7


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_full_context_names_the_way_out(
    supervisor: ScriptedSupervisor, tmp_path: Path, columns: int
) -> None:
    where = {"HOME": str(tmp_path), "MLXSUP_ENDPOINT": supervisor.endpoint}
    variables = {**where, "COLUMNS": str(columns)}
    with Terminal("chat", "m", **variables) as terminal:
        for typed, shown in (
            ("one", "answer 1"),
            ("long", "the context is full: `/clear` forgets the conversation"),
            ("three", "leaves no room"),
            ("/clear", "conversation cleared"),
            ("four", "answer 3"),
        ):
            terminal.expect("> ")
            terminal.type(f"{typed}\r")
            before = terminal.expect(shown)
        terminal.expect("> ")
        terminal.type("\x04")
        seen = ESCAPE.sub("", terminal.end())
        assert terminal.process.returncode == 0
    assert "hint: `/clear` forgets the conversation; `/save FILE` before it keeps" in seen
    assert "Traceback" not in before + seen
    status, out, err = chat(supervisor, "a", "b", "c")
    assert (status, out) == (1, "answer 4\nanswer 5\n")
    assert "hint: `/clear` forgets the conversation" in err
