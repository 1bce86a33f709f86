"""systemctl, loginctl and launchctl, played: they note what they are asked."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from support.cli.cli import check_plain, run_cli
from support.gateway.json_schemas import problems

PLAYED = """#!/bin/sh
name=$(basename "$0")
echo "$name $*" >> "{folder}/calls"
for word in "$@"; do
    [ -f "{folder}/answers/$name.$word" ] && {{
        . "{folder}/answers/$name.$word"
        exit
    }}
done
exit 0
"""

PROGRAMS = ("systemctl", "loginctl", "launchctl")

STATE = (
    "ActiveState=active\\nSubState=running\\nMainPID=4711\\nUnitFileState=enabled\\n"
    "StatusText=1 READY\\nExecMainStatus=0\\nNRestarts=2\\n"
)


class PlayedServiceManagers:
    """A home folder, and service managers that answer as a test says.

    Attributes:
        home: the user's home folder.
        config: a configuration that is valid.
        unit: where the unit of systemd is to be.

    Args:
        folder: for all of it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bin = folder / "bin"
        self._answers = folder / "answers"
        self.home = folder / "home"
        for one in (self._bin, self._answers, self.home):
            one.mkdir()
        for name in PROGRAMS:
            program = self._bin / name
            program.write_text(PLAYED.format(folder=folder))
            program.chmod(0o755)
        self.config = folder / "config.toml"
        self.write_config()
        self.unit = self.home / ".config/systemd/user/mlxsup.service"
        self.answer("systemctl.is-system-running", "echo running")
        self.answer("systemctl.show", f"printf '{STATE}'")
        self.answer("loginctl.show-user", "echo Linger=yes")

    def write_config(self, **keys: Any) -> None:
        """Writes the configuration."""
        more = "".join(f"{key} = {value}\n" for key, value in keys.items())
        self.config.write_text(
            f'[supervisor]\nruntime_dir = "{self._folder}/run"\nlog_dir = "{self._folder}/logs"\n'
            f'{more}[models.m]\nengine = "fake"\n'
        )

    def answer(self, name: str, shell: str) -> None:
        """What a program does if this word is among its arguments: `PROGRAM.WORD`."""
        (self._answers / name).write_text(shell + "\n")

    def remove(self, program: str) -> None:
        """There is no such program."""
        (self._bin / program).unlink()

    @property
    def calls(self) -> list[str]:
        """What was run, since the last look."""
        file = self._folder / "calls"
        found = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return found

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """`mlxsup service` with these arguments."""
        path = f"{self._bin}:/usr/local/bin:/usr/bin:/bin"
        given = {
            "HOME": str(self.home),
            "XDG_CACHE_HOME": str(self.home / ".cache"),
            "PATH": path,
            "SUDO_USER": "",
            **variables,
        }
        done = run_cli("service", *arguments, **given)
        check_plain(done.stdout + done.stderr)
        return done

    def install(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """`mlxsup service install` with the configuration."""
        return self.run("install", "--config", str(self.config), *arguments, **variables)

    def value(self, *arguments: str, **variables: str) -> dict[str, Any]:
        """What a command prints with --json; it must succeed, and be as its schema says."""
        done = self.run(*arguments, "--json", **variables)
        assert (done.returncode, done.stderr) == (0, ""), done
        assert problems(done.stdout, ["service", arguments[0]]) == []
        value: dict[str, Any] = json.loads(done.stdout)
        return value

    def files(self) -> list[str]:
        """What is in the home folder."""
        return sorted(
            os.path.relpath(os.path.join(folder, name), self.home)
            for folder, _, names in os.walk(self.home)
            for name in names
        )
