"""The worst moments of a newcomer, on a narrow terminal: what is said there now."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxsup.protocol.client_messages import Cancel, Generate, StatusQuery
from mlxsup.protocol.message import Message

from support.cli.cli import ESCAPE, PROMPT, Terminal, command, on_terminal
from support.client.scripted_supervisor import (
    OpenStreams,
    Peer,
    answer,
    finish,
    scripted_supervisor,
    send_pieces,
)
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, wait_for_state
from support.daemon.hub_caches import REPO, write_folder, write_repository
from support.eventually import eventually

NARROW = 40


class Seat:
    """Somebody with an empty home, at a terminal.

    Attributes:
        home: a short path, because sockets go there; the working folder.
        columns: of the terminal.
        variables: of every command.
    """

    def __init__(self, home: Path, columns: int) -> None:
        self.home = home
        self.columns = columns
        self.variables = {
            "HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_HOME": str(home / "hf"),
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": str(columns),
        }

    def shown(self, *arguments: str, **variables: str) -> str:
        """All that a command shows, with one space for each end of a line."""
        return words_of(on_terminal(arguments, **self.variables, **variables))

    def terminal(self, *arguments: str, **variables: str) -> Terminal:
        """A command that is not at its end."""
        return Terminal(*arguments, **self.variables, **variables)


class Program(Terminal):
    """Another program than mlxsup."""

    def command_line(self, arguments: tuple[str, ...]) -> list[str]:
        """See `Terminal.command_line`."""
        return list(arguments)


Moment = Callable[[Seat], None]
MOMENTS: dict[str, Moment] = {}


def moment(name: str) -> Callable[[Moment], Moment]:
    """Puts a moment into the table."""

    def put(function: Moment) -> Moment:
        MOMENTS[name] = function
        return function

    return put


def words_of(text: str) -> str:
    """What a terminal shows, however its lines end; nothing of it may be a traceback."""
    assert "Traceback" not in text
    return " ".join(ESCAPE.sub("", text).split())


def in_order(text: str, *words: str) -> None:
    """Fails unless all of these are there, one after the other."""
    place = 0
    for word in words:
        found = text.find(word, place)
        assert found >= 0, (word, text)
        place = found + len(word)


# ---------------------------------------------------------------- D1: an empty answer


def answering(*pieces: str) -> Callable[[Peer, Message], None]:
    """A script: one model that answers with these pieces."""

    def script(peer: Peer, message: Message) -> None:
        if isinstance(message, StatusQuery):
            answer(peer, message, models=[{"name": "smollm2"}, {"name": "other"}])
        elif isinstance(message, Generate):
            send_pieces(peer, message.id, list(pieces))
            finish(peer, message.id, len(pieces))

    return script


@moment("D1 a question is answered, and an empty answer says that it is one")
def empty_answer(seat: Seat) -> None:
    asked = ("generate", "smollm2", "What is the capital of France?")
    with scripted_supervisor(seat.home / "s.sock", answering("Par", "is")) as supervisor:
        assert seat.shown(*asked, "--endpoint", supervisor.endpoint) == "Paris"
    with scripted_supervisor(seat.home / "s.sock", answering()) as supervisor:
        shown = seat.shown(*asked, "--endpoint", supervisor.endpoint)
        assert shown == "the answer is empty: the model ended it at once"


# ---------------------------------------------------------------- D2: which daemon is meant


@moment("D2 `stop` ends the daemon that MLXSUP_CONFIG names, and no other")
def named_daemon(seat: Seat) -> None:
    mine, other = Daemon({"m": fake()}), Daemon({"m": fake()})
    Path("mlxsup.toml").write_text(other.config.read_text())
    with mine, other:
        assert mine.process is not None
        shown = seat.shown("stop", MLXSUP_CONFIG=str(mine.config))
        assert f"stopped the daemon (pid {mine.process.pid}) and 1 worker" in shown
        with other.client() as client:
            assert client.status()["models"][0]["name"] == "m"


@moment("D2 `status` and `start` with a runtime folder in the default file lead in no circle")
def no_circle(seat: Seat) -> None:
    daemon = Daemon({"m": fake()})
    (seat.home / ".mlxsup").mkdir()
    (seat.home / ".mlxsup/config.toml").write_text(daemon.config.read_text())
    in_order(
        seat.shown("status"),
        f"error: no daemon answers at {daemon.endpoint}",
        "hint: start one with `mlxsup start`, which reads ~/.mlxsup/config.toml",
    )
    with daemon:
        assert daemon.process is not None
        in_order(
            seat.shown("start"),
            f"error: a daemon with pid {daemon.process.pid} is already running",
            "hint: see it with `mlxsup status`, end it with `mlxsup stop`",
        )
        eventually(lambda: " READY" in seat.shown("status"))


# ---------------------------------------------------------------- D3: what is no model


@moment("D3 a repository that is not there is no folder, and nothing listens")
def missing_repository(seat: Seat) -> None:
    shown = seat.shown("start", "--model", REPO)
    assert "listening" not in shown
    in_order(
        shown,
        f"error: {REPO} is not in the Hugging Face cache {seat.home}/hub",
        f"hint: download it with `mlxsup pull {REPO}`",
    )


@moment("D3 GGUF files, hub folders and parent folders are named for what they are")
def other_folders(seat: Seat) -> None:
    write_folder(seat.home / "all/one")
    write_repository(seat.home / "hub", "a/b")
    (seat.home / "m.gguf").write_bytes(b"GGUF")
    for name, words in {
        "all": ("is no model folder itself, but holds some: one", "hint: name one of them: "),
        "hub/models--a--b": ("is the cache's folder of a/b", "start with `--model a/b`"),
        "m.gguf": ("is a GGUF file", "hint: convert it with `mlxsup convert "),
        "none": ("does not exist", "hint: see which models there are with `mlxsup models`"),
    }.items():
        shown = seat.shown("start", "--model", f"{seat.home}/{name}")
        in_order(shown, "error: ", f"{seat.home}/{name}", *words)
        assert "listening" not in shown


@moment("D3 `config check` names each folder that is none, with its line")
def checked_folders(seat: Seat) -> None:
    config = seat.home / "c.toml"
    config.write_text('[models.gone]\npath = "gone"\n[models.fake]\nengine = "fake"\n')
    in_order(
        seat.shown("config", "check", str(config)),
        f"error: {config} is not a valid configuration:",
        f"{config}:2: models.gone.path: the model folder {seat.home}/gone does not exist; ",
        f"hint: fix it, then `mlxsup config check {config}`",
    )


# ---------------------------------------------------------------- D4: ^C in an interactive Python


@moment("D4 ^C in an interactive Python cancels the request")
def interrupted_python(seat: Seat) -> None:
    variables = {**seat.variables, "PYTHON_BASIC_REPL": "1"}
    with (
        scripted_supervisor(seat.home / "s.sock", OpenStreams()) as supervisor,
        Program(sys.executable, "-q", "-i", **variables) as python,
    ):
        for line in (
            "from mlxsup import Client",
            f"client = Client({supervisor.endpoint!r})",
            "for d in client.generate('m', prompt='x'): print('<', d.text, '>', sep='')",
        ):
            python.expect(">>> ")
            python.type(f"{line}\r")
        python.expect("... ")
        python.type("\r")
        python.expect("<one>")
        python.type("\x03")
        python.expect("KeyboardInterrupt")
        python.expect(">>> ")
        eventually(lambda: supervisor.got(Cancel))
        assert [c.id for c in supervisor.got(Cancel)] == [g.id for g in supervisor.got(Generate)]


# ---------------------------------------------------------------- D5: ten minutes of silence


@moment("D5 `generate` and `status` show how a long prompt is read")
def long_prompt(seat: Seat) -> None:
    slow = fake(fake={"prefill_tokens_per_step": 1, "step_s": 0.05})
    prompt = "word " * 400
    with Daemon({"m": slow}) as daemon, daemon.client() as client:
        wait_for_state(client, "m", "READY")
        where = ("--endpoint", daemon.endpoint)
        with seat.terminal("generate", "m", prompt, *where) as asking:
            asking.expect("reading the prompt, ")
            eventually(lambda: "prefill " in seat.shown("status", *where))
            asking.type("\x03")
            # Without what the terminal itself writes when the key is pressed.
            parts = asking.end().replace("^C", "").split("\r\x1b[K")
            lines = [ESCAPE.sub("", part) for part in parts]
            assert asking.process.returncode == 130
        assert max(len(line) for line in lines if "reading" in line) < seat.columns


# ---------------------------------------------------------------- D7: logs


@moment("D7 `logs` needs no daemon, and says whose they are")
def logs_of_nobody(seat: Seat) -> None:
    daemon = Daemon({"m": fake()})
    with daemon:
        with daemon.client() as client:
            wait_for_state(client, "m", "READY")
        daemon.kill()
        in_order(
            seat.shown("logs", "m", "--config", str(daemon.config)),
            f"no daemon answers at {daemon.endpoint}; these are the logs in {daemon.logs}",
            "--- generation 1 pid ",
        )


@moment("D7 a second daemon does not write into the first one's logs")
def shared_logs(seat: Seat) -> None:
    with Daemon({"m": fake()}) as first:
        second = Daemon({"m": fake()}, {"log_dir": str(first.logs)})
        in_order(
            seat.shown("start", "--config", str(second.config)),
            f"error: another daemon writes its logs to {first.logs}",
            "set log_dir to another folder",
        )
        shutil.rmtree(second.folder)


# ---------------------------------------------------------------- D8: what a chat takes


@moment("D8 commands of a chat are no turns, and quotes hold several lines")
def chat_commands(seat: Seat) -> None:
    with (
        scripted_supervisor(seat.home / "s.sock", answering("Par", "is")) as supervisor,
        seat.terminal("chat", "smollm2", "--endpoint", supervisor.endpoint) as chat,
    ):
        chat.expect(PROMPT)
        chat.type("/?\r")
        lines = ESCAPE.sub("", chat.expect(PROMPT)).splitlines()
        assert "  answer the latest turn again" in "\n".join(lines)
        assert max(map(len, lines)) <= seat.columns
        chat.type("\r")
        for typed, answered in (
            ("/system Be brief.", "system prompt set"),
            ("/set seed 7", "seed 7"),
            ("/model", "smollm2 answers; configured: other, smollm2"),
            ("/nonsense", "unknown command /nonsense"),
            ("one", "Paris"),
            (f"/save {seat.home}/a", "saved to"),
            ("/clear", "conversation cleared"),
            (f"/load {seat.home}/a", "loaded 1 answered turn"),
        ):
            chat.expect(PROMPT)
            chat.type(f"{typed}\r")
            chat.expect(answered)
        chat.expect(PROMPT)
        chat.type('"""two\rlines"""\r')
        chat.expect("Paris")
        chat.expect(PROMPT)
        chat.type("\x04")
        words_of(chat.end())
        assert chat.process.returncode == 0
        assert len(supervisor.got(Generate)) == 2


# ---------------------------------------------------------------- D9: waiting


@moment("D9 `stop` says for whom it waits")
def stop_waits(seat: Seat) -> None:
    with Daemon({"m": fake(fake={"step_s": 0.02})}) as daemon, daemon.client() as client:
        pid = wait_for_state(client, "m", "READY")["pid"]
        assert daemon.process is not None
        running = Reader(client, "m", "runs", max_tokens=4000).started()
        with seat.terminal("stop", "--endpoint", daemon.endpoint) as stopping:
            stopping.expect(
                f"waiting for m (pid {pid}), the daemon (pid {daemon.process.pid}) (1s so far)"
            )
            running.stream.cancel()
            shown = words_of(stopping.end())
            assert stopping.process.returncode == 0
        assert shown.endswith(f"stopped the daemon (pid {daemon.process.pid}) and 1 worker")


@moment("D9 `status --watch | head -1` ends")
def watched_by_head(seat: Seat) -> None:
    with Daemon({"m": fake(preload=False)}) as daemon:
        line = " ".join(command("status", "--watch", "--endpoint", daemon.endpoint))
        with Program("sh", "-c", f"{line} | head -1", **seat.variables) as shell:
            shown = words_of(shell.end())
            assert shell.process.returncode == 0
        assert shown.startswith("m: STOPPED") or "MODEL" in shown


# ---------------------------------------------------------------- the table


@pytest.mark.parametrize("name", MOMENTS)
def test_a_worst_moment_is_none_any_longer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="mlxsup-t-", dir="/tmp") as home:
        monkeypatch.chdir(home)
        MOMENTS[name](Seat(Path(home), NARROW))
        monkeypatch.undo()
