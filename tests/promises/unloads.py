"""P21: a model is loaded and unloaded again and again: its process goes, and all of its memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import psutil

from .bounds import at_most, equals
from .measure import CPU, Figure, Measure, Place, Values, require
from support.daemon import Daemon, is_alive, row

WARM_UP = 3
LOOK_S = 3.0
LOOKS = 30


def used_mb() -> float:
    """What the machine has in use."""
    memory = psutil.virtual_memory()
    return float(memory.total - memory.available) / 1e6


def noise_mb() -> float:
    """By how much that moves while nothing of ours does."""
    seen = []
    for _ in range(LOOKS):
        seen.append(used_mb())
        time.sleep(LOOK_S / LOOKS)  # the interval itself, not a wait for anything
    return max(seen) - min(seen)


def grown(values: Sequence[float]) -> float:
    """From the median of the first third to that of the last."""
    third = max(1, len(values) // 3)
    return statistics.median(values[-third:]) - statistics.median(values[:third])


def unloads(place: Place) -> Values:
    """After each unload everything is looked at from outside; the first ones are not counted."""
    machine, supervisor_mb, worker_mb = [], [], []
    left = reserved = 0
    with (
        Daemon({"m": {"path": str(place.tiny), "preload": False}}) as daemon,
        daemon.client() as client,
    ):
        assert daemon.process is not None
        supervisor = psutil.Process(daemon.process.pid)
        calm_mb = noise_mb()
        for number in range(WARM_UP + place.sizes.unloads):
            client.load("m")
            client.complete("m", prompt="x", max_tokens=4)
            worker = psutil.Process(row(client, "m")["pid"])
            worker_now_mb = worker.memory_info().rss / 1e6
            client.unload("m")
            if number < WARM_UP:
                continue
            left += is_alive(worker) + len(supervisor.children(recursive=True))
            reserved += client.status()["memory"]["reserved_bytes"]
            worker_mb.append(worker_now_mb)
            supervisor_mb.append(supervisor.memory_info().rss / 1e6)
            machine.append(used_mb())
    worker_size_mb = statistics.median(worker_mb)
    require(
        calm_mb < worker_size_mb,
        f"the machine's memory moved by {calm_mb:.0f} MB while nothing was loaded",
    )
    return {
        "left": left,
        "reserved": reserved,
        "supervisor": grown(supervisor_mb),
        "worker": worker_size_mb,
        "worker_grown": grown(worker_mb),
        "machine": grown(machine) / worker_size_mb,
        "machine_noise": calm_mb / worker_size_mb,
    }


MEASURES = (
    Measure(
        promise="P21",
        name="unloads",
        where=CPU,
        round=unloads,
        most_repeats=1,
        figures=(
            Figure(
                key="left",
                what="50 × load, answer, unload: processes left after an unload",
                unit="",
                digits=0,
                bound=equals(0),
            ),
            Figure(
                key="reserved",
                what="the same: bytes still reserved, all times together",
                unit="",
                digits=0,
                bound=equals(0),
            ),
            Figure(
                key="supervisor",
                what="the same: supervisor RSS more, last third to first",
                unit="MB",
                digits=1,
                bound=at_most(5.0),
            ),
            Figure(key="worker", what="the same: RSS of a worker", unit="MB", digits=0),
            Figure(
                key="worker_grown",
                what="the same: a worker's RSS more, last third to first",
                unit="MB",
                digits=1,
                bound=at_most(5.0),
            ),
            Figure(
                key="machine",
                what="the same: the machine's memory in use more, last third to first (without:"
                " how far it moved in 3 s before the first load)",
                unit="workers",
                without="machine_noise",
                bound=at_most(1.0),
            ),
        ),
    ),
)
