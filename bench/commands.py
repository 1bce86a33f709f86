"""How long commands take to begin and to end, next to a fake engine."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from .report import print_table, spread
from support.daemon.daemon import Daemon, fake, wait_for_state

RUNS = 20
WARM_UP_RUNS = 3

FIRST_BYTES = (["--version"], ["-h"], ["run", "-h"], ["models"], ["completion", "bash"])
FIRST_BYTE_S = 0.1
STATUS_S = 0.2
COMPLETION_S = 0.15


def row(name: str, times: Sequence[float], target_s: float) -> list[str]:
    """Return a row of the table."""
    shown = spread([1000 * time_s for time_s in times], " ms", digits=0)
    verdict = "kept" if statistics.median(times) <= target_s else "MISSED"
    return [name, shown, f"≤{1000 * target_s:g} ms", verdict]


def run() -> None:
    """Measure and print."""
    print("## Commands (CPU, fake engine)\n")
    with (
        Daemon({"alpha": fake(), "beta": fake(preload=False)}) as daemon,
        daemon.client() as client,
        tempfile.TemporaryDirectory() as home,
    ):
        wait_for_state(client, "alpha", "READY")
        alone = _environment(home)
        asking = alone | {"MLXSUP_ENDPOINT": daemon.endpoint}
        completing = asking | {"_MLXSUP_COMPLETE": "bash_complete", "COMP_CWORD": "1"}
        command = completing | {"COMP_WORDS": "mlxsup sta"}
        model = completing | {"COMP_WORDS": "mlxsup load al", "COMP_CWORD": "2"}
        rows = [
            row(f"`{' '.join(given)}`, first byte", measure(given, alone)[0], FIRST_BYTE_S)
            for given in FIRST_BYTES
        ]
        rows += [
            row("`--version`, end", measure(["--version"], alone)[1], STATUS_S),
            row("`status`, end", measure(["status"], asking)[1], STATUS_S),
            row("completion of a command, end", measure([], command)[1], COMPLETION_S),
            row("completion of a model, end", measure([], model)[1], COMPLETION_S),
        ]
    print(f"{RUNS} warm runs of each, one at a time; median (range) of the time from the start of")
    print("the process\n")
    print_table(["what", "measured", "target", "verdict"], rows)


def measure(
    arguments: Sequence[str], environment: dict[str, str]
) -> tuple[list[float], list[float]]:
    """Return the seconds to the first byte, and to the end, of each run of a command."""
    firsts, ends = [], []
    for number in range(WARM_UP_RUNS + RUNS):
        begin = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "mlxsup.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        assert process.stdout is not None
        assert process.stdout.read(1), arguments
        first = time.perf_counter() - begin
        process.communicate()
        end = time.perf_counter() - begin
        assert process.returncode == 0, arguments
        if number >= WARM_UP_RUNS:
            firsts.append(first)
            ends.append(end)
    return firsts, ends


def _environment(home: str) -> dict[str, str]:
    """Return that of this process, with an empty home, so that no file names another daemon.

    The first runs may keep what Python compiles, as an installation does.
    """
    dropped = ("MLXSUP", "_MLXSUP", "XDG_CONFIG_HOME", "HF_", "PYTHONDONTWRITEBYTECODE")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    return kept | {"HOME": home}
