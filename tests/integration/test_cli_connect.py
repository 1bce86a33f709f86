"""`mlxsup connect`: what it prints, and a real program that uses it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cli.cli import ESCAPE, run_cli
from support.daemon.daemon import Daemon, fake
from support.gateway.http_daemon import HttpDaemon
from support.gateway.json_schemas import problems


@pytest.fixture(scope="module")
def daemon() -> Iterator[HttpDaemon]:
    cold = fake(fake={"context_length": 77_000}, preload=False)
    cold |= {"aliases": ["frozen"], "presets": {"high": {"temperature": 1.0}}}
    gone = {"path": "/nowhere/at/all", "preload": False}
    with HttpDaemon({"cold": cold, "m": fake(), "gone": gone}) as running:
        with running.client() as client:
            client.load("m")
        yield running


def connect(
    daemon: Daemon, home: Path, tool: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Runs the command with another home folder."""
    where = ["--endpoint", daemon.endpoint]
    config = str(home / ".config")
    return run_cli(
        "connect", tool, *arguments, *where, HOME=str(home), XDG_CONFIG_HOME=config
    )  # fmt: skip


@pytest.mark.parametrize("tool", ["vscode", "zed"])
def test_settings_are_printed_and_nothing_is_written(
    daemon: HttpDaemon, tmp_path: Path, tool: str
) -> None:
    done = connect(daemon, tmp_path, tool)
    assert done.returncode == 0
    assert daemon.url in done.stdout + done.stderr
    assert "then: " in done.stderr
    assert not ESCAPE.search(done.stdout + done.stderr)
    assert list(tmp_path.iterdir()) == []
    line = connect(daemon, tmp_path, tool, "--json").stdout
    assert problems(line, ["connect"]) == []
    value = json.loads(line)
    assert (value["tool"], value["schema_version"]) == (tool, 1)
    assert value["usage"]


def test_models_are_those_of_the_daemon(daemon: HttpDaemon, tmp_path: Path) -> None:
    done = connect(daemon, tmp_path, "vscode", "--model", "frozen:high")
    [provider] = json.loads(done.stdout)
    assert [one["name"] for one in provider["models"]] == ["frozen:high", "cold", "m", "gone"]
    first = provider["models"][0]
    assert (first["maxInputTokens"], first["maxOutputTokens"]) == (77_000 - 8192, 8192)
    assert "choose m " in connect(daemon, tmp_path, "vscode").stderr


@pytest.mark.parametrize(
    ("arguments", "status", "code"),
    [
        ("emacs", 64, "usage"),
        ("zed --model clod", 1, "unknown_model"),
    ],
)
def test_refusals_have_their_codes(
    daemon: HttpDaemon, tmp_path: Path, arguments: str, status: int, code: str
) -> None:
    done = connect(daemon, tmp_path, *arguments.split(), "--json")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"], bool(error["hint"])) == (status, code, True)


def test_key_of_programs_is_shown_and_a_public_address_is_reached_at_loopback(
    tmp_path: Path,
) -> None:
    daemon = HttpDaemon({"m": fake()})
    daemon.listen = "0.0.0.0:0"
    key = run_cli("key", "new", "tool", "--config", str(daemon.config)).stdout.strip()
    with daemon:
        missing = connect(daemon, tmp_path, "vscode")
        as_json = connect(daemon, tmp_path, "vscode", "--json").stdout
        keys = daemon.config.with_name("config.keys.json")
        keys.with_name("config.launch-key").write_text(f"{key}\n")
        keys.with_name("config.launch-key").chmod(0o600)
        given = connect(daemon, tmp_path, "vscode")
        keys.chmod(0o644)
        unusable = connect(daemon, tmp_path, "vscode")
    assert f'"apiKey": "{key}"' in given.stdout
    assert f"http://127.0.0.1:{daemon.address[1]}/v1/" in given.stdout
    assert "in place of KEY" not in given.stderr
    assert (unusable.returncode, "chmod 600" in unusable.stderr) == (1, True)
    assert (missing.returncode, '"apiKey": "KEY"' in missing.stdout) == (0, True)
    assert "in place of KEY: `mlxsup key new vscode` makes one" in missing.stderr
    assert json.loads(as_json)["is_key_missing"] is True
