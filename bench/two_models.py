"""One model's stream and new requests while another prefills or loads (B7, C9, H8).

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

from mlxsup.client import AsyncClient
from support.daemon import Daemon

from .peers import MlxLmServer, Mlxsup, Server
from .report import print_table, spread

PREFILL_S = 12.0
"""How long A's prompt should take to read, alone."""

WITHIN_PREFILL_S = 6.0
"""The same for the run within one model."""

QUIET_S = 6.0
"""How long B is watched undisturbed."""

ANSWER = 512
"""Tokens of each of B's answers; the next one is asked for when one has ended."""

WITHIN_ANSWER = 24
PROBE_EVERY_S = 0.5
CALIBRATION_WORDS = 120
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child")

Disturbance = Callable[[], Awaitable[object]]


def words(count: int, seed: int) -> str:
    """A prompt of so many words; another seed gives another one from the first word on."""
    chooser = random.Random(seed)
    return " ".join([str(seed), *(chooser.choice(WORDS) for _ in range(count - 1))])


@dataclass(slots=True, kw_only=True)
class Seen:
    """What B's users saw in one window.

    Attributes:
        gap_ms: the longest time in which the stream brought nothing, from one token to the next;
            the next answer's first one counts as well.
        first_ms: times to first token of the new requests.
        took_s: how long the disturbance took.
    """

    gap_ms: float = 0.0
    first_ms: list[float] = field(default_factory=list)
    took_s: float = 0.0


async def watch(
    server: Server, model: str, answer: int, disturb: Disturbance, *, probes: bool = True
) -> Seen:
    """Streams and asks anew while the disturbance runs; reads everything to its end."""
    seen = Seen()
    is_over = asyncio.Event()
    has_begun = asyncio.Event()
    times: list[float] = []

    def on_token(now: float) -> None:
        times.append(now)
        has_begun.set()

    async def stream() -> None:
        while not is_over.is_set():
            await server.ask(model, words(8, random.randrange(10**6)), answer, on_token)

    async def probe() -> None:
        while probes and not is_over.is_set():
            found = await server.ask(model, words(8, random.randrange(10**6)), 2)
            seen.first_ms.append(found.first_token_s * 1000)
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
    gaps = (b - a for a, b in pairwise(times) if b > begin and a < end)
    seen.gap_ms = max(gaps) * 1000
    seen.took_s = end - begin
    return seen


async def quiet() -> None:
    """No disturbance."""
    await asyncio.sleep(QUIET_S)


async def words_per_second(server: Server, model: str) -> float:
    """How fast it reads a prompt."""
    await server.ask(model, words(CALIBRATION_WORDS, 1), 1)  # the first one is slower
    answer = await server.ask(model, words(CALIBRATION_WORDS, 2), 1)
    return CALIBRATION_WORDS / answer.first_token_s


@dataclass(slots=True)
class Figures:
    """One entry per repeat."""

    alone: list[Seen] = field(default_factory=list)
    disturbed: list[Seen] = field(default_factory=list)

    def row(self, name: str) -> list[str]:
        """One line of a table."""

        def gaps(seen: list[Seen]) -> str:
            return spread([one.gap_ms for one in seen], digits=0)

        def firsts(seen: list[Seen]) -> str:
            if not all(one.first_ms for one in seen):
                return ""
            return spread([statistics.median(one.first_ms) for one in seen], digits=0)

        took = spread([one.took_s for one in self.disturbed], digits=1)
        alone, disturbed = self.alone, self.disturbed
        return [name, gaps(alone), gaps(disturbed), firsts(alone), firsts(disturbed), took]


def print_figures(figures: list[tuple[str, Figures]], what: str) -> None:
    """One table."""
    head = [
        "who",
        "largest gap ms",
        f"… while {what}",
        "new request TTFT ms",
        f"… while {what}",
        "that took s",
    ]
    print_table(head, [f.row(name) for name, f in figures])


def run(tiny: Path, smollm2: Path, repeats: int) -> None:
    """Measures and prints."""
    asyncio.run(_run(tiny, smollm2, repeats))


async def _run(tiny: Path, smollm2: Path, repeats: int) -> None:
    print("## Two models: the tiny one while SmolLM2 prefills or loads (CPU)\n")
    folders = {"a": smollm2, "b": tiny}
    entries = {name: {"path": str(folder)} for name, folder in folders.items()}
    prefill = {name: Figures() for name in ("mlxsup", "mlx_lm.server")}
    within = {name: Figures() for name in prefill}
    load = Figures()
    with Daemon(entries) as daemon, MlxLmServer(folders) as peer:
        async with AsyncClient(daemon.endpoint) as client:
            servers: list[Server] = [Mlxsup(client), peer]
            for model in folders:
                await client.load(model)
            speed = await words_per_second(servers[0], "a")
            long, shorter = int(PREFILL_S * speed), int(WITHIN_PREFILL_S * speed)
            for repeat in range(repeats):
                for server in servers:
                    await _two(server, prefill[server.name], words(long, 10 + repeat))
                for server in servers:
                    await _one(server, within[server.name], words(shorter, 20 + repeat))
                await client.unload("a")
                load.alone.append(await watch(servers[0], "b", ANSWER, quiet))
                load.disturbed.append(
                    await watch(servers[0], "b", ANSWER, lambda: client.load("a"))
                )
            [row] = [row for row in (await client.status())["models"] if row["name"] == "b"]
            assert row["restarts"] == 0
    print(f"{repeats} repeats; median (range); TTFT: median of a window's new requests\n")
    print(f"B streams; A (SmolLM2) reads {long} words; targets: gap ≤100 ms, TTFT ≤2×:\n")
    print_figures(list(prefill.items()), "A prefills")
    print("B streams; A loads:\n")
    print_figures([("mlxsup", load)], "A loads")
    print(f"Within SmolLM2: one answer streams while a prompt of {shorter} words is read:\n")
    print_figures(list(within.items()), "it prefills")


async def _two(server: Server, figures: Figures, prompt: str) -> None:
    figures.alone.append(await watch(server, "b", ANSWER, quiet))
    figures.disturbed.append(await watch(server, "b", ANSWER, lambda: server.ask("a", prompt, 1)))


async def _one(server: Server, figures: Figures, prompt: str) -> None:
    async def ask() -> None:
        await server.ask("a", prompt, 1)

    figures.alone.append(await watch(server, "a", WITHIN_ANSWER, quiet, probes=False))
    figures.disturbed.append(await watch(server, "a", WITHIN_ANSWER, ask, probes=False))
