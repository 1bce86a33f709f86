"""What a daemon and its workers hold, sampled while nothing is asked."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
from mlxsup.client import Client
from support.daemon import Daemon
from support.eventually import eventually


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """One sample, of a quiet moment.

    Attributes:
        rss_mb: of the supervisor, and of each worker that was never replaced, by name.
        files, threads: of the supervisor.
        processes: the supervisor and its workers.
        rows: requests that somebody still holds.
    """

    rss_mb: dict[str, float]
    files: int
    threads: int
    processes: int
    rows: int


def is_quiet(status: dict[str, Any]) -> bool:
    """Whether nobody holds a request; what the workers say of it comes with their next beat."""
    return status["queue"]["waiting"] == 0 and not any(
        model["running"]
        or model["queued"]
        or model["held_by_worker"]
        or (model["pid"] and model["phase"] != "idle")
        for model in status["models"]
    )


def sample(daemon: Daemon, client: Client) -> Usage:
    """Waits for a quiet moment, and looks.

    Raises:
        AssertionError: requests are held that nobody has open.
    """
    eventually(lambda: is_quiet(client.status()), timeout_s=60.0, what="quiet")
    status = client.status()
    supervisor = psutil.Process(status["pid"])
    rss_mb = {"supervisor": supervisor.memory_info().rss / 1e6}
    for model in status["models"]:
        if model["pid"] is not None:
            rss_mb[model["name"]] = psutil.Process(model["pid"]).memory_info().rss / 1e6
    return Usage(
        rss_mb=rss_mb,
        # It reads its workers' memory from a file each second.
        files=min(supervisor.num_fds() for _ in range(3)),
        threads=supervisor.num_threads(),
        processes=len(daemon.processes()),
        rows=sum(len(model["running"]) + model["queued"] for model in status["models"]),
    )


def growth_mb(samples: Sequence[Usage], name: str) -> float:
    """From the median of the second quarter to that of the last; the first warms up."""
    values = [one.rss_mb[name] for one in samples]
    quarter = max(1, len(values) // 4)
    return statistics.median(values[-quarter:]) - statistics.median(values[quarter : 2 * quarter])
