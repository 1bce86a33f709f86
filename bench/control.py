"""Round trips of the control plane while a worker is busy, loading or stopped (H1)."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import psutil

from mlxsup.cli.benchmark import percentile
from mlxsup.client import AsyncClient, FinishReason
from mlxsup.client.async_streams import AsyncStream

from .report import print_table, spread
from .two_models import words
from support.daemon.daemon import Daemon

TARGET_MS = 50.0
WATCH_S = 1.5
PAUSE_S = 0.005
LONG_PROMPT_WORDS = 2000
"""Far more than is read in WATCH_S at any speed seen on a CPU; the request is then cancelled."""

IsOver = Callable[[], bool]

Samples = defaultdict[tuple[str, str], list[float]]
"""Milliseconds by state of the worker and kind of message."""


async def until_cancelled(stream: AsyncStream) -> None:
    """Cancels, and returns when the stream has ended."""
    stream.cancel()
    async for _ in stream:
        pass
    assert stream.result.finish_reason is FinishReason.CANCELLED


async def row(client: AsyncClient, model: str) -> dict[str, object]:
    """A model's row of the status."""
    return next(r for r in (await client.status())["models"] if r["name"] == model)


@asynccontextmanager
async def idle(client: AsyncClient) -> AsyncIterator[IsOver]:
    """Nothing runs."""
    await client.ping()
    yield lambda: False


@asynccontextmanager
async def prefilling(client: AsyncClient) -> AsyncIterator[IsOver]:
    """SmolLM2 reads a long prompt all the while."""
    prompt = words(LONG_PROMPT_WORDS, seed=1)
    stream = client.generate("smollm2", prompt=prompt, max_tokens=1)
    yield lambda: False
    await until_cancelled(stream)


@asynccontextmanager
async def decoding(client: AsyncClient) -> AsyncIterator[IsOver]:
    """The tiny model answers four requests as fast as it can."""
    streams = [client.generate("tiny", prompt=f"{n}", max_tokens=4000) for n in range(4)]
    yield lambda: False
    for stream in streams:
        await until_cancelled(stream)


@asynccontextmanager
async def loading(client: AsyncClient) -> AsyncIterator[IsOver]:
    """SmolLM2 loads."""
    await client.unload("smollm2")
    task = asyncio.create_task(client.load("smollm2"))
    yield task.done
    await task


@asynccontextmanager
async def stopped(client: AsyncClient) -> AsyncIterator[IsOver]:
    """The tiny model's worker is stopped by SIGSTOP in the middle of an answer."""
    stream = client.generate("tiny", prompt="stop", max_tokens=4000)
    await anext(stream)
    pid = (await row(client, "tiny"))["pid"]
    assert isinstance(pid, int)
    worker = psutil.Process(pid)
    worker.suspend()
    yield lambda: False
    worker.resume()
    await until_cancelled(stream)


State = Callable[[AsyncClient], AbstractAsyncContextManager[IsOver]]
STATES: dict[str, tuple[State, str]] = {
    "idle": (idle, "tiny"),
    "prefills": (prefilling, "smollm2"),
    "decodes, 4 rows": (decoding, "tiny"),
    "loads": (loading, "smollm2"),
    "stopped by SIGSTOP": (stopped, "tiny"),
}
"""States, each with the model that is in it."""


async def watch(
    client: AsyncClient, name: str, model: str, is_over: IsOver, samples: Samples
) -> None:
    """Ping, status and cancel of a request to that model, in turn, for WATCH_S at most."""

    async def cancel() -> None:
        stream = client.generate(model, prompt="short", max_tokens=4000)
        begin = time.perf_counter()
        await until_cancelled(stream)
        samples[name, "cancel"].append((time.perf_counter() - begin) * 1000)

    end = time.perf_counter() + WATCH_S
    while time.perf_counter() < end and not is_over():
        begin = time.perf_counter()
        await client.ping()
        middle = time.perf_counter()
        await client.status()
        samples[name, "status"].append((time.perf_counter() - middle) * 1000)
        samples[name, "ping"].append((middle - begin) * 1000)
        await cancel()
        await asyncio.sleep(PAUSE_S)


def run(tiny: Path, smollm2: Path, repeats: int) -> None:
    """Measures and prints."""
    asyncio.run(_run(tiny, smollm2, repeats))


async def _run(tiny: Path, smollm2: Path, repeats: int) -> None:
    print("## Control plane: round trips by what a worker does (CPU)\n")
    rounds: list[Samples] = []
    models = {"tiny": {"path": str(tiny)}, "smollm2": {"path": str(smollm2)}}
    with Daemon(models) as daemon:
        async with AsyncClient(daemon.endpoint) as client, AsyncClient(daemon.endpoint) as other:
            for model in models:
                await client.load(model)
            for repeat in range(repeats + 1):
                samples: Samples = defaultdict(list)
                for name, (state, model) in STATES.items():
                    # The work and the questions come on separate connections, as from two
                    # programs.
                    async with state(other) as is_over:
                        await watch(client, name, model, is_over, samples)
                if repeat:  # a first round warms everything up
                    rounds.append(samples)
    rows = [
        [
            state,
            kind,
            spread([percentile(samples[state, kind], 50) for samples in rounds]),
            spread([percentile(samples[state, kind], 99) for samples in rounds]),
            spread([max(samples[state, kind]) for samples in rounds]),
            str(sum(len(samples[state, kind]) for samples in rounds)),
        ]
        for state in STATES
        for kind in ("ping", "status", "cancel")
    ]
    print(f"{repeats} repeats; median (range) in ms; target: p99 ≤{TARGET_MS:.0f} ms\n")
    print_table(["worker", "message", "p50", "p99", "largest", "samples"], rows)
