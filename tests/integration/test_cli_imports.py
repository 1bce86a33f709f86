"""What a command imports before its first output: that is most of the time it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.cli import environment
from support.hub_caches import write_folder

BARE = {
    "mlxsup",
    "mlxsup.cli",
    "mlxsup.cli.command_table",
    "mlxsup.cli.exit_status",
    "mlxsup.cli.main",
    "mlxsup.cli.terminal",
    "mlxsup.cli.terminal.output",
    "mlxsup.cli.terminal.writer",
    "mlxsup.protocol",
    "mlxsup.protocol.text",
    "mlxsup.protocol.version",
}
"""What everything needs: each of these is paid for by every command."""

HEAVY = {
    "asyncio", "email.message", "huggingface_hub", "importlib.metadata", "msgpack", "mlx", "numpy",
    "psutil", "pydantic", "rich", "subprocess", "zmq",
    "mlxsup.client", "mlxsup.protocol.client_messages", "mlxsup.protocol.codec",
    "mlxsup.supervisor", "mlxsup.worker", "mlxsup.gateway",
}  # fmt: skip
"""What only a command that needs it may import."""

CODE = """
import json, sys
from mlxsup.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print("\\n" + json.dumps(sorted(sys.modules)))
"""


def imported(folder: Path, *arguments: str, status: int | None = None) -> set[str]:
    """The modules that a command has imported when it ends.

    Args:
        folder: its home and working folder, in which it finds no daemon.
        arguments: its command line.
        status: what it has to exit with; None: anything.
    """
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(HOME=str(folder)),
        timeout=60,
        check=False,
    )
    assert status in (None, done.returncode), done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("arguments", [["-h"], ["--version"], ["help"], ["nonsense"], []])
def test_what_needs_no_command_imports_none(tmp_path: Path, arguments: list[str]) -> None:
    found = imported(tmp_path, *arguments)
    assert {name for name in found if name.split(".")[0] == "mlxsup"} == BARE
    assert found & HEAVY == set()


@pytest.mark.parametrize(
    "arguments",
    [
        ["config", "path"],
        ["key", "list"],
        ["completion", "bash"],
        ["status", "-h"],
        ["doctor", "-h"],
        ["start", "-h"],
        ["service", "install", "-h"],
        ["generate", "-h"],
        ["start", "--config", "nowhere.toml"],
    ],
    ids=" ".join,
)
def test_what_asks_no_daemon_imports_no_client(tmp_path: Path, arguments: list[str]) -> None:
    assert imported(tmp_path, *arguments) & HEAVY == set()


@pytest.mark.parametrize(
    "arguments",
    [["config", "schema"], ["models"], ["show", "m"], ["init", "new.toml"]],
    ids=" ".join,
)
def test_what_looks_at_models_checks_no_configuration(tmp_path: Path, arguments: list[str]) -> None:
    write_folder(tmp_path / ".mlxsup" / "models" / "m")
    found = imported(tmp_path, *arguments, status=0)
    assert found & (HEAVY - {"mlxsup.supervisor"}) == set()
    assert {name for name in found if name.startswith("mlxsup.supervisor.config.")} <= {
        "mlxsup.supervisor.config.entry_text"
    }


@pytest.mark.parametrize("arguments", [["plan", "--config"], ["config", "check"]], ids=" ".join)
def test_what_checks_a_configuration_imports_what_checks_it(
    tmp_path: Path, arguments: list[str]
) -> None:
    (tmp_path / "file.toml").write_text('[models.m]\nengine = "fake"\n')
    found = imported(tmp_path, *arguments, "file.toml", status=0)
    # pydantic looks for its plugins with importlib.metadata, which parses them as e-mails.
    checking = {"pydantic", "importlib.metadata", "email.message", "mlxsup.supervisor"}
    # Another process looks at the folders, and a loop waits for it.
    assert checking <= found & HEAVY <= checking | {"asyncio", "psutil", "subprocess"}
    assert "mlxsup.protocol.worker_messages" not in found


def test_what_asks_a_daemon_imports_no_more_than_a_client(tmp_path: Path) -> None:
    found = imported(tmp_path, "status")
    allowed = {"zmq", "msgpack", "mlxsup.client", "mlxsup.protocol.client_messages"}
    # psutil, which imports subprocess, only tells who holds the lock if nobody answers.
    assert found & HEAVY <= allowed | {"mlxsup.protocol.codec", "psutil", "subprocess"}


def test_completing_a_model_imports_a_client_and_nothing_that_shows(tmp_path: Path) -> None:
    (tmp_path / "mlxsup.toml").write_text('[models.alpha]\nengine = "fake"\n')
    answers, found = completing(tmp_path, "mlxsup load al")
    allowed = {"zmq", "msgpack", "mlxsup.client", "mlxsup.protocol.client_messages"}
    assert answers == ["plain,alpha"]
    assert found & HEAVY <= allowed | {"mlxsup.protocol.codec"}
    assert "mlxsup.cli.terminal.status_table" not in found


def test_completing_a_command_imports_none(tmp_path: Path) -> None:
    answers, found = completing(tmp_path, "mlxsup sta")
    assert answers == ["plain,start", "plain,status"]
    assert {name for name in found if name.split(".")[0] == "mlxsup"} == BARE


def completing(folder: Path, words: str) -> tuple[list[str], set[str]]:
    """What a shell is answered for the last word, and the modules imported for that."""
    code = CODE.replace("main(sys.argv[1:])", "main([])")
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(
            HOME=str(folder),
            _MLXSUP_COMPLETE="bash_complete",
            COMP_WORDS=words,
            COMP_CWORD=str(words.count(" ")),
        ),
        timeout=60,
        check=False,
    )
    *answers, modules = done.stdout.splitlines()
    return [answer for answer in answers if answer], set(json.loads(modules))
