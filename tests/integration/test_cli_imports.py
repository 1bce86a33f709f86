"""What a command imports before its first output: that is most of the time it takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mlxsup.protocol.client_messages import StatusQuery
from mlxsup.protocol.message import Message

from support.cli.cli import environment
from support.client.scripted_supervisor import Peer, answer, scripted_supervisor

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
    "asyncio", "email.message", "hashlib", "httpx2", "huggingface_hub",
    "importlib.metadata", "importlib.util", "logging", "mlx", "msgpack", "numpy", "prompt_toolkit",
    "psutil", "pydantic", "rich", "secrets", "selectors", "socket", "subprocess",
    "tomlkit", "tomllib", "zmq",
    "mlxsup.client", "mlxsup.gateway", "mlxsup.store", "mlxsup.supervisor", "mlxsup.worker",
    *(f"mlxsup.protocol.{name}" for name in (
        "body", "client_messages", "codec", "download", "errors", "flight", "gateway", "group",
        "launch", "parameters", "pooling",
    )),
}  # fmt: skip
"""What only a command that needs it may import; of ours what defines many classes, too, each of
which takes a millisecond."""

CODE = """
import sys
from mlxsup.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print("\\n" + " ".join(sys.modules))
"""


def imported(
    folder: Path, *arguments: str, status: int | None = None, code: str = CODE
) -> set[str]:
    """The modules that a command has imported when it ends.

    Args:
        folder: its home and working folder, in which it finds no daemon.
        arguments: its command line.
        status: what it has to exit with; None: anything.
        code: runs it, and prints the modules in the last line.
    """
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(HOME=str(folder)),
        timeout=60,
        check=False,
    )
    assert status in (None, done.returncode), done.stderr
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("arguments", [["-h"], ["--version"], ["nonsense"]])
def test_what_needs_no_command_imports_none(tmp_path: Path, arguments: list[str]) -> None:
    found = imported(tmp_path, *arguments)
    assert {name for name in found if name.split(".")[0] == "mlxsup"} == BARE
    assert found & (HEAVY | {"json"}) == set()


def test_no_help_of_a_command_waits_for_what_the_command_needs(tmp_path: Path) -> None:
    code = """
import sys
from mlxsup.cli.command_table import COMMANDS, load
for name in COMMANDS:
    load(name)
print(*sys.modules)
"""
    assert imported(tmp_path, status=0, code=code) & HEAVY == set()


CLIENT = {
    "msgpack", "selectors", "socket", "zmq", "mlxsup.client",
    *(f"mlxsup.protocol.{name}" for name in (
        "client_messages", "codec", "errors", "parameters", "pooling",
    )),
}  # fmt: skip


def test_what_asks_a_daemon_imports_no_more_than_a_client(tmp_path: Path, path: Path) -> None:
    # psutil, which imports subprocess, only tells who holds the lock if nothing answers.
    assert imported(tmp_path, "status", status=69) & HEAVY <= CLIENT | {"psutil", "subprocess"}

    def script(peer: Peer, message: Message) -> None:
        if isinstance(message, StatusQuery):
            answer(peer, message, models=[{"name": "m", "state": "READY"}])

    with scripted_supervisor(path, script) as supervisor:
        found = imported(tmp_path, "status", "--endpoint", supervisor.endpoint, status=0)
    assert found & HEAVY <= CLIENT, "a table needs no rich"


@pytest.mark.parametrize("words", [("config", "check"), ("plan", "--config")])
def test_configuration_is_read_without_what_only_a_daemon_needs(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[models.a]\nengine = "fake"\n')
    found = imported(tmp_path, *words, str(file), status=0)
    assert found & {"asyncio", "psutil", "rich", "tomlkit", "zmq"} == set()
