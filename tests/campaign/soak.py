"""Ordinary use with crashes and unloads for as long as you like: nothing may grow."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from mlxsup.client import Client
from mlxsup.supervisor.log_files import LOG_FILES, MAX_LOG_BYTES

from .oracle import answer_of, wrongs
from .scenario import CPU, FAKE, Figure, Place, Scenario, Values, at_most, count
from .watch import SOON
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.daemon.faults import undisturbed
from support.eventually import eventually
from support.reference import greedy_answers

MAX_GROWTH_MB = 5.0
"""Of an RSS, by the fitted line, from the end of the warm-up to the end of the run."""

MAX_LOG_MB = (LOG_FILES * MAX_LOG_BYTES + 2**20) / 1e6
"""Of each log, its older files included; what is written at once may go beyond the limit."""

BURST = 24
CRASHES_EVERY, UNLOADS_EVERY = 5, 7
MAX_TOKENS = 80
PROMPTS = [f"{'word ' * (3 * n)}number {n}" for n in range(12)]

Sample = Mapping[str, float]
"""What is held at a quiet moment, by series; `at` is the time in seconds."""


class Use:
    """One client's use of the daemon: bursts of requests whose answers are known.

    Attributes:
        requests, turns: so far.
        problems: answers that were wrong.
    """

    def __init__(self, client: Client, tiny: Path | None, seed: int) -> None:
        self._client, self._dice = client, random.Random(seed)
        fakes = [undisturbed(prompt, MAX_TOKENS) for prompt in PROMPTS]
        self._truth = {"fake": fakes, "mortal": fakes}
        if tiny is not None:
            self._truth["real"] = greedy_answers(tiny, PROMPTS, MAX_TOKENS)
        self.requests = self.turns = 0
        self.problems: list[str] = []

    def take_turn(self) -> None:
        """Ask a burst of requests and cancel some; now and then crash or unload a model."""
        client, dice, asked = self._client, self._dice, []
        self.turns += 1
        for _ in range(BURST):
            model, number = dice.choice(list(self._truth)), dice.randrange(len(PROMPTS))
            tokens, is_cut = dice.randint(1, MAX_TOKENS), dice.random() < 0.2
            parameters: dict[str, Any] = {"max_tokens": tokens, "temperature": 0.0}
            reader = Reader(client, model, PROMPTS[number], **parameters)
            asked.append((reader, self._truth[model][number][:tokens], is_cut))
            if is_cut:
                reader.stream.cancel()
        self.requests += len(asked)
        pid = row(client, "mortal")["pid"]
        if self.turns % CRASHES_EVERY == 0 and pid is not None:
            os.kill(pid, dice.choice((signal.SIGKILL, signal.SIGTERM)))
        for reader, right, is_cut in asked:
            self.problems += wrongs(answer_of(reader, 120.0), right, may_be_cut=is_cut)
            if not is_cut and isinstance(reader.error, Exception):
                raise reader.error
        wait_for_state(client, "mortal", "READY")
        if self.turns % UNLOADS_EVERY == 0:
            client.unload("mortal")
            client.load("mortal")


def is_quiet(client: Client) -> bool:
    """True if no request is held; what the workers say of it comes with their next beat."""
    status = client.status()
    return status["queue"]["waiting"] == 0 and not any(
        model["running"] or model["queued"] or model["held_by_worker"]
        or (model["pid"] and model["phase"] != "idle") for model in status["models"]
    )  # fmt: skip


def sample(daemon: Daemon, client: Client, names: Sequence[str]) -> Sample:
    """Wait for a quiet moment, and look; series of workers that are replaced are left out."""
    eventually(lambda: is_quiet(client), timeout_s=60.0, what="quiet")
    status = client.status()
    supervisor = psutil.Process(status["pid"])
    children = supervisor.children(recursive=True)
    values: dict[str, float] = {
        "at": time.monotonic(),
        "processes": 1 + len(children),
        "zombies": sum(child.status() == psutil.STATUS_ZOMBIE for child in children),
        "rows": sum(len(model["running"]) + model["queued"] for model in status["models"]),
    }
    pids = {model["name"]: model["pid"] for model in status["models"]}
    for name in ("supervisor", *names):
        process = supervisor if name == "supervisor" else psutil.Process(pids[name])
        maps = process.memory_maps(grouped=True)
        values |= {
            f"RSS of {name}": process.memory_info().rss / 1e6,
            # Now and then it reads a file, or its library opens one: the least of three looks.
            f"files of {name}": min(process.num_fds() for _ in range(3)),
            f"sockets of {name}": min(len(process.net_connections("unix")) for _ in range(3)),
            f"threads of {name}": process.num_threads(),
            f"mapped files of {name}": sum(Path(one.path).is_absolute() for one in maps),
        }
    for file in daemon.logs.glob("*.log"):
        parts = (part.stat().st_size for part in daemon.logs.glob(f"{file.name}*"))
        values[f"log of {file.stem}"] = sum(parts) / 1e6
    return values


def growths(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the fitted growth of each RSS after the first quarter, which warms up."""
    steady = samples[len(samples) // 4 :]
    times = [one["at"] for one in steady]
    return {
        name.removeprefix("RSS of "): (times[-1] - times[0])
        * statistics.linear_regression(times, [one[name] for one in steady]).slope
        for name in steady[0]
        if name.startswith("RSS of ")
    }


def problems_of(samples: Sequence[Sample], limit_mb: Mapping[str, float]) -> list[str]:
    """Return what has grown, or changed where nothing may."""
    steady, found = samples[len(samples) // 4 :], []
    for name in (name for name in steady[0] if all(name in one for one in steady)):
        values = [one[name] for one in steady]
        if name in ("zombies", "rows") or name.startswith("log"):
            most = MAX_LOG_MB if name.startswith("log") else 0
            if max(values) > most:
                found.append(f"{name}: {max(values):g}, at most {most:g}")
        elif name != "at" and not name.startswith("RSS") and min(values) != max(values):
            found.append(f"{name}: between {min(values):g} and {max(values):g}")
    for name, grown_mb in growths(samples).items():
        most = limit_mb.get(name, MAX_GROWTH_MB)
        if grown_mb > most:
            found.append(f"RSS of {name}: grew by {grown_mb:.1f} MB, at most {most:g}")
    return found


def run_soak(minutes: float, seed: int = 1, *, tiny: Path | None = None, every_s: float = 5.0,
             limit_mb: Mapping[str, float] | None = None) -> dict[str, float]:  # fmt: skip
    """Use a daemon until each fault has struck and there are samples to fit a line to.

    Args:
        minutes: how long at least.
        seed: of what is asked.
        tiny: the folder of a real model; None for the fake engine alone.
        every_s: from one sample to the next, at least.
        limit_mb: by how much the RSS of each may grow, if not as usual.

    Raises:
        AssertionError: something grew, an answer was wrong, or the daemon broke.
    """
    models: dict[str, dict[str, Any]] = {
        "fake": fake(fake={"step_s": 0.001}, max_concurrency=8),
        "mortal": fake(fake={"step_s": 0.001}, max_concurrency=8, restart=SOON),
    }
    if tiny is not None:
        models["real"] = {"path": str(tiny), "preload": True, "prefix_cache": "16MiB"}
    lasting, samples = [name for name in models if name != "mortal"], list[Sample]()
    with Daemon(models) as daemon, daemon.client() as client:
        for name in models:
            wait_for_state(client, name, "READY")
        use, until_s, due_s = Use(client, tiny, seed), time.monotonic() + 60.0 * minutes, 0.0
        while not use.problems and (
            time.monotonic() < until_s or use.turns <= UNLOADS_EVERY or len(samples) < 8
        ):
            use.take_turn()
            if time.monotonic() >= due_s:
                samples.append(sample(daemon, client, lasting))
                due_s = time.monotonic() + every_s
        for name in lasting:
            assert row(client, name)["generation"] == 1, f"{name} was replaced"
    problems = use.problems or problems_of(samples, limit_mb or {})
    assert not problems, problems[:20]
    return {"requests": use.requests, "crashes": use.turns // CRASHES_EVERY,
            "unloads": use.turns // UNLOADS_EVERY, "samples": len(samples), "problems": 0,
            **{f"rss {name}": value for name, value in growths(samples).items()}}  # fmt: skip


def soak(place: Place) -> Values:
    """Use a daemon with a real model for half an hour."""
    minutes = place.minutes if place.minutes is not None else place.size(300, small=1) / 10
    # In so short a run the real worker still fills the memory that it keeps prompts in.
    limit = {"real": 40.0} if minutes < 10 else {}
    every_s = 0.0 if minutes < 1 else 5.0
    return run_soak(minutes, place.seed, tiny=place.tiny, every_s=every_s, limit_mb=limit)


SOAK = Scenario("soak", "J4", f"{FAKE} and {CPU}", 1, soak, (
    count("requests", "30 minutes of ordinary use, every answer compared: requests", None),
    count("crashes", "the same: crashes", None),
    count("unloads", "the same: unloads", None),
    count("problems", "the same: files, sockets, threads, mapped files, zombies, rows or logs more,"
          " or a wrong answer"),
    Figure("rss supervisor", "the same: fitted growth of the supervisor's RSS", "MB",
           at_most(MAX_GROWTH_MB)),
    Figure("rss fake", "the same: of a worker's", "MB", at_most(MAX_GROWTH_MB)),
    Figure("rss real", "the same: of a worker's with MLX", "MB", at_most(40.0)),
))  # fmt: skip
