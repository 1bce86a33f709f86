"""What a daemon and its workers hold, sampled while nothing is asked, and what bounds it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from mlxsup.client import Client
from mlxsup.supervisor.log_files import LOG_FILES, MAX_LOG_BYTES

from support.daemon import Daemon
from support.eventually import eventually

MAX_GROWTH_MB = {"supervisor": 5.0, "fake": 5.0, "real": 5.0}
"""Of the RSS, by the fitted line, from the end of the warm-up to the end of the run."""

MAX_LOG_MB = (LOG_FILES * MAX_LOG_BYTES + 2**20) / 1e6
"""Of each log, its older files included; what is written at once may go beyond the limit."""

COUNTS = ("files", "sockets", "threads", "mapped files")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One quiet moment.

    Attributes:
        at_s: since the start.
        requests: asked until then.
        values: by series: what, and whose.
    """

    at_s: float
    requests: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One series of a run, without the first quarter, which warms up.

    Attributes:
        growth: of the fitted line from its beginning to its end.
        limit: what that, or the largest value, may be at most; None for values that may not change.
    """

    name: str
    first: float
    last: float
    least: float
    most: float
    growth: float
    limit: float | None

    @property
    def problem(self) -> str:
        """What is wrong; empty if nothing is."""
        if self.limit is None:
            is_flat = self.least == self.most
            return "" if is_flat else f"{self.name}: between {self.least:g} and {self.most:g}"
        if self.name in ("zombies", "rows") or self.name.startswith("log"):
            too_much = self.most > self.limit
            return f"{self.name}: {self.most:g}, at most {self.limit:g}" if too_much else ""
        grew = self.growth > self.limit
        return f"{self.name}: grew by {self.growth:.1f}, at most {self.limit:g}" if grew else ""


def curves_of(
    samples: Sequence[Sample], growth_mb: Mapping[str, float] = MAX_GROWTH_MB
) -> list[Curve]:
    """Each series that the samples have in common.

    Args:
        growth_mb: by how much the RSS may grow, of the supervisor and of each worker.
    """
    steady = samples[len(samples) // 4 :]
    names = [n for n in steady[0].values if all(n in one.values for one in steady)]
    return [_curve(name, steady, _limit(name, growth_mb)) for name in names]


def _curve(name: str, steady: Sequence[Sample], limit: float | None) -> Curve:
    times, values = [one.at_s for one in steady], [one.values[name] for one in steady]
    slope = statistics.linear_regression(times, values).slope if len(steady) > 1 else 0.0
    return Curve(
        name=name,
        first=values[0],
        last=values[-1],
        least=min(values),
        most=max(values),
        growth=slope * (times[-1] - times[0]),
        limit=limit,
    )


def _limit(name: str, growth_mb: Mapping[str, float]) -> float | None:
    what, _, whose = name.partition(" of ")
    if what == "RSS in MB":
        return growth_mb[whose]
    if what == "log in MB":
        return MAX_LOG_MB
    return 0.0 if what in ("zombies", "rows") else None


def is_quiet(status: dict[str, Any]) -> bool:
    """Whether nobody holds a request; what the workers say of it comes with their next beat."""
    return status["queue"]["waiting"] == 0 and not any(
        model["running"]
        or model["queued"]
        or model["held_by_worker"]
        or (model["pid"] and model["phase"] != "idle")
        for model in status["models"]
    )


def values_now(daemon: Daemon, client: Client, patience_s: float) -> dict[str, float]:
    """Waits for a quiet moment, and looks; series of workers that are replaced are left out.

    Raises:
        AssertionError: requests are held that nobody has open.
    """
    eventually(lambda: is_quiet(client.status()), timeout_s=patience_s, what="quiet")
    status = client.status()
    supervisor = psutil.Process(status["pid"])
    children = supervisor.children(recursive=True)
    values: dict[str, float] = {
        "processes": 1 + len(children),
        "zombies": sum(child.status() == psutil.STATUS_ZOMBIE for child in children),
        "rows": sum(len(model["running"]) + model["queued"] for model in status["models"]),
    }
    pids = {model["name"]: model["pid"] for model in status["models"]}
    for name in MAX_GROWTH_MB:
        pid = supervisor.pid if name == "supervisor" else pids.get(name)
        if pid is not None:
            values |= _of_process(psutil.Process(pid), name)
    for file in daemon.logs.glob("*.log"):
        parts = (part.stat().st_size for part in daemon.logs.glob(f"{file.name}*"))
        values[f"log in MB of {file.stem}"] = sum(parts) / 1e6
    return values


def _of_process(process: psutil.Process, name: str) -> dict[str, float]:
    maps = process.memory_maps(grouped=True)
    counts = (
        # Now and then it reads a file, or its library opens one: the least of three looks.
        min(process.num_fds() for _ in range(3)),
        min(len(process.net_connections(kind="unix")) for _ in range(3)),
        process.num_threads(),
        sum(Path(one.path).is_absolute() for one in maps),
    )
    named = {f"{what} of {name}": float(n) for what, n in zip(COUNTS, counts, strict=True)}
    return {f"RSS in MB of {name}": process.memory_info().rss / 1e6, **named}
