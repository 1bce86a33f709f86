"""What follows a load: the first bursts, and kernels that nobody has compiled yet."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from typing import Any

from mlxsup.client import AsyncClient

from ..fast_path.bursts import CountedBurst, counted_burst, prompts_of, steps_note
from ..fast_path.results import Found
from ..fast_path.stages import Rows, Setting, Stage
from ..prompts import prompt_tokens
from .models import model
from support.daemon import Daemon

STREAMS = 16
BURSTS = 3
LOADS = 5
TOKENS = 32
BURST_MODELS = ("7b", "03b", "1b4")

KERNEL_MODELS = ("1b4", "7b", "03b")
KINDS = ((1, 32), (4, 32), (16, 32), (1, 512), (2, 32), (8, 32), (1, 2048), (32, 32))
"""Streams, and tokens of each prompt: of every class a worker compiles other kernels."""

CACHE = "MLX_PTX_CACHE_DIR"


@asynccontextmanager
async def without_kernels(name: str, entry: dict[str, Any]) -> AsyncIterator[AsyncClient]:
    """A client of a daemon with one model, whose workers find no compiled kernel.

    They keep theirs in a folder that was empty, wherever the environment of this script says that
    all rows share them.
    """
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mlxsup-kernels-"))
        daemon = Daemon({name: entry})
        stack.push(daemon)
        daemon.start(environment={CACHE: folder})
        yield await stack.enter_async_context(AsyncClient(daemon.endpoint))


async def three_bursts(client: AsyncClient, name: str, seed: int) -> list[CountedBurst]:
    """The first bursts of a new process."""
    await client.restart(name, now=True)
    return [
        await counted_burst(client, name, prompts_of(STREAMS, 10 * seed + number), TOKENS)
        for number in range(BURSTS)
    ]


async def first_bursts(setting: Setting, wanted: Sequence[str]) -> Rows:
    """First tokens of the first burst after a load, next to those of the third one."""
    for name in BURST_MODELS:
        if f"first_burst_{name}" not in wanted:
            continue
        entry = {"path": str(model(setting, name)), "max_concurrency": STREAMS}
        async with without_kernels(name, entry) as client:
            await client.load(name)
            await three_bursts(client, name, 0)  # whatever is compiled once is compiled now
            found = [
                await three_bursts(client, name, 1 + load) for load in range(setting.runs(LOADS))
            ]
        times = [[1000 * burst.first_s for burst in bursts] for bursts in found]
        row = f"first_burst_{name}"
        yield (
            row,
            {
                row: Found(
                    values=[own[0] / own[-1] for own in times],
                    sides={"first": [own[0] for own in times], "third": [own[-1] for own in times]},
                    unit="ms",
                    note=steps_note([bursts[0] for bursts in found]),
                )
            },
        )


async def longest_wait_s(client: AsyncClient, name: str, streams: int, length: int) -> float:
    """The longest that anybody waits for a token: no step took longer."""
    times: list[list[float]] = [[time.perf_counter()] for _ in range(streams)]

    async def read(seed: int, own: list[float]) -> None:
        prompt = prompt_tokens(length, 1000 * length + 50 * streams + seed)
        async for delta in client.generate(name, prompt_tokens=prompt, max_tokens=TOKENS):
            if delta.token_ids:
                own.append(time.perf_counter())

    async with asyncio.TaskGroup() as group:
        for seed, own in enumerate(times):
            group.create_task(read(seed, own))
    return max(after - before for own in times for before, after in pairwise(own))


async def kernels(setting: Setting, wanted: Sequence[str]) -> Rows:
    """Requests of many kinds to a process that finds no compiled kernel."""
    for name in KERNEL_MODELS:
        row = f"kernels_{name}"
        if row not in wanted:
            continue
        entry = {"path": str(model(setting, name)), "max_concurrency": 2 * STREAMS}
        async with without_kernels(name, {**entry, "preload": False}) as client:
            begin = time.perf_counter()
            await client.load(name)
            load_s = time.perf_counter() - begin
            waits = [await longest_wait_s(client, name, *kind) for kind in KINDS]
        sides = {"load": [load_s]}
        for (streams, length), wait_s in zip(KINDS, waits, strict=True):
            sides[f"{streams}×{length} tokens"] = [wait_s]
        yield row, {row: Found(values=waits, sides=sides, unit="s")}


STAGES = (
    Stage(
        name="first_bursts",
        rows=tuple(f"first_burst_{name}" for name in BURST_MODELS),
        measure=first_bursts,
    ),
    Stage(name="kernels", rows=tuple(f"kernels_{name}" for name in KERNEL_MODELS), measure=kernels),
)
