"""One turn of a program: a command in an empty home folder, and what it has to come to."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .environments import Environment
from support.cli import run_cli
from support.http_daemon import HttpDaemon

TURN_LIMIT_S = 300.0
SCRIPTS = Path(__file__).parent / "scripts"
FOREIGN = ("ANTHROPIC", "OPENAI", "CLAUDE", "CODEX", "OPENCODE", "LITELLM", "AIDER")
"""Variables of these programs, which would change what they do."""

WORKS = "it works"
SAY = f"[[say {WORKS}]]"
"""What makes the fake engine say just this."""

MOST_SAID = 400


class TurnFailed(Exception):
    """A program has not done what it was to do; the message says what it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a program gets for a turn.

    Attributes:
        daemon: with the fake model `m`.
        environment: where it is installed.
        home: an empty folder; so is `work` in it.
    """

    daemon: HttpDaemon
    environment: Environment
    home: Path

    @property
    def work(self) -> Path:
        """The folder that it runs in."""
        folder = self.home / "work"
        folder.mkdir(exist_ok=True)
        return folder

    def run(self, command: Sequence[str], **variables: str) -> str:
        """What a command prints.

        Raises:
            TurnFailed: it ends with an error, or does not end.
        """
        try:
            done = subprocess.run(
                command, cwd=self.work, env=self.variables | variables, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=TURN_LIMIT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise TurnFailed(f"it did not end within {TURN_LIMIT_S:g} s") from None
        if done.returncode != 0:
            raise TurnFailed(_end_of(f"{done.stdout} {done.stderr}"))
        return done.stdout

    @property
    def variables(self) -> dict[str, str]:
        """The environment of a command: with another home, and nothing else that it knows."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
        path = f"{self.environment.bin}{os.pathsep}{os.environ['PATH']}"
        here = "127.0.0.1,localhost"
        return kept | {
            "HOME": str(self.home), "XDG_CONFIG_HOME": str(self.home / ".config"), "PATH": path,
            "NO_PROXY": here, "no_proxy": here,
        }  # fmt: skip

    def script(self, name: str) -> str:
        """What one of our scripts prints, which uses the program as a library."""
        if name.endswith(".py"):
            command = [str(self.environment.bin / "python"), str(SCRIPTS / name)]
        else:  # node looks for packages next to the script
            command = ["node", str(shutil.copy(SCRIPTS / name, self.environment.folder / name))]
        return self.run([*command, self.daemon.url])

    def connected(self, tool: str, *command: str) -> None:
        """A turn of a program that `mlxsup connect` has set up.

        The model is loaded before, so that no program's own limit counts the load.

        Raises:
            TurnFailed: it did not print the answer.
        """
        with self.daemon.client() as client:
            client.load("m")
        done = run_cli(
            "connect", tool, "--write", "--endpoint", self.daemon.endpoint,
            HOME=str(self.home), XDG_CONFIG_HOME=str(self.home / ".config"),
        )  # fmt: skip
        if done.returncode != 0:
            raise TurnFailed(_end_of(done.stderr))
        self.demand(self.run([*command, SAY]))

    @staticmethod
    def demand(printed: str) -> None:
        """Fails unless the answer is a line of what was printed."""
        if WORKS not in (line.strip() for line in printed.splitlines()):
            raise TurnFailed(f"it printed {_end_of(printed)!r}")


def _end_of(text: str) -> str:
    return " ".join(text.split())[-MOST_SAID:]
