"""Time from SIGKILL to READY with and without a prewarmed worker (P8).

The time from SIGKILL of a model's process to READY, as a client sees it, in two daemons that differ
in `warm_workers` alone. They take turns, and each kill waits until the prewarmed worker does.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from mlxsup.client import Client

from .report import print_table, spread
from support.daemon.daemon import Daemon, row
from support.eventually import eventually

WAIT_S = 300.0
RESTART = {"max_restarts": 1_000_000, "stable_s": 0.0}
"""Each crash is the first one: no delay."""


def spares_wait(client: Client, count: int) -> bool:
    """Whether that many prewarmed workers wait."""
    workers = client.status()["warm_pool"]["workers"]
    return [worker["state"] for worker in workers] == ["waiting"] * count


def recover(client: Client, changes: Iterator[dict[str, Any]]) -> float:
    """Kills the model's process; returns the seconds until READY."""
    os.kill(row(client, "m")["pid"], signal.SIGKILL)
    begun = time.monotonic()
    for change in changes:
        if change.get("to") == "READY" and change["from"] == "LOADING":
            return time.monotonic() - begun
    raise AssertionError("the events have ended")


def run(folder: Path, repeats: int) -> None:
    """Measures and prints.

    Args:
        folder: of the model.
        repeats: kills in each daemon.
    """
    entry = {"path": str(folder), "preload": True, "restart": RESTART}
    counts, times = (0, 1), {0: list[float](), 1: list[float]()}
    used = 0
    with ExitStack() as stack:
        clients, changes = {}, {}
        for count in counts:
            daemon = stack.enter_context(Daemon({"m": entry}, {"warm_workers": count}))
            clients[count] = stack.enter_context(daemon.client())
            watcher = stack.enter_context(daemon.client())
            clients[count].load("m")
            changes[count] = iter(watcher.events())
        for _ in range(repeats):
            for count in counts:
                client = clients[count]
                eventually(partial(spares_wait, client, count), timeout_s=WAIT_S)
                pids = {worker["pid"] for worker in client.status()["warm_pool"]["workers"]}
                times[count].append(recover(client, changes[count]))
                used += row(client, "m")["pid"] in pids
    print(f"## From SIGKILL to READY, with and without a prewarmed worker ({folder.name})\n")
    print(f"{repeats} kills each, in turns; s, median (range); {used} spares were used\n")
    medians = {count: statistics.median(found) for count, found in times.items()}
    print_table(
        ["warm_workers", "kill to READY", "to that without"],
        [[str(n), spread(times[n], digits=2), f"{medians[n] / medians[0]:.2f}"] for n in counts],
    )
