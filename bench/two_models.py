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

from .report import print_table, spread
from .servers import MlxLmServer, Mlxsup, Server
from support.daemon.daemon import Daemon

PREFILL_S = 9.0
"""How long A's prompt should take to read, alone; beside B's stream it takes some 12 s."""

WITHIN_PREFILL_S = 2.5
"""The same for the run within one model."""

QUIET_S = 3.0
"""How long B is watched undisturbed."""

ANSWER = 512
"""Tokens of each of B's answers; the next one is asked for when one has ended."""

WITHIN_ANSWER = 32
"""Long enough for one answer to span the other's prefill in mlxsup."""

PROBE_EVERY_S = 0.5
CALIBRATION_WORDS = 120
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child")

Disturbance = Callable[[], Awaitable[object]]


def words(count: int, seed: int) -> str:
    """A prompt of that many words; another seed gives another one from the first word on."""
    chooser = random.Random(seed)
    return " ".join([str(seed), *(chooser.choice(WORDS) for _ in range(count - 1))])


@dataclass(slots=True, kw_only=True)
class Seen:
    """What B's users saw in one window.

    Attributes:
        gap_ms: the longest time from one token of an answer to its next.
        gaps_ms: all such times.
        silence_ms: the longest time in which the stream brought nothing: the next answer's first
            token counts as well.
        first_ms: times to first token of the new requests.
        took_s: how long the disturbance took.
    """

    gap_ms: float = 0.0
    gaps_ms: list[float] = field(default_factory=list)
    silence_ms: float = 0.0
    first_ms: list[float] = field(default_factory=list)
    took_s: float = 0.0


async def watch(
    server: Server, model: str, answer: int, disturb: Disturbance, *, probes: bool = True
) -> Seen:
    """Streams and asks anew while the disturbance runs; reads everything to its end."""
    seen = Seen()
    is_over = asyncio.Event()
    has_begun = asyncio.Event()
    answers: list[list[float]] = []

    def on_token(now: float) -> None:
        answers[-1].append(now)
        has_begun.set()

    async def stream() -> None:
        while not is_over.is_set():
            answers.append([])
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
    seen.took_s = end - begin
    seen.gaps_ms = [gap * 1000 for times in answers for gap in gaps_s(times, begin, end)]
    seen.gap_ms = max(seen.gaps_ms, default=0.0)
    seen.silence_ms = largest_gap_s([t for times in answers for t in times], begin, end) * 1000
    return seen


def gaps_s(times: list[float], begin: float, end: float) -> list[float]:
    """The steps between times that touch the window."""
    return [b - a for a, b in pairwise(times) if b > begin and a < end]


def largest_gap_s(times: list[float], begin: float, end: float) -> float:
    """The largest of them; 0 if there is none."""
    return max(gaps_s(times, begin, end), default=0.0)


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

        def longest(seen: list[Seen]) -> str:
            if not has_probes:
                return spread([one.gap_ms for one in seen], digits=0)
            return spread([one.silence_ms for one in seen], digits=0)

        alone, disturbed = self.alone, self.disturbed
        has_probes = all(one.first_ms for one in (*alone, *disturbed))
        cells = [name, longest(alone), longest(disturbed)]
        if has_probes:
            before, during = (
                [statistics.median(o.first_ms) for o in s] for s in (alone, disturbed)
            )
            ratios = [b / a for a, b in zip(before, during, strict=True)]
            cells += [spread(before, digits=0), spread(during, digits=0), spread(ratios, digits=1)]
        return [*cells, spread([one.took_s for one in disturbed], digits=1)]


def print_figures(figures: list[tuple[str, Figures]], what: str) -> None:
    """One table; without new requests, the gaps are those within one answer."""
    rows = [f.row(name) for name, f in figures]
    first = ["new request TTFT ms", f"… while {what}", "ratio"]
    head = ["who", "largest gap ms", f"… while {what}", *first, "that took s"]
    print_table(head if len(rows[0]) == len(head) else [*head[:3], head[-1]], rows)


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
