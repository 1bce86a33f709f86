"""Loads, restarts and swaps with and without a prewarmed worker (P8), and what it takes.

Two daemons that differ in `warm_workers` alone take turns. Each measurement waits until the
prewarmed worker does, and begins with a command or a signal; it ends with READY, as a client sees
it.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from mlxsup.client import Client

from .report import print_table, spread
from support.daemon.daemon import Daemon, row
from support.eventually import eventually

WAIT_S = 300.0
RESTART = {"max_restarts": 1_000_000, "stable_s": 0.0}
"""Each crash is the first one: no delay."""

COUNTS = (0, 1)


def pool_waits(client: Client, count: int) -> bool:
    """True if that many prewarmed workers wait."""
    workers = client.status()["warm_pool"]["workers"]
    return [worker["state"] for worker in workers] == ["waiting"] * count


def until_ready(name: str, begin: Callable[[], object], changes: Iterator[dict[str, Any]]) -> float:
    """Begin, and return the seconds until the next READY of a model."""
    begun = time.monotonic()
    begin()
    for change in changes:
        if change.get("to") == "READY" and change["model"] == name:
            return time.monotonic() - begun
    raise AssertionError("the events have ended")


def kill(client: Client, name: str) -> None:
    """Kill a model's process."""
    os.kill(row(client, name)["pid"], signal.SIGKILL)


def run(folder: Path, repeats: int) -> None:
    """Measure and print.

    Args:
        folder: of the model.
        repeats: of each measurement in each daemon.
    """
    entry = {"path": str(folder), "restart": RESTART, "memory": "600MiB", "preload": False}
    models, limits = {"a": entry, "b": entry}, {"memory_budget": "900MiB", "min_residency_s": 0}
    times: dict[str, dict[int, list[float]]] = {
        what: {count: [] for count in COUNTS} for what in ("load", "kill to READY", "swap")
    }
    clients, changes, held = {}, {}, {}
    with ExitStack() as stack:
        for count in COUNTS:
            daemon = stack.enter_context(Daemon(models, {**limits, "warm_workers": count}))
            clients[count] = stack.enter_context(daemon.client())
            changes[count] = iter(stack.enter_context(daemon.client()).events())
            eventually(partial(pool_waits, clients[count], count), timeout_s=WAIT_S)
            process = psutil.Process(clients[count].status()["pid"])
            held[count] = sum(
                one.memory_full_info().uss for one in (process, *process.children(recursive=True))
            )
            print(f"idle, {count} prewarmed: {held[count]} bytes", file=sys.stderr, flush=True)
        for _ in range(repeats):
            for count in COUNTS:
                client, seen = clients[count], changes[count]
                steps: dict[str, tuple[str, Callable[[], object]]] = {
                    "load": ("a", partial(client.load, "a")),
                    "kill to READY": ("a", partial(kill, client, "a")),
                    "swap": ("b", partial(client.load, "b")),
                }
                for what, (name, begin) in steps.items():
                    eventually(partial(pool_waits, client, count), timeout_s=WAIT_S)
                    took_s = until_ready(name, begin, seen)
                    times[what][count].append(took_s)
                    print(f"{what}, {count} prewarmed: {took_s:.2f} s", file=sys.stderr, flush=True)
                eventually(partial(pool_waits, client, count), timeout_s=WAIT_S)
                client.unload("b")
    print(f"## With and without a prewarmed worker ({folder.name})\n")
    print(f"{repeats} each, in turns; s, median (range)\n")
    rows = []
    for what, by_count in times.items():
        without, with_one = (statistics.median(by_count[count]) for count in COUNTS)
        cells = [spread(by_count[count], digits=2) for count in COUNTS]
        rows.append([what, *cells, f"{with_one / without:.2f}"])
    print_table(["", "without", "with one", "ratio"], rows)
    mib = {count: size / 2**20 for count, size in held.items()}
    print(f"\nIdle daemon with its processes, unique memory: {mib[0]:.0f} and {mib[1]:.0f} MiB")
