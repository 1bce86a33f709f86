"""A command that has nowhere to write says so, and does nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support.cli import command, environment

LIMIT_S = 60.0


def in_shell(line: str, closed: str, **variables: str) -> subprocess.CompletedProcess[str]:
    words = " ".join(command(*line.split()))
    return subprocess.run(
        f"{words} {closed}",
        shell=True,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.parametrize("line", ["--version", "status --json", "config schema", "stop --now"])
def test_a_closed_standard_output_is_an_error_that_says_so(line: str) -> None:
    done = in_shell(line, ">&-")
    assert done.returncode == 1
    assert done.stderr == (
        "error: standard output is closed: nothing was done\n"
        "hint: discard what it prints with `>/dev/null`\n"
    )


def test_nothing_is_written_by_a_command_that_cannot_say_so(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    done = in_shell(f"start --model {tmp_path}/m --save {tmp_path}/c.toml", ">&-")
    assert done.returncode == 1
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_with_both_closed_there_is_the_exit_code() -> None:
    assert in_shell("--version", ">&- 2>&-").returncode == 1


def test_a_closed_standard_input_or_error_changes_nothing() -> None:
    done = in_shell("--version", "<&- >/dev/null")
    assert (done.returncode, done.stderr) == (0, "")
    assert in_shell("--version", "2>&- >/dev/null").returncode == 0
