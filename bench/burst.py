"""Sixteen requests at concurrency four: how evenly first tokens come (C3).

"Concurrency 4" can be read in two ways, and both are measured: four clients, each of which asks
anew when its answer has ended, so that a row is free for every request; and sixteen requests at
once onto four rows, so that twelve have to wait for others to end, whatever the server does.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxsup.cli.benchmark.burst import percentile
from mlxsup.client import AsyncClient

from .report import print_table, spread
from support.child import Child
from support.daemon import Daemon

if TYPE_CHECKING:
    from .peers import Server

REQUESTS = 16
ROWS = 4
TOKENS = 64
TARGET_RATIO = 1.25

Measure = Callable[[int, int], Awaitable[list[float]]]
"""From a number of clients and a seed to the times to first token, in seconds."""


def prompt_of(seed: int, number: int) -> str:
    """A prompt that no cache has seen: it differs from its first word on."""
    return f"{seed} {number} is the number of this prompt of the benchmark"


class InProcess:
    """The child process that admits with each step, or batch by batch."""

    def __init__(self, model: Path, *, drains: bool) -> None:
        self._drains = drains
        self._child = Child("-m", "bench.admission", model)

    async def measure(self, clients: int, seed: int) -> list[float]:
        """See `Measure`."""
        return await asyncio.to_thread(self._measure, clients, seed)

    def _measure(self, clients: int, seed: int) -> list[float]:
        job: dict[str, Any] = {
            "drains": self._drains,
            "rows": ROWS,
            "clients": clients,
            "prompts": [prompt_of(seed, number) for number in range(REQUESTS)],
            "tokens": TOKENS,
        }
        return list(self._child.ask(job)["first_token_s"])

    def close(self) -> None:
        """Ends the child."""
        self._child.end()


def asking(server: Server) -> Measure:
    """The measurement of a server."""

    async def measure(clients: int, seed: int) -> list[float]:
        times: list[float] = []

        async def client(first: int) -> None:
            for number in range(first, REQUESTS, clients):
                answer = await server.ask("tiny", prompt_of(seed, number), TOKENS)
                times.append(answer.first_token_s)

        await asyncio.gather(*(client(number) for number in range(clients)))
        return times

    return measure


def row(name: str, bursts: list[list[float]]) -> list[str]:
    """One line of the table."""
    in_ms = [[seconds * 1000 for seconds in burst] for burst in bursts]
    return [
        name,
        spread([statistics.median(burst) for burst in in_ms], digits=1),
        spread([percentile(burst, 90) for burst in in_ms], digits=1),
        spread([max(burst) for burst in in_ms], digits=1),
        spread([max(burst) / statistics.median(burst) for burst in in_ms]),
    ]


def run(model: Path, repeats: int) -> None:
    """Measures and prints."""
    asyncio.run(_run(model, repeats))


async def _run(model: Path, repeats: int) -> None:
    from .peers import MlxLmServer, Mlxsup

    print(f"## Burst: {REQUESTS} requests of {TOKENS} tokens at concurrency {ROWS} (CPU, tiny)\n")
    options = ("--decode-concurrency", str(ROWS), "--prompt-concurrency", str(ROWS))
    per_step = InProcess(model, drains=False)
    draining = InProcess(model, drains=True)
    entry = {"path": str(model), "max_concurrency": ROWS}
    with Daemon({"tiny": entry}) as daemon, MlxLmServer({"tiny": model}, *options) as peer:
        async with AsyncClient(daemon.endpoint) as client:
            await client.load("tiny")
            measures: dict[str, Measure] = {
                "mlxsup": asking(Mlxsup(client)),
                "mlx_lm.server": asking(peer),
                "in process, each step": per_step.measure,
                "in process, drain and batch": draining.measure,
            }
            figures: dict[tuple[int, str], list[list[float]]] = {
                (clients, name): [] for clients in (ROWS, REQUESTS) for name in measures
            }
            for repeat in range(repeats + 1):
                for (clients, name), bursts in figures.items():
                    times = await measures[name](clients, repeat * 100 + clients)
                    assert len(times) == REQUESTS
                    if repeat:  # a first round warms all of them up
                        bursts.append(times)
    per_step.close()
    draining.close()
    head = ["who", "TTFT p50 ms", "p90 ms", "max ms", "max/median"]
    print(f"{repeats} repeats; median (range); target of the first table: ≤{TARGET_RATIO}\n")
    for clients in (ROWS, REQUESTS):
        print(f"{clients} clients, {REQUESTS // clients} after one another each:\n")
        print_table(head, [row(name, figures[clients, name]) for name in measures])
