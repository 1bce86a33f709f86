"""A hostile model, client and files, through every command on a terminal (P31)."""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlxsup.client import RequestError
from mlxsup.client.connection import RequestIds
from mlxsup.protocol.ids import RequestId

from support.cli.cli import PROMPT, Terminal, run_cli
from support.cli.command_tree import Leaf, leaves
from support.cli.full_screen import Script
from support.cli.played_service_managers import PlayedServiceManagers
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, wait_for_state
from support.eventually import eventually
from support.models.tiny_model import make_tiny_model

WORD = "PWNED"
"""Shows that a hostile text was written, however it was neutralised."""

EVIL = f"\x1b]0;{WORD}\x07\x1b[2J\x9b35m\u202e\u2066\u200f\u061c\U000e0041\x7f\x85\x08\x1b[35m\x1bc"
"""A title, a cleared screen, colours, a reset and an order of reading; nothing ends a line."""

OWN = re.compile(
    r"\x1b\[(?:0|1|2|4|7|22|31|32|33|36)?(?:;(?:1|2|7|31|32|33))*m"
    r"|\x1b\[0;38;5;102m|\x1b\[\?(?:1|7|12)[hl]|\x08(?=\x1b\[(?:2C|\d+A))"  # of prompt_toolkit
    r"|\r?\x1b\[(?:\d+A\r?|K|J|H)|\r"
    r"|\x1b\[\?(?:1049|25|2004)[hl]|\x1b\[\d*[CDP@]"
)
"""The sequences that `Output`, prompt_toolkit and readline write."""


def acting(seen: str) -> list[str]:
    """Return the signs that a terminal acts on, besides our own sequences and line breaks."""
    left = OWN.sub("", seen)
    kinds = ("Cc", "Cf", "Zl", "Zp")
    return [c for c in left if unicodedata.category(c) in kinds and c not in "\n\t"]


def unknown_type(folder: Path) -> Path:
    """A model whose type is hostile: it cannot be loaded."""
    return make_tiny_model(folder, config={"model_type": EVIL, "architectures": [EVIL]})


def raising_template(folder: Path) -> Path:
    """A model that loads, and whose chat template refuses each conversation in hostile words.

    Its text has half a surrogate pair, too, which no message between processes can contain.
    """
    make_tiny_model(folder)
    path = folder / "tokenizer_config.json"
    value = json.loads(path.read_text())
    value["chat_template"] = "{{ raise_exception(" + json.dumps(f"{EVIL}\ud800") + ") }}"
    path.write_text(json.dumps(value))
    return folder


CTRL_C, CTRL_D, CLEAR, UP = "\x03", "\x04", "\x15", "\x1b[A"
LOAD = "load"
"""Typed by nobody: the model with the hostile type is loaded again, and fails."""

