"""Tokens per second through mlxsup against the in-process BatchGenerator, and what routing costs.

Both serve the same tiny model (two layers of 128, random weights), so that the cost of routing
shows far larger than it is with a real one. The two are measured in turn within each repeat.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from mlxsup.client import AsyncClient

from .report import print_table, spread
from support.daemon import Daemon

CONCURRENCIES = (1, 4, 8, 16)
TARGETS = {1: 0.85, 4: 0.95, 8: 0.95, 16: 0.95}
TOKENS = 256


@dataclass
class Figures:
    """Measurements at one concurrency, one entry per repeat."""

    floor: list[float] = field(default_factory=list)
    through: list[float] = field(default_factory=list)
    router_us: list[float] = field(default_factory=list)


class Floor:
    """The child process that drives BatchGenerator alone."""

    def __init__(self, model: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.in_process", str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ready_s = float(self._answer()["ready_s"])

    def measure(self, concurrency: int) -> float:
        """Tokens per second at a concurrency."""
        assert self._process.stdin is not None
        job = {"concurrency": concurrency, "tokens": TOKENS}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return float(answer["tokens"]) / float(answer["seconds"])

    def close(self) -> None:
        """Ends the child."""
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return dict(json.loads(self._process.stdout.readline()))


async def measure_through(
    client: AsyncClient, supervisor: psutil.Process, concurrency: int
) -> tuple[float, float]:
    """Tokens per second through mlxsup, and the supervisor's CPU microseconds per token."""

    async def read(number: int) -> int:
        prompt = f"prompt number {number} of the benchmark"
        count = 0
        async for delta in client.generate("tiny", prompt=prompt, max_tokens=TOKENS):
            count += len(delta.token_ids)
        return count

    before = sum(supervisor.cpu_times()[:2])
    begin = time.perf_counter()
    counts = await asyncio.gather(*(read(number) for number in range(concurrency)))
    seconds = time.perf_counter() - begin
    spent_s = sum(supervisor.cpu_times()[:2]) - before
    assert counts == [TOKENS] * concurrency, counts
    return sum(counts) / seconds, spent_s / sum(counts) * 1e6


def run(model: Path, repeats: int) -> None:
    """Measures and prints."""
    asyncio.run(_run(model, repeats))


async def _run(model: Path, repeats: int) -> None:
    print("## Throughput: mlxsup against BatchGenerator in one process (CPU, tiny model)\n")
    figures = {c: Figures() for c in CONCURRENCIES}
    floor = Floor(model)
    entry = {"path": str(model), "max_concurrency": 16}
    with Daemon({"tiny": entry}) as daemon:
        assert daemon.process is not None
        supervisor = psutil.Process(daemon.process.pid)
        async with AsyncClient(daemon.endpoint) as client:
            await client.load("tiny")
            for repeat in range(repeats + 1):
                for concurrency in CONCURRENCIES:
                    alone = floor.measure(concurrency)
                    through, router_us = await measure_through(client, supervisor, concurrency)
                    if repeat == 0:
                        continue  # a first round of each warms both up
                    figures[concurrency].floor.append(alone)
                    figures[concurrency].through.append(through)
                    figures[concurrency].router_us.append(router_us)
            [row] = (await client.status())["models"]
            assert row["restarts"] == 0
    floor.close()
    rows = []
    for concurrency, f in figures.items():
        ratios = [t / a for t, a in zip(f.through, f.floor, strict=True)]
        rows.append(
            [
                str(concurrency),
                spread(f.floor, digits=0),
                spread(f.through, digits=0),
                spread(ratios),
                f"≥{TARGETS[concurrency]}",
                spread(f.router_us, digits=1),
            ]
        )
    head = [
        "concurrency",
        "in process tok/s",
        "mlxsup tok/s",
        "ratio",
        "target",
        "router CPU µs/token",
    ]
    print(f"{repeats} repeats, {TOKENS} tokens a stream; median (range)\n")
    print_table(head, rows)
