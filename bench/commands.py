"""How long commands take to begin: until their first byte, and until their end."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlxsup.cli.command_table import COMMANDS

from .report import print_table, spread
from support.cli.command_tree import leaves
from support.daemon.daemon import Daemon, fake, wait_for_state
from support.daemon.hub_caches import write_folder

RUNS = 20
WARM_UP_RUNS = 3
FIRST_BYTE_S = 0.1
STATUS_S = 0.2
COMPLETION_S = 0.15

ASK_SOMEBODY = frozenset(
    {
        *("start", "stop", "status", "top", "events", "why", "load", "unload", "restart", "wait"),
        *("requests", "attach", "cancel", "pause", "resume", "reload", "generate", "chat"),
        *("prioritize", "logs", "doctor", "log-level", "connect", "bench", "demo", "run", "pull"),
        *("rm", "convert", "service"),
    }
)
"""Commands that ask a daemon, a model, a network or a service manager; of these only the help does
not."""

ALONE: Mapping[tuple[str, ...], list[str]] = {
    ("plan",): ["--config", "CONFIG"],
    ("models",): [],
    ("show",): ["MODEL"],
    ("init",): ["NEW"],
    ("key", "new"): ["KEY"],
    ("key", "list"): [],
    ("key", "revoke"): ["KEY"],
    ("key", "off"): ["--yes"],
    ("config", "check"): ["CONFIG"],
    ("config", "path"): ["--config", "CONFIG"],
    ("config", "schema"): [],
    ("completion",): ["bash"],
}
"""Every other command, with its arguments."""


def command_lines() -> list[list[str]]:
    """What must begin at once: every command that asks nobody, and the help of every one.

    Raises:
        ValueError: a command of the table is in neither list.
    """
    alone = {leaf for leaf in leaves() if leaf[0] not in ASK_SOMEBODY}
    if alone != set(ALONE) or not set(COMMANDS) >= ASK_SOMEBODY:
        different = sorted(alone ^ set(ALONE)) + sorted(ASK_SOMEBODY - set(COMMANDS))
        raise ValueError(f"say whether these ask somebody: {different}")
    acting = [[*leaf, *arguments] for leaf, arguments in ALONE.items()]
    return [["--version"], ["-h"], *acting, *([*leaf, "-h"] for leaf in leaves())]


def verdict(times: Sequence[float], target_s: float) -> str:
    """Whether the median is within the target."""
    return "kept" if statistics.median(times) <= target_s else "MISSED"


def row(name: str, times: Sequence[float], target_s: float) -> list[str]:
    """A row of the table."""
    shown = spread([1000 * time_s for time_s in times], " ms", digits=0)
    return [name, shown, f"≤{1000 * target_s:g} ms", verdict(times, target_s)]


def run() -> None:
    """Measures and prints."""
    print("## Commands (CPU, fake engine)\n")
    with (
        Daemon({"alpha": fake(), "beta": fake(preload=False)}) as daemon,
        daemon.client() as client,
        tempfile.TemporaryDirectory() as folder,
    ):
        wait_for_state(client, "alpha", "READY")
        nobody = _environment(folder)
        rows = [*_first_bytes(Path(folder), nobody), *_ends(daemon.endpoint, nobody)]
    print(f"{RUNS} warm runs of each, one at a time; median (range) of the time from the start of")
    print("the process\n")
    print_table(["what", "measured", "target", "verdict"], rows)


def _first_bytes(folder: Path, environment: dict[str, str]) -> list[list[str]]:
    """The rows of what asks nobody."""
    ground = Ground(folder)
    rows = []
    for arguments in command_lines():
        times = measure(arguments, environment, ground)[0]
        rows.append(row(f"`{' '.join(arguments)}`, first byte", times, FIRST_BYTE_S))
    return rows


def _ends(endpoint: str, nobody: dict[str, str]) -> list[list[str]]:
    """The rows of what asks the daemon, and of completion."""
    somebody = nobody | {"MLXSUP_ENDPOINT": endpoint}
    completing = somebody | {"_MLXSUP_COMPLETE": "bash_complete", "COMP_CWORD": "1"}
    command = completing | {"COMP_WORDS": "mlxsup sta"}
    model = completing | {"COMP_WORDS": "mlxsup load al", "COMP_CWORD": "2"}
    return [
        row("`status`, end", measure(["status"], somebody)[1], STATUS_S),
        row("completion of a command, end", measure([], command)[1], COMPLETION_S),
        row("completion of a model, end", measure([], model)[1], COMPLETION_S),
    ]


class Ground:
    """What the arguments stand for: a configuration, a model, and names that are not taken yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._config = folder / "config.toml"
        self._config.write_text('[models.m]\nengine = "fake"\n')
        self._model = write_folder(folder / ".mlxsup" / "models" / "m")

    def fill(self, arguments: Sequence[str], environment: dict[str, str]) -> list[str]:
        """The command line of one more run; the key to revoke is made before."""
        self._count += 1
        files = {
            "CONFIG": str(self._config),
            "MODEL": str(self._model),
            "NEW": str(self._folder / f"new-{self._count}.toml"),
            "KEY": f"key-{self._count}",
        }
        given = [files.get(argument, argument) for argument in arguments]
        if given[:2] == ["key", "revoke"]:
            subprocess.run(
                command_line(["key", "new", given[2]]),
                env=environment,
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        return given


def command_line(arguments: Sequence[str]) -> list[str]:
    """The command line of mlxsup."""
    return [sys.executable, "-m", "mlxsup.cli", *arguments]


def measure(
    arguments: Sequence[str], environment: dict[str, str], ground: Ground | None = None
) -> tuple[list[float], list[float]]:
    """Seconds from the start of the process to its first byte, and to its end, of each run."""
    firsts, ends = [], []
    for number in range(WARM_UP_RUNS + RUNS):
        given = ground.fill(arguments, environment) if ground else arguments
        begin = time.perf_counter()
        process = subprocess.Popen(
            command_line(given),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        assert process.stdout is not None
        assert process.stdout.read(1), given
        first = time.perf_counter() - begin
        process.communicate()
        end = time.perf_counter() - begin
        assert process.returncode == 0, given
        if number >= WARM_UP_RUNS:
            firsts.append(first)
            ends.append(end)
    return firsts, ends


def _environment(home: str) -> dict[str, str]:
    """This process's, with an empty home, so that no file names another daemon.

    The first runs may keep what Python compiles, as an installation does: runs that compile it
    again are not warm.
    """
    dropped = ("MLXSUP", "_MLXSUP", "XDG_CONFIG_HOME", "HF_", "PYTHONDONTWRITEBYTECODE")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    return kept | {"HOME": home}
