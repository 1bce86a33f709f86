"""What `logs`, a terminal and broken outputs show, against a scripted supervisor."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest

from support.cli_daemon import TIME_LIMIT_S, at, command, environment, mlxsup
from support.scripted_supervisor import (
    ScriptedSupervisor,
)


def test_logs_of_one_and_of_all(supervisor: ScriptedSupervisor, folder: Path) -> None:
    (folder / "smollm2.log.1").write_text("--- generation 1\nold\n")
    (folder / "smollm2.log").write_text("\x1b[31mnew\x1b[0m\n")
    (folder / "qwen.log").write_text("other\n")
    (folder / "mlxsup.log").write_text("daemon\n")
    assert at(supervisor, "logs", "smollm2").stdout == "--- generation 1\nold\nnew\n"
    assert at(supervisor, "logs", "smollm2", "-n", "1").stdout == "new\n"
    assert at(supervisor, "logs", "-n", "1").stdout == "smollm2 | new\nqwen    | other\n"
    assert at(supervisor, "logs", "mlxsup").stdout == "daemon\n"
    lines = at(supervisor, "logs", "qwen", "--json").stdout.splitlines()
    assert json.loads(lines[0]) == {"schema_version": 1, "model": "qwen", "line": "other"}


def test_logs_without_a_daemon_come_from_the_configuration(folder: Path) -> None:
    config = folder / "mlxsup.toml"
    config.write_text('[supervisor]\nruntime_dir = "run"\nlog_dir = "logs"\n[models.m]\npath="m"\n')
    (folder / "logs").mkdir()
    (folder / "logs" / "m.log").write_text("last words\n")
    done = mlxsup("logs", "m", "--config", str(config))
    assert (done.returncode, done.stdout) == (0, "last words\n")


def test_logs_follow_across_rotation_until_interrupted(
    supervisor: ScriptedSupervisor, folder: Path
) -> None:
    log = folder / "smollm2.log"
    log.write_text("a\n")
    process = subprocess.Popen(
        command("logs", "smollm2", "-f", "--endpoint", supervisor.endpoint),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"a\n"
    log.rename(folder / "smollm2.log.1")
    log.write_text("--- generation 2\n")
    assert process.stdout.readline() == b"--- generation 2\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIME_LIMIT_S)
    assert (process.returncode, out, err) == (130, b"", b"")


def run_in_terminal(arguments: list[str], **variables: str) -> str:
    """What a command writes to a terminal of 80 columns."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        command(*arguments),
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment(**({"COLUMNS": "80", "TERM": "xterm"} | variables)),
    )
    os.close(follower)
    output = b""
    while True:
        try:
            block = os.read(leader, 65536)
        except OSError:
            # Linux says so when the last process has closed the terminal.
            break
        if not block:
            break
        output += block
    os.close(leader)
    process.wait(TIME_LIMIT_S)
    return output.decode().replace("\r\n", "\n")


def test_terminal_has_colour_unless_it_is_not_wanted(supervisor: ScriptedSupervisor) -> None:
    arguments = ["status", "--endpoint", supervisor.endpoint]
    assert "\x1b[32mREADY" in run_in_terminal(arguments)
    for plain in (
        run_in_terminal(arguments, NO_COLOR="1"),
        run_in_terminal(arguments, TERM="dumb"),
        run_in_terminal([*arguments, "--no-color"]),
    ):
        assert "\x1b" not in plain
        assert max(map(len, plain.splitlines())) <= 80


def test_generate_ends_its_line_on_a_terminal_only(supervisor: ScriptedSupervisor) -> None:
    arguments = ["generate", "smollm2", "x", "--endpoint", supervisor.endpoint]
    assert run_in_terminal(arguments) == "Hällo wörld\n"
    done = run_in_terminal(["generate", "qwen", "x", "--endpoint", supervisor.endpoint])
    assert done.startswith("one two\n")


def test_output_that_cannot_be_written_is_an_error_in_a_sentence(
    supervisor: ScriptedSupervisor,
) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no device that is always full")
    for arguments in (["--version"], ["status", "--endpoint", supervisor.endpoint]):
        with full.open("wb") as output:
            done = subprocess.run(
                command(*arguments),
                stdout=output,
                stderr=subprocess.PIPE,
                env=environment(),
                timeout=TIME_LIMIT_S,
                check=False,
            )
        assert done.returncode == 1
        assert done.stderr.startswith(b"error: cannot write the output: ")
        assert done.stderr.count(b"\n") == 1