ENDLESS = 4000
REQUEST = f"x{EVIL}"[:100]
WRONG_FILE = (
    '[supervisor]\n"\\u001b]0;PWNED\\u0007\\u009b2J\\u202e" = 1\n[models.m]\nengine = "fake"\n'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One command on a terminal.

    Attributes:
        arguments: `CONFIG`, `WRONG`, `EVIL` and so on stand for what `filled` says.
        keys: what is typed, each after a text that has been shown.
        shows: whether hostile text is shown, neutralised.
        keeps: marks that an answer may have, because languages need them.
    """

    arguments: tuple[str, ...]
    keys: tuple[tuple[str, str], ...] = ()
    shows: bool = True
    keeps: str = ""


def once(*arguments: str, shows: bool = True, keeps: str = "") -> Try:
    return Try(arguments=arguments, shows=shows, keeps=keeps)


TRIED: Mapping[Leaf, tuple[Try, ...]] = {
    ("start",): (
        Try(arguments=("start", "--config", "OTHER"), keys=((WORD, CTRL_C),)),
        once("start", "--config", "WRONG"),
        once("start", "--model", "EVIL"),
    ),
    ("stop",): (once("stop", "--endpoint", "ENDPOINT"),),
    ("status",): (
        once("status"),
        once("status", "--debug"),
        once("status", "--json"),
        Try(arguments=("status", "--watch"), keys=((WORD, CTRL_C),)),
    ),
    ("top",): (
        Try(arguments=("top",), keys=((WORD, "q"),)),
        Try(arguments=("top", "--json"), keys=((WORD, CTRL_C),)),
    ),
    ("events",): (Try(arguments=("events",), keys=(("Ctrl-C to stop", LOAD), (WORD, CTRL_C))),),
    ("why",): (once("why"), once("why", "wrong"), once("why", "--json"), once("why", "REQUEST")),
    ("load",): (once("load", "wrong"),),
    ("unload",): (once("unload", "EVIL"),),
    ("restart",): (once("restart", "wrong"),),
    ("wait",): (once("wait", "wrong"),),
    ("requests",): (
        once("requests"),
        once("requests", "--json"),
    ),
    ("attach",): (
        Try(arguments=("attach", "REQUEST"), keys=((" ", CTRL_C),)),
        once("attach", "EVIL"),
    ),
    ("cancel",): (once("cancel", "EVIL"), once("cancel", "nobody")),
    ("pause",): (once("pause", "REQUEST"),),
    ("resume",): (once("resume", "REQUEST"),),
    ("prioritize",): (once("prioritize", "REQUEST", "batch"), once("prioritize", "x", "EVIL")),
    ("reload",): (once("reload"),),
    ("generate",): (
        once("generate", "raising", "hello"),
        once("generate", "raising", "hello", "--json"),
        once("generate", "quick", "SAY", "--max-tokens", "200", keeps="\u200f\u061c"),
        once("generate", "EVIL", "hello"),
    ),
    ("chat",): (
        Try(
            arguments=("chat", "raising"),
            keys=((PROMPT, "hello\n"), (WORD, ""), (PROMPT, CTRL_D)),
        ),
    ),
    ("logs",): (
        once("logs", "wrong"),
        once("logs"),
        once("logs", "mlxsup"),
        once("logs", "wrong", "--json"),
    ),
    ("doctor",): (once("doctor", "--config", "WRONG"),),
    ("connect",): (once("connect", "EVIL"),),
    ("launch",): (once("launch", "EVIL"),),
    ("bench",): (once("bench", "EVIL"),),
    ("demo",): (once("demo", "--config", "OTHER"),),
    ("run",): (once("run", "EVIL"),),
    ("search",): (once("search", shows=False),),
    ("embed",): (once("embed", "EVIL", "hello"), once("embed", "raising", "hello", shows=False)),
    ("add",): (once("add", "EVIL"), once("add", "FOLDER")),
    ("pull",): (once("pull", "EVIL"),),
    ("rm",): (once("rm", "EVIL"),),
    ("hosts", "check"): (once("hosts", "check", "--config", "WRONG"),),
    ("plan",): (once("plan", "--config", "OTHER"), once("plan", "--config", "WRONG")),
    ("models",): (once("models"), once("models", "--json")),
    ("show",): (once("show", "FOLDER"), once("show", "FOLDER", "--json"), once("show", "EVIL")),
    ("init",): (once("init", "NEW"),),
    ("convert",): (once("convert", "FOLDER", "NEW"), once("convert", "EVIL")),
    ("key", "new"): (once("key", "new", "EVIL", shows=False),),
    ("key", "list"): (once("key", "list", shows=False),),
    ("key", "revoke"): (once("key", "revoke", "EVIL"),),
    ("key", "off"): (once("key", "off", "--yes", shows=False),),
    ("config", "check"): (once("config", "check", "WRONG"), once("config", "check", "EVIL")),
    ("config", "get"): (once("config", "get", "EVIL", "--config", "OTHER"),),
    ("config", "set"): (
        once("config", "set", "defaults.preload", "EVIL", "--config", "OTHER"),
        once("config", "set", "EVIL", "1", "--config", "OTHER"),
    ),
    ("config", "unset"): (once("config", "unset", "EVIL", "--config", "OTHER"),),
    ("config", "path"): (once("config", "path", "--config", "EVIL"),),
    ("config", "schema"): (once("config", "schema", shows=False), once("config", "schema", "EVIL")),
    ("service", "install"): (once("service", "install", "--config", "WRONG"),),
    ("service", "uninstall"): (once("service", "uninstall", "EVIL"),),
    ("service", "status"): (once("service", "status"),),
    ("completion",): (once("completion", "EVIL"),),
}
"""Every command that does something; one that is missing here fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What all commands run on.

    Attributes:
        daemon: with the hostile models and requests.
        files: what the words of command lines stand for.
        variables: of the environment.
    """

    daemon: Daemon
    files: Mapping[str, str]
    variables: Mapping[str, str]

    def on_terminal(self, one: Try) -> str:
        """All that a command writes to a terminal of many columns."""
        if one.arguments[0] == "reload":
            self.daemon.config.write_text(WRONG_FILE)
        arguments = [self.files.get(word, word) for word in one.arguments]
        has_own_daemon = one.arguments[0] == "start" or "--config" in arguments
        found = {} if has_own_daemon else {"MLXSUP_ENDPOINT": self.daemon.endpoint}
        with Terminal(*arguments, COLUMNS="200", **self.variables, **found) as terminal:
            for text, keys in one.keys:
                terminal.expect(text)
                if keys == LOAD:
                    with self.daemon.client() as client, pytest.raises(RequestError):
                        client.load("wrong")
                elif keys == CTRL_C:
                    terminal.interrupt()
                else:
                    terminal.type(keys)
            return terminal.end()


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    """A daemon with hostile models, and a client whose requests have hostile names."""
    models = {
        "slow": fake(fake={"step_s": 0.2}),
        "quick": fake(),
        "wrong": {"path": "wrong", "preload": True},
        "raising": {"path": "raising", "preload": True},
    }
    daemon = Daemon(models, {"log_level": "debug"})
    home = daemon.folder / "home"
    folder = home / ".mlxsup" / "models" / f"found{EVIL}"
    for path in (daemon.folder / "wrong", folder):
        unknown_type(path)
    raising_template(daemon.folder / "raising")
    played = PlayedServiceManagers(made(daemon.folder / "played"))
    (daemon.folder / "evil").write_text(f"ActiveState=active\nStatusText={EVIL}\n")
    played.answer("systemctl.show", f"cat {daemon.folder}/evil")
    other = daemon.folder / "other.toml"
    other.write_text(
        f'[supervisor]\nruntime_dir = "{daemon.folder}/other"\nlog_dir = "{daemon.folder}/other"\n'
        f'[models.wrong]\npath = "{daemon.folder}/wrong"\npreload = true\n'
    )
    wrong = daemon.folder / "wrong.toml"
    wrong.write_text(WRONG_FILE)
    files = {
        "EVIL": EVIL,
        "REQUEST": REQUEST,
        "SAY": f"[[say {EVIL}]]",
        "OTHER": str(other),
        "WRONG": str(wrong),
        "FOLDER": str(folder),
        "ENDPOINT": f"ipc://{daemon.folder}/{EVIL[:20]}/client.sock",
    }
    variables = {
        "HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "PATH": f"{daemon.folder}/played/bin:{os.environ['PATH']}",
    }
    installed = run_cli("service", "install", "--config", str(other), **variables)
    assert installed.returncode == 0, installed.stderr
    with daemon, daemon.client() as client:
        wait_for_state(client, "wrong", "FAILED")
        wait_for_state(client, "raising", "READY")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RequestIds, "next", lambda _: RequestId(REQUEST))
            reader = Reader(client, "slow", "hello", client=EVIL, max_tokens=ENDLESS)
        reader.has_started.wait(60)
        yield Ground(daemon=daemon, files=files, variables=variables)
        reader.stream.cancel()


def made(folder: Path) -> Path:
    """The folder, newly made."""
    folder.mkdir()
    return folder


CASES = [(leaf, number) for leaf in leaves() for number in range(len(TRIED.get(leaf, "?")))]


@pytest.mark.parametrize(
    ("leaf", "number"), CASES, ids=[f"{' '.join(leaf)} {number}" for leaf, number in CASES]
)
def test_no_control_character_of_another_reaches_a_terminal_P31(
    ground: Ground, leaf: Leaf, number: int
) -> None:
    assert leaf in TRIED, "a command that is not tried with a hostile model"
    one = TRIED[leaf][number]
    seen = ground.on_terminal(one)
    assert set(acting(seen)) <= set(one.keeps), repr(seen)
    assert (WORD in seen) == one.shows, repr(seen)
    assert "Traceback" not in seen or leaf == ("logs",)


def test_an_earlier_turn_that_is_recalled_steers_no_terminal_P31(ground: Ground) -> None:
    history = Path(ground.variables["HOME"]) / ".mlxsup" / "history"
    history.write_text(f"+{EVIL}\n")
    keys = ((PROMPT, UP), (WORD, f"{CLEAR}{CTRL_D}"))
    seen = ground.on_terminal(Try(arguments=("chat", "quick"), keys=keys))
    assert set(acting(seen)) <= set("\u200f\u061c"), repr(seen)


WAYS = f"""
import sys, threading, warnings
from mlxsup.cli.terminal.writer import guard_streams
guard_streams()
evil = {EVIL!r}
print(evil, flush=True)
sys.stdout.writelines([evil, "\\n"])
sys.stderr.write(evil + "\\n")
warnings.warn(evil)
thread = threading.Thread(target=lambda: exec("raise ValueError(evil)"))
thread.start()
thread.join()
raise ValueError(evil)
"""


def test_no_way_to_the_streams_leads_around_the_writer_P31() -> None:
    with Script(WAYS) as terminal:
        seen = terminal.end()
    assert (acting(seen), seen.count(WORD)) == ([], 6), repr(seen)


def offering(asked: Mapping[str, str], offered: str) -> str | None:
    """Return what a shell is offered, once this is part of it."""
    done = run_cli(**asked).stdout
    return f"offered: {done}" if offered in done else None


def test_a_shell_is_offered_no_id_that_it_would_run_or_show_P31(ground: Ground) -> None:
    words = {"_MLXSUP_COMPLETE": "bash_complete", "MLXSUP_ENDPOINT": ground.daemon.endpoint}
    for command, offered in (("cancel", ""), ("load", "plain,slow\n")):
        asked = {**words, "COMP_WORDS": f"mlxsup {command} ", "COMP_CWORD": "2"}
        # A daemon has half a second to answer, which it may once miss.
        done = eventually(lambda: offering(asked, offered))  # noqa: B023
        assert WORD not in done


def test_the_files_of_the_logs_hold_none_of_it_either_P31(ground: Ground) -> None:
    ground.daemon.run("cancel", REQUEST)
    texts = {file.name: file.read_text() for file in ground.daemon.logs.iterdir() if file.is_file()}
    assert {"mlxsup.log", "wrong.log", "raising.log"} <= set(texts)
    assert {name: acting(text) for name, text in texts.items() if acting(text)} == {}
    assert WORD in texts["mlxsup.log"]
