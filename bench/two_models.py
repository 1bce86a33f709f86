"""One model's stream and new requests while another prefills (C9, H8).

In mlxsup each model has a process. `mlx_lm.server` takes both names too, but holds one model at a
time: a request for another one waits until the running batch has ended, and everybody after it
waits until it has been answered and the first model has been loaded again. Both are asked for the
same: B answers without a pause, a new request comes to B twice a second, and A gets a long prompt.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from mlxsup.client import AsyncClient

from .report import print_table, spread
from .servers import Mlxsup, Server, mlx_lm_server, peer
from support.daemon.daemon import Daemon

PREFILL_S = 9.0
"""How long A's prompt should take to read, alone; beside B's stream it takes some 12 s."""

QUIET_S = 3.0
"""How long B is watched undisturbed."""

ANSWER = 512
"""Tokens of each of B's answers; the next one is asked for when one has ended."""

PROBE_EVERY_S = 0.5
CALIBRATION_WORDS = 120
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child")

Disturbance = Callable[[], Awaitable[object]]


def words(count: int, seed: int) -> str:
    """Return a prompt of that many words; another seed gives another one from the first word on."""
    chooser = random.Random(seed)
    return " ".join([str(seed), *(chooser.choice(WORDS) for _ in range(count - 1))])


class Seen(NamedTuple):
    """What B's users saw in one window.

    Attributes:
        silence_ms: the longest time in which the stream brought nothing, from one answer to the
            next, too.
        first_ms: the median time to first token of the new requests.
        took_s: how long the disturbance took.
    """

    silence_ms: float
    first_ms: float
    took_s: float


async def watch(server: Server, model: str, disturb: Disturbance) -> Seen:
    """Stream and ask anew while the disturbance runs; read everything to its end."""
    is_over = asyncio.Event()
    has_begun = asyncio.Event()
    times: list[float] = []
    first_ms: list[float] = []

    def on_token(now: float) -> None:
        times.append(now)
        has_begun.set()

    async def stream() -> None:
        while not is_over.is_set():
            await server.ask(model, words(8, random.randrange(10**6)), ANSWER, on_token)

    async def probe() -> None:
        while not is_over.is_set():
            found = await server.ask(model, words(8, random.randrange(10**6)), 2)
            first_ms.append(found.first_token_s * 1000)
            with suppress(TimeoutError):
                await asyncio.wait_for(is_over.wait(), PROBE_EVERY_S)

    streaming = asyncio.create_task(stream())
    await has_begun.wait()
    begin = time.perf_counter()
    disturbing = asyncio.ensure_future(disturb())
    # The disturbance has been sent before the first new request is.
    await asyncio.sleep(0)
    probing = asyncio.create_task(probe())
    await disturbing
    end = time.perf_counter()
    is_over.set()
    await asyncio.gather(streaming, probing)
    silences = (b - a for a, b in pairwise(times) if b > begin and a < end)
    return Seen(1000 * max(silences, default=0.0), statistics.median(first_ms), end - begin)


async def quiet() -> None:
    """Wait without a disturbance."""
    await asyncio.sleep(QUIET_S)


async def words_per_second(server: Server, model: str) -> float:
    """Measure how many words of a prompt the server reads per second."""
    await server.ask(model, words(CALIBRATION_WORDS, 1), 1)  # the first one is slower
    answer = await server.ask(model, words(CALIBRATION_WORDS, 2), 1)
    return CALIBRATION_WORDS / answer.first_token_s


@dataclass(slots=True)
class Figures:
    """One entry per repeat."""

    alone: list[Seen] = field(default_factory=list)
    disturbed: list[Seen] = field(default_factory=list)

    def row(self, name: str) -> list[str]:
        """Return one line of a table."""

        before, during = ([one.first_ms for one in seen] for seen in (self.alone, self.disturbed))
        return [
            name,
            spread([one.silence_ms for one in self.alone], digits=0),
            spread([one.silence_ms for one in self.disturbed], digits=0),
            spread(before, digits=0),
            spread(during, digits=0),
            spread([b / a for a, b in zip(before, during, strict=True)], digits=1),
            spread([one.took_s for one in self.disturbed], digits=1),
        ]


HEAD = (
    "who", "largest gap ms", "… while A prefills", "new request TTFT ms", "… while A prefills",
    "ratio", "that took s",
)  # fmt: skip


def run(tiny: Path, smollm2: Path, repeats: int) -> None:
    """Measures and prints."""
    asyncio.run(_run(tiny, smollm2, repeats))


async def _run(tiny: Path, smollm2: Path, repeats: int) -> None:
    print("## Two models: the tiny one while SmolLM2 prefills (CPU)\n")
    folders = {"a": smollm2, "b": tiny}
    entries = {name: {"path": str(folder)} for name, folder in folders.items()}
    figures = {name: Figures() for name in ("mlxsup", "mlx_lm.server")}
    with Daemon(entries) as daemon, mlx_lm_server() as process:
        async with AsyncClient(daemon.endpoint) as client:
            servers: list[Server] = [Mlxsup(client), peer(process, folders)]
            for model in folders:
                await client.load(model)
            speed = await words_per_second(servers[0], "a")
            long = int(PREFILL_S * speed)
            for repeat in range(repeats):
                for server in servers:
                    await _two(server, figures[server.name], words(long, 10 + repeat))
            [row] = [row for row in (await client.status())["models"] if row["name"] == "b"]
            assert row["restarts"] == 0
    print(f"{repeats} repeats; median (range); TTFT: median of a window's new requests\n")
    print(f"B streams; A (SmolLM2) reads {long} words; targets: gap ≤100 ms, TTFT ≤2×:\n")
    print_table(HEAD, [one.row(name) for name, one in figures.items()])


async def _two(server: Server, figures: Figures, prompt: str) -> None:
    figures.alone.append(await watch(server, "b", quiet))
    figures.disturbed.append(await watch(server, "b", lambda: server.ask("a", prompt, 1)))
