"""How long commands take to begin: until their first byte, and until their end."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from .report import print_table, spread
from support.daemon import Daemon, fake, wait_for_state

RUNS = 20
WARM_UP_RUNS = 3
FIRST_BYTE_S = 0.1
STATUS_S = 0.2
COMPLETION_S = 0.15

ALONE: Sequence[tuple[str, list[str]]] = (
    ("`--version`", ["--version"]),
    ("`-h`", ["-h"]),
    ("`status -h`", ["status", "-h"]),
    ("`config path`", ["config", "path"]),
    ("`key list`", ["key", "list"]),
)
"""Commands that ask no daemon, no model and no network."""


def run() -> None:
    """Measures and prints."""
    print("## Commands (CPU, fake engine)\n")
    rows = []
    with (
        Daemon({"alpha": fake(), "beta": fake(preload=False)}) as daemon,
        daemon.client() as client,
        tempfile.TemporaryDirectory() as folder,
    ):
        wait_for_state(client, "alpha", "READY")
        nobody = _environment(folder)
        somebody = nobody | {"MLXSUP_ENDPOINT": daemon.endpoint}
        completing = somebody | {"_MLXSUP_COMPLETE": "bash_complete", "COMP_CWORD": "1"}
        for name, arguments in ALONE:
            times = measure(arguments, nobody)[0]
            rows.append([f"{name}, first byte", spread(times, " s"), f"≤{FIRST_BYTE_S:g} s"])
        rows.append(
            ["`status`, end", spread(measure(["status"], somebody)[1], " s"), f"≤{STATUS_S:g} s"]
        )
        words = {
            "completion of a command, end": {"COMP_WORDS": "mlxsup sta"},
            "completion of a model, end": {"COMP_WORDS": "mlxsup load al", "COMP_CWORD": "2"},
        }
        for name, variables in words.items():
            ends = measure([], completing | variables)[1]
            rows.append([name, spread(ends, " s"), f"≤{COMPLETION_S:g} s"])
    print(f"{RUNS} warm runs; median (range)\n")
    print_table(["what", "measured", "target"], rows)


def measure(arguments: list[str], environment: dict[str, str]) -> tuple[list[float], list[float]]:
    """Seconds from the start of the process to its first byte, and to its end, of each run."""
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
        if number >= WARM_UP_RUNS:
            firsts.append(first)
            ends.append(end)
    return firsts, ends


def _environment(home: str) -> dict[str, str]:
    """This process's, with an empty home, so that no file names another daemon."""
    dropped = ("MLXSUP", "_MLXSUP", "XDG_CONFIG_HOME")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    return kept | {"HOME": home}
