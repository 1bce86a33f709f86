"""A chat in a pipe and on a terminal, with a scripted daemon: turns, commands, files and Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.history import FileHistory

from mlxsup.client import Client
from mlxsup.protocol.client_messages import Cancel, Generate, Notice, Ping, StatusQuery
from mlxsup.protocol.codec import decode_body
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import FinishReason, NoticeKind

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
from support.gateway.pictures import PNG

NARROW = 40
"""The columns of a terminal in which every line must be folded."""

NO_ROOM = "prompt is too long: 99 tokens > 31; this model's maximum context length is 32 tokens"
LOADING = {"state": "LOADING", "phase": "weights from a disk that is slow", "fraction": 0.5}


OTHER = {"name": "other", "presets": {"hot": {"min_p": 0.5}}}


class Answers:
    """A script: two models, and answers that are numbered, or as the turn says."""

    def __init__(self) -> None:
        self._count = 0
        self._open: set[str] = set()
        self._cold: tuple[Peer, Generate] | None = None

    def __call__(self, peer: Peer, message: Message) -> None:
        if isinstance(message, StatusQuery):
            answer(peer, message, models=[{"name": "m"}, OTHER])
        elif isinstance(message, Generate):
            self._generate(peer, message)
        elif isinstance(message, Ping):
            answer(peer, message)
            if self._cold is not None:
                self._answer(*self._cold, "cold")
                self._cold = None
        elif isinstance(message, Cancel) and message.id in self._open:
            self._open.remove(message.id)
            finish(peer, message.id, 1, FinishReason.CANCELLED)

    def _generate(self, peer: Peer, message: Generate) -> None:
        turn = sent(message)["messages"][-1]["content"]
        if turn == "too much":
            fail(peer, message.id, "context_length_exceeded", NO_ROOM, model="m")
            return
        if turn == "crash":
            send_pieces(peer, message.id, ["ye"])
            fail(peer, message.id, "worker_crashed", "its worker crashed", tokens_sent=1)
            return
        if turn == "cold":
            peer.send(Notice(id=message.id, kind=NoticeKind.LOADING, detail=LOADING))
            self._cold = peer, message
        else:
            self._answer(peer, message, turn)

    def _answer(self, peer: Peer, message: Generate, turn: str) -> None:
        self._count += 1
        send_pieces(peer, message.id, [f"answer {self._count}"])
        if turn == "endless":
            self._open.add(message.id)
            return
        finish(peer, message.id, 1, FinishReason.LENGTH if turn == "long" else FinishReason.STOP)


@pytest.fixture
def supervisor(path: Path) -> Iterator[ScriptedSupervisor]:
    with scripted_supervisor(path, Answers()) as running:
        yield running


def sent(message: Generate) -> dict[str, Any]:
    return decode_body(message.body).to_wire()


def said(supervisor: ScriptedSupervisor) -> list[list[Any]]:
    """The texts of each request so far."""
    return [[m["content"] for m in sent(g)["messages"]] for g in supervisor.got(Generate)]


def chat(supervisor: ScriptedSupervisor, *lines: str, options: tuple[str, ...] = (),
         **variables: str) -> tuple[int, str, str]:  # fmt: skip
    where = ("--endpoint", supervisor.endpoint, *options)
    done = run_cli("chat", "m", *where, stdin="".join(f"{line}\n" for line in lines), **variables)
    return done.returncode, done.stdout, done.stderr


def kept(history: Path) -> list[str]:
    """The turns of a history, the oldest first."""
    return [*FileHistory(history).load_history_strings()][::-1]


class Typing(Terminal):
    """A chat on a terminal."""

    def __init__(self, supervisor: ScriptedSupervisor, home: Path, **variables: str) -> None:
        where = {"HOME": str(home), "MLXSUP_ENDPOINT": supervisor.endpoint}
        super().__init__("chat", "m", **{**where, **variables})

    def turn(self, keys: str, shown: str) -> str:
        """Types a turn at the prompt; gives what stands before what is shown of it."""
        self.expect(PROMPT)
        self.type(f"{keys}\r")
        return self.expect(shown)

    def leave(self) -> str:
        """Ends the chat with Ctrl-D; gives everything that was ever written, without colours."""
        self.expect(PROMPT)
        self.type("\x04")
        seen = ESCAPE.sub("", self.end())
        assert self.process.returncode == 0
        assert "Traceback" not in seen
        return seen


# ---------------------------------------------------------------- in a pipe


def test_a_picture_is_attached_to_one_message(
    supervisor: ScriptedSupervisor, tmp_path: Path
) -> None:
    (tmp_path / "cat.png").write_bytes(PNG)
    (tmp_path / "dog.png").write_bytes(PNG)
    status, _, err = chat(
        supervisor, "what?", f"/image {tmp_path}/dog.png", "/image -",
        f"/image {tmp_path}/dog.png", "/image", "and this?", "/image",
        options=("--image", f"{tmp_path}/cat.png"), HOME=str(tmp_path),
    )  # fmt: skip
    assert status == 0
    assert re.fullmatch(
        r"Attached to the next message: dog\.png \(.+\)\.\nNo picture is attached\.\n", err
    )
    cat, dog = ({"type": "image", "data": PNG, "at": f"{name}.png"} for name in ("cat", "dog"))
    assert said(supervisor)[-1] == [
        [cat, {"type": "text", "text": "what?"}],
        "answer 1",
        [dog, {"type": "text", "text": "and this?"}],
    ]
    status, _, err = chat(supervisor, f"/image {tmp_path}/none.png", "lost", HOME=str(tmp_path))
    assert (status, "No such file" in err) == (1, True)


def test_lines_of_a_pipe_are_turns_and_commands_that_say_nothing(
    supervisor: ScriptedSupervisor, tmp_path: Path
) -> None:
    status, out, err = chat(
        supervisor,
        "one", "", "/system Be kind.", "two", "/retry", "/clear", "/system -",
        "/set temperature 0.5", "/set top_k 3", "/set think off", "three", "/set temperature -",
        "/model other:hot", "/retry", "/etc is a folder", "bye", "/exit", "never sent",
        options=("--system", "Be brief."), HOME=str(tmp_path),
    )  # fmt: skip
    assert (status, err) == (0, "")
    assert out == "".join(f"answer {number}\n" for number in range(1, 8))
    assert said(supervisor) == [
        ["Be brief.", "one"],
        ["Be kind.", "one", "answer 1", "two"],
        ["Be kind.", "one", "answer 1", "two"],
        ["three"],
        ["three"],
        ["three", "answer 5", "/etc is a folder"],
        ["three", "answer 5", "/etc is a folder", "answer 6", "bye"],
    ]
    parameters = [
        {name: value for name, value in sent(g).items() if name != "messages"}
        for g in supervisor.got(Generate)
    ]
    off = {"enable_thinking": False, "thinking": False}
    kept = {"top_k": 3, "chat_template_kwargs": off}
    hot = {**kept, "min_p": 0.5}
    assert parameters == [{}, {}, {}, {"temperature": 0.5, **kept}, hot, hot, hot]
    assert [g.model for g in supervisor.got(Generate)] == ["m"] * 4 + ["other"] * 3
    assert not (tmp_path / ".mlxsup").exists(), "a script has no history"


def test_failed_turn_of_a_pipe_ends_the_chat(supervisor: ScriptedSupervisor) -> None:
    status, out, err = chat(supervisor, "crash", "two")
    assert (status, out) == (1, "ye")
    assert err.startswith("error: its worker crashed (after 1 token)\nhint: ")
    assert len(supervisor.got(Generate)) == 1
    _, out, _ = chat(supervisor, "crash", options=("--json",))
    assert json.loads(out)["error"]["code"] == "worker_crashed"
    status, out, err = chat(supervisor, "a", "too much", "c")
    assert (status, out) == (1, "answer 1\n")
    assert "`/clear` starts a new conversation" in err
    assert "/clear" not in chat(supervisor, "too much")[2], "nothing could be cleared"
    status, out, err = chat(supervisor, "\udcff")
    assert (status, out) == (64, "")
    assert "not UTF-8" in err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/set temperature hot", "temperature must be a number"),
        ("/set parameter temp hot", "temperature must be a number"),
        ("/set top 3", "unknown setting top\nhint: settings: max-tokens, temperature"),
        ("/set temperature 11", "temperature must be a number from 0 to 10, not 11"),
        ("/set think maybe", "think must be on or off"),
        ("/set colour red", "unknown setting colour"),
        ("/model nobody", "there is no model 'nobody'; configured: m, other"),
        ("/retry", "there is no message to answer again"),
    ],
)
def test_command_that_cannot_be_carried_out_ends_the_chat_of_a_pipe(
    supervisor: ScriptedSupervisor, line: str, words: str
) -> None:
    status, out, err = chat(supervisor, line, "/exit")
    assert (status, out) == (1, "")
    assert words in err
    assert supervisor.got(Generate) == []


# ---------------------------------------------------------------- on a terminal


def test_commands_confirm_and_errors_end_nothing(
    supervisor: ScriptedSupervisor, tmp_path: Path
) -> None:
    with Typing(supervisor, tmp_path) as terminal:
        for typed, shown in (
            ("/?", "answer the last message again"),
            ("/system", "There is no system prompt."),
            ("/set system Be kind.", "System prompt set."),
            ("/system Be brief.", "System prompt set."),
            ("/set", "Settings: the defaults of the model."),
            ("/set seed 7", "Settings: seed 7."),
            ("/set seed x", "seed must be an integer"),
            ("/model", "Model: m. Available: m, other."),
            ("/model other", "Model: other."),
            ("/show", "Model: other\nSystem prompt: Be brief.\nSettings: seed 7."),
            ("/retry", "there is no message to answer again"),
            ("/nonsense", "unknown command /nonsense"),
            ("crash", "its worker crashed"),
            ("one", "answer 1"),
            ("/retry", "answer 2"),
            ("two\x1b\rlines", "answer 3"),
        ):
            terminal.turn(typed, shown)
        terminal.leave()
    assert said(supervisor)[-1] == ["Be brief.", "one", "answer 2", "two\nlines"]
    assert sent(supervisor.got(Generate)[-1])["seed"] == 7


def test_narrow_terminal_shows_a_load_in_one_line_and_the_way_out_of_a_full_context(
    supervisor: ScriptedSupervisor, tmp_path: Path
) -> None:
    with Typing(supervisor, tmp_path, COLUMNS=str(NARROW)) as terminal:
        loading = terminal.turn("cold", "loading the model, [======>     ] 50%,")
        assert loading.endswith("\r\x1b[K\x1b[2m")
        with Client(supervisor.endpoint) as other:
            other.ping()  # the answer follows
        assert terminal.expect("answer 1") == "…\x1b[0m\r\x1b[K"
        terminal.turn("long", "The context is full: `/clear` starts")
        terminal.turn("too much", "is too long")
        terminal.turn("/clear", "Started a new conversation.")
        terminal.turn("four", "answer 3")
        seen = terminal.leave()
    assert "hint: `/clear` starts a new conversation" in seen
    cut = ["cold", "answer 1", "long", "answer 2", "too much"]
    assert said(supervisor)[2:] == [cut, ["four"]], "an answer that was cut is part of it"


def test_ctrl_c_cancels_the_answer_and_not_the_chat_D4(
    supervisor: ScriptedSupervisor, tmp_path: Path
) -> None:
    with Typing(supervisor, tmp_path) as terminal:
        for number in (1, 2):
            terminal.turn("endless", f"answer {number}")
            terminal.type("\x03")
            terminal.expect("Stopped.")
        # At an empty prompt it ends the chat when it comes again; else it empties the line.
        terminal.expect(PROMPT)
        terminal.interrupt()
        terminal.expect("Press Ctrl-C again, or Ctrl-D, to quit.")
        terminal.expect(PROMPT)
        terminal.type("never sent\x1b\rnor this")
        terminal.expect("nor this")
        terminal.type("\x03")
        terminal.turn("/bye", "")
        seen = terminal.end()
        assert terminal.process.returncode == 0
    assert "Traceback" not in seen
    assert said(supervisor) == [["endless"], ["endless", "answer 1", "endless"]]
    history = tmp_path / ".mlxsup" / "history"
    assert kept(history) == ["endless", "/bye"], "the same turn is kept once"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


@pytest.mark.parametrize("word", ["exit", "/quit", "\x03\x03"])
def test_a_chat_is_left_with_the_words_of_other_programs(
    supervisor: ScriptedSupervisor, tmp_path: Path, word: str
) -> None:
    with Typing(supervisor, tmp_path) as terminal:
        terminal.turn(word, "")
        terminal.end()
        assert terminal.process.returncode == 0
    assert said(supervisor) == []


def test_turns_are_recalled_completed_and_have_lines(
    supervisor: ScriptedSupervisor, tmp_path: Path
) -> None:
    history = tmp_path / ".mlxsup" / "history"
    history.parent.mkdir()
    history.write_text("+from long ago\n")
    with Typing(supervisor, tmp_path) as terminal:
        terminal.expect(PROMPT)
        terminal.type("\x1b[A")
        terminal.expect("from long ago")
        terminal.type("\r")
        assert "\x07" not in terminal.turn("\x1b[200~pasted\\\ntogether\x07\n\x1b[201~", "answer 2")
        terminal.turn("first\x1b\rsecond", "answer 3")
        terminal.turn("/he\t", "show this help")
        shown = terminal.expect(PROMPT)
        assert "Ctrl-C stops an answer" in shown
        # The terminal would break a longer line in the middle of a word.
        assert max(map(len, ESCAPE.sub("", shown).replace("\r", "\n").splitlines())) <= COLUMNS
        terminal.type("\x04")
        terminal.end()
        assert terminal.process.returncode == 0
    assert kept(history) == [
        "from long ago", "pasted\\\ntogether\x07\n", "first\nsecond", "/help",
    ]  # fmt: skip


def test_ended_chat_gives_the_terminal_back_and_shows_no_colours_if_asked(
    supervisor: ScriptedSupervisor, tmp_path: Path
) -> None:
    with Typing(supervisor, tmp_path, NO_COLOR="1") as terminal:
        terminal.expect(PROMPT)
        terminal.type("half a turn")
        terminal.expect("half a turn")
        terminal.type("\x03")
        terminal.expect(PROMPT)
        terminal.process.terminate()
        terminal.expect("\x1b[?2004l\n")
        seen = terminal.end()
        assert terminal.process.returncode == -signal.SIGTERM
    assert re.findall(r"\x1b\[[\d;]*(?:3|4|9)\d[\d;]*m", seen) == []


def test_dumb_terminal_reads_lines(supervisor: ScriptedSupervisor, tmp_path: Path) -> None:
    with Typing(supervisor, tmp_path, TERM="dumb") as terminal:
        terminal.expect("> ")
        terminal.type("one\n")
        terminal.expect("> ")
        terminal.type("/nonsense\n")
        terminal.expect("unknown command /nonsense")
        terminal.expect("> ")
        terminal.type("\x04")
        seen = terminal.end()
        assert (terminal.process.returncode, "\x1b" in seen) == (0, False)
    assert said(supervisor) == [["one"]]
