"""The command line's conventions that need no daemon: its absence, mistakes, help."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from mlxsup.cli.main import main, root

from support.cli import run_cli

DAEMON_COMMANDS = [
    ["status"],
    ["status", "--watch"],
    ["events"],
    ["load", "m"],
    ["unload", "m"],
    ["restart", "m"],
    ["prioritize", "x", "batch"],
    ["requests"],
    ["requests", "-f"],
    ["why"],
    ["why", "m"],
    ["why", "m", "--report", "/nowhere/r.tar.gz"],
    ["attach", "r"],
    ["cancel", "r"],
    ["pause", "r"],
    ["resume", "r"],
    ["generate", "m", "x"],
    ["chat", "m"],
    ["logs", "m"],
    ["connect", "zed"],
    ["reload"],
    ["log-level", "debug"],
    ["stop"],
]


WRONG_ENDPOINT = "--endpoint may be wrong: a daemon prints its endpoint when it starts"


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("arguments", DAEMON_COMMANDS, ids=" ".join)
@pytest.mark.parametrize("is_json", [False, True])
def test_without_a_daemon_every_command_exits_69(
    tmp_path: object, arguments: list[str], is_json: bool
) -> None:
    endpoint = "ipc:///tmp/mlxsup-nobody/client.sock"
    done = run_cli(*arguments, *(["--json"] if is_json else []), "--endpoint", endpoint)
    assert done.returncode == 69
    if is_json:
        error = json.loads(done.stdout)["error"]
        assert (error["code"], done.stderr) == ("connection_lost", "")
        assert error["hint"] == WRONG_ENDPOINT
    else:
        assert done.stdout == ""
        assert done.stderr.splitlines() == [
            f"error: no daemon answers at {endpoint}",
            f"hint: {WRONG_ENDPOINT}",
        ]


USAGE: list[list[str]] = [
    ["staus"],
    ["status", "--wacht"],
    ["status", "extra"],
    ["why", "one", "two"],
    ["load"],
    ["chat", "m", "--max-tokens", "many"],
    ["generate", "m", "x", "--timeout", "soon"],
    ["logs", "--since", "soon"],
    ["top", "--interval", "soon"],
    ["logs", "-n", "-1"],
    ["logs", "m", "-f", "--previous"],
    ["stop", "--timeout", "soon"],
    ["completion", "tcsh"],
    ["config", "nonsense"],
    ["key", "new"],
    ["key", "new", "not a name"],
    ["key", "new", "a", "--account", "*"],
    ["convert"],
    ["convert", "x", "--bits", "7"],
    ["show"],
    ["doctor", "m"],
    ["doctor", "--output", "figures.json"],
    ["log-level"],
    ["connect"],
    ["completion"],
    ["start", "--model", "a", "--config", "b"],
    ["start", "--model", "x/a", "--model", "y/a"],
    ["start", "--model", "not a name"],
    ["events", "--endpoint", "tcp://127.0.0.1:1"],
]


@pytest.mark.parametrize("arguments", USAGE, ids=" ".join)
def test_usage_errors_exit_64_with_a_hint(arguments: list[str]) -> None:
    done = run_cli(*arguments)
    assert (done.returncode, done.stdout) == (64, "")
    lines = done.stderr.splitlines()
    assert lines[0].startswith("error: ")
    if "tcp://127.0.0.1:1" not in arguments:
        assert len(lines) == 2
        assert lines[1].startswith("hint: ")
    done = run_cli(*arguments, "--json")
    assert (done.returncode, done.stderr) == (64, "")
    assert json.loads(done.stdout)["error"]["code"] == "usage"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["generate", "m", "--max-tokens"], "see `mlxsup generate -h`"),
        (["generate", "m", "--json=1", "x"], "see `mlxsup generate -h`"),
        (["config", "check", "--json=1", "x"], "see `mlxsup config check -h`"),
        (["--help=1", "status"], "see `mlxsup -h`"),
    ],
)
def test_hints_of_usage_errors_name_the_command(arguments: list[str], hint: str) -> None:
    done = run_cli(*arguments)
    assert done.returncode == 64
    assert done.stderr.splitlines()[1:] == [f"hint: {hint}"]


def test_a_client_without_a_name_is_a_wrong_option() -> None:
    done = run_cli("requests", "--client", "")
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr.splitlines() == [
        "error: --client takes at least one character, not an empty string",
        "hint: see `mlxsup requests -h`",
    ]


@pytest.mark.parametrize("option", ["--json", "--endpoint", "-f"])
def test_an_option_before_the_command_is_told_to_follow_it(option: str) -> None:
    done = run_cli(option, "status", "--no-color")
    assert (done.returncode, done.stdout[:1]) == (64, "{" if option == "--json" else "")
    text = done.stdout + done.stderr
    assert "did you mean" not in text.lower()
    assert f"options follow the command: `mlxsup COMMAND {option}`" in text


def test_a_mistyped_option_of_mlxsup_itself_has_a_suggestion() -> None:
    assert "Did you mean '--version'?" in run_cli("--versoin").stderr


INTERRUPTED_IMPORT = """
import signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "mlxsup.cli.main":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
from mlxsup.cli.__main__ import run
run()
"""


def test_an_interrupt_before_a_command_has_begun_ends_it_without_a_word() -> None:
    command_line = [sys.executable, "-c", INTERRUPTED_IMPORT, "status"]
    done = subprocess.run(command_line, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


# ---------------------------------------------------------------- help


def levels(command: click.Command, path: list[str]) -> Iterator[list[str]]:
    yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from levels(child, [*path, name])


ALL_LEVELS = list(levels(root, []))


@pytest.mark.parametrize("path", ALL_LEVELS, ids=" ".join)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_on_every_level_has_an_example_first(
    path: list[str], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*path, flag])
    assert caught.value.code == 0
    usage, example = capsys.readouterr().out.split("\n\n")[:2]
    assert usage.startswith("Usage: ")
    assert example.strip().startswith("Example: ")
    assert "mlxsup" in example


def test_every_command_takes_json() -> None:
    for path in ALL_LEVELS:
        command: click.Command = root
        for name in path:
            assert isinstance(command, click.Group)
            child = command.get_command(click.Context(command), name)
            assert child is not None
            command = child
        if not isinstance(command, click.Group):
            assert "is_json" in {parameter.name for parameter in command.params}, path
