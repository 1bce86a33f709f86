"""A prompt of 40,000 tokens beside live streams of the same model: what the others wait (C9, G1).

Two worker processes serve the same model. One has the default `decode_stall_target_ms`; the other
has one of a minute and a `step_timeout_s` of an hour, with which the chunk grows to the largest
there is, 2,048, and stays there. So a fixed chunk is measured through the same product, by
settings alone; the table says which chunks `status` told.

A third entry of the model refuses the prompt for its length, after it has been tokenised: that
shows what tokenising alone costs the others, on a thread of the worker, and next to it in a
separate process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from mlxsup.cli.benchmark.burst import percentile
from mlxsup.client import AsyncClient, RequestError
from mlxsup.client.async_streams import AsyncStream
from mlxsup.protocol.errors import ErrorCode

from .control import row, until_cancelled
from .report import print_table, spread
from .shaped_model import Shape, make_shaped_model
from .two_models import words
from support.child import Child
from support.daemon import Daemon
from support.verdict import Verdict

SHAPE = Shape(
    layers=2, hidden=256, intermediate=1024, heads=1, key_value_heads=1, head=32, dtype="float32"
)
"""Slow enough on two cores for a chunk of 2,048 to take seconds; 40,000 tokens take a minute."""

PROMPT_TOKENS = 40_000
CONTEXT = 49_152
TARGET_MS = 250
ROWS = 4
QUIET_S = 5.0
TOKENISED_TIMES = 10
LOOK_EVERY_S = 0.5
WAIT_S = 120.0
JOIN_GAPS = 2
"""The last gaps before the prompt's first token: the steps in which its row joins the others."""


class Tokeniser:
    """The child process that tokenises."""

    def __init__(self, model: Path) -> None:
        self._child = Child("-m", "bench.tokenise", model)

    def work(self, prompt: str, times: int) -> dict[str, Any]:
        """How many tokens, and how many seconds for all times together."""
        return self._child.ask({"prompt": prompt, "times": times})

    def close(self) -> None:
        """Ends the child."""
        self._child.end()


@dataclass(slots=True, kw_only=True)
class Window:
    """What the live rows saw in one window.

    Attributes:
        gaps_ms: from one token of a row to its next, of all rows.
        join_ms: the largest of those in which the prompt's row joined.
        read_ms: the largest of the others.
        took_s: how long the disturbance took, or one of many.
        chunks: that `status` told, other than 0.
    """

    gaps_ms: list[float] = field(default_factory=list)
    join_ms: float = 0.0
    read_ms: float = 0.0
    took_s: float = 0.0
    chunks: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Rows that stream.

    Attributes:
        times: of each row's tokens; they grow meanwhile.
        have_token: set with each token of a row.
    """

    times: list[list[float]]
    have_token: list[asyncio.Event]

    async def next_tokens(self) -> None:
        """Waits for one more token of each row."""
        for event in self.have_token:
            event.clear()
        async with asyncio.timeout(WAIT_S):
            for event in self.have_token:
                await event.wait()


@asynccontextmanager
async def live_rows(client: AsyncClient, model: str) -> AsyncIterator[Live]:
    """Streams ROWS answers."""
    times: list[list[float]] = [[] for _ in range(ROWS)]
    have_token = [asyncio.Event() for _ in range(ROWS)]

    async def read(stream: AsyncStream, own: list[float], has_token: asyncio.Event) -> None:
        async for delta in stream:
            if delta.token_ids:
                own.append(time.perf_counter())
                has_token.set()

    streams = [client.generate(model, prompt=words(8, seed)) for seed in range(ROWS)]
    readers = [
        asyncio.create_task(read(*one)) for one in zip(streams, times, have_token, strict=True)
    ]
    for event in have_token:
        await event.wait()
    yield Live(times=times, have_token=have_token)
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*readers)
    for stream in streams:
        await until_cancelled(stream)


async def watch(client: AsyncClient, model: str, disturb: Callable[[], Awaitable[float]]) -> Window:
    """Streams while something happens, which says when the prompt's first token came (0: never)."""
    window = Window()

    async def look() -> None:
        while True:
            chunk = (await row(client, model))["prefill_chunk"]
            if isinstance(chunk, int) and chunk:
                window.chunks.add(chunk)
            await asyncio.sleep(LOOK_EVERY_S)

    async with live_rows(client, model) as live:
        looking = asyncio.create_task(look())
        begin = time.perf_counter()
        first_at = await disturb()
        end = time.perf_counter()
        looking.cancel()
        await live.next_tokens()  # so that the last gap is whole
        window.took_s = (first_at or end) - begin
        for own in live.times:
            _take_gaps(window, own, begin, end, first_at)
    return window


def _take_gaps(
    window: Window, times: list[float], begin: float, end: float, first_at: float
) -> None:
    gaps = [(b, (b - a) * 1000) for a, b in pairwise(times) if b > begin and a < end]
    window.gaps_ms += [gap for _, gap in gaps]
    before = [at for at, _ in gaps if at <= first_at][-JOIN_GAPS:]
    join_from = before[0] if before else end
    joining = [gap for at, gap in gaps if first_at and at >= join_from]
    reading = [gap for at, gap in gaps if not first_at or at < join_from]
    window.join_ms = max([window.join_ms, *joining])
    window.read_ms = max([window.read_ms, *reading])


async def quiet() -> float:
    """No disturbance."""
    await asyncio.sleep(QUIET_S)
    return 0.0


async def ask(client: AsyncClient, model: str, prompt: str) -> float:
    """Has the prompt read, for one token; when that came."""
    first_at = 0.0
    async for delta in client.generate(model, prompt=prompt, max_tokens=1):
        if delta.token_ids:
            first_at = time.perf_counter()
    assert first_at
    return first_at


async def ask_in_vain(client: AsyncClient, model: str, prompt: str) -> float:
    """Has the prompt tokenised, time and again, and refused."""
    for _ in range(TOKENISED_TIMES):
        code = None
        try:
            await client.complete(model, prompt=prompt, max_tokens=1)
        except RequestError as error:
            code = error.code
        assert code is ErrorCode.CONTEXT_LENGTH_EXCEEDED, code
    return 0.0


def gap_cells(windows: list[Window]) -> list[str]:
    """p50, p99 and the largest."""
    return [
        *(spread([percentile(w.gaps_ms, p) for w in windows], digits=1) for p in (50, 99)),
        spread([max(w.gaps_ms) for w in windows], digits=0),
    ]


def print_prefill(figures: dict[str, list[Window]], tokens: int) -> None:
    """The table of the whole way, and whether the rule was kept."""
    quiet_windows, adaptive = figures["no prompt"], figures["adaptive chunk"]
    print(
        f"{ROWS} rows stream; a prompt of {tokens:,} tokens comes. Gaps between a row's tokens:\n"
    )
    head = ["what", "p50 ms", "p99 ms", "largest ms", "… while it is read", "… when it joins"]
    rows = []
    for name, windows in figures.items():
        cells = [name, *gap_cells(windows)]
        if windows is quiet_windows:
            cells += ["", "", "", ""]
        else:
            chunks = set[int]().union(*(w.chunks for w in windows))
            cells += [
                spread([w.read_ms for w in windows], digits=0),
                spread([w.join_ms for w in windows], digits=0),
                spread([w.took_s for w in windows], digits=1),
                f"{min(chunks)} to {max(chunks)}",
            ]
        rows.append(cells)
    print_table([*head, "first token s", "chunks seen"], rows)
    print(rule_line(quiet_windows, adaptive))


def rule_line(quiet_windows: Sequence[Window], adaptive: Sequence[Window]) -> str:
    """Whether any gap beside the adaptive chunk was larger than the target and one step.

    Args:
        quiet_windows: without a prompt; the p99 of a window's gaps is its step.
        adaptive: with it, one for each of those.
    """
    limits_ms = [TARGET_MS + _p99(window) for window in quiet_windows]
    largest_ms = [max(window.gaps_ms) for window in adaptive]
    is_kept = all(gap <= limit for gap, limit in zip(largest_ms, limits_ms, strict=True))
    return (
        f"The rule: no gap is larger than `decode_stall_target_ms` ({TARGET_MS} ms) and one step,\n"
        f"the p99 of those without a prompt: {spread(limits_ms, ' ms', digits=1)}. The largest\n"
        f"gap with the adaptive chunk, {spread(largest_ms, ' ms', digits=1)}:"
        f" {Verdict.KEPT if is_kept else Verdict.MISSED}.\n"
    )


def _p99(window: Window) -> float:
    return percentile(window.gaps_ms, 99)


def print_tokenising(figures: dict[str, list[Window]]) -> None:
    """The table of tokenising alone."""
    print(f"The same prompt tokenised alone, {TOKENISED_TIMES} times without a pause (G1):\n")
    base = [percentile(w.gaps_ms, 99) for w in figures["no prompt"]]
    rows = []
    for name, windows in figures.items():
        ratios = [_p99(w) / b for w, b in zip(windows, base, strict=True)]
        each = spread([w.took_s * 1000 / TOKENISED_TIMES for w in windows], digits=0)
        rows.append(
            [name, *gap_cells(windows), spread(ratios), "" if windows[0].took_s == 0 else each]
        )
    print_table(["what", "p50 ms", "p99 ms", "largest ms", "p99 to none", "ms each"], rows)


def run(folder: Path, repeats: int, tokens: int = PROMPT_TOKENS) -> None:
    """Measures and prints.

    Args:
        folder: for the model.
        repeats: of everything.
        tokens: of the prompt, about.
    """
    model = make_shaped_model(folder, SHAPE, seed=1, context_length=CONTEXT)
    tokeniser = Tokeniser(model)
    try:
        asyncio.run(_run(model, tokeniser, repeats, tokens))
    finally:
        tokeniser.close()


async def _run(model: Path, tokeniser: Tokeniser, repeats: int, tokens: int) -> None:
    print("## A long prompt within one model (CPU, a small llama)\n", flush=True)
    per_word = tokeniser.work(words(2000, 0), 1)["tokens"] / 2000
    prompts = [words(int(tokens / per_word), 10 + number) for number in range(2 * repeats)]
    count = int(tokeniser.work(prompts[0], 1)["tokens"])
    entries: dict[str, dict[str, Any]] = {
        "adaptive": {"decode_stall_target_ms": TARGET_MS},
        "fixed": {"decode_stall_target_ms": 60_000, "step_timeout_s": 3600},
        "refuses": {"context_length": tokens // 4},
    }
    models = {
        name: {"path": str(model), "max_concurrency": 2 * ROWS, **entry}
        for name, entry in entries.items()
    }
    prefill: dict[str, list[Window]] = {
        n: [] for n in ("no prompt", "adaptive chunk", "chunk of 2,048")
    }
    alone: dict[str, list[Window]] = {
        n: [] for n in ("no prompt", "worker's thread", "own process")
    }
    with Daemon(models) as daemon:
        async with AsyncClient(daemon.endpoint) as client:
            for name in models:
                await client.load(name)
            for repeat in range(repeats):
                first, second = prompts[2 * repeat : 2 * repeat + 2]
                prefill["no prompt"].append(await watch(client, "adaptive", quiet))
                adaptive = partial(ask, client, "adaptive", first)
                prefill["adaptive chunk"].append(await watch(client, "adaptive", adaptive))
                fixed = partial(ask, client, "fixed", second)
                prefill["chunk of 2,048"].append(await watch(client, "fixed", fixed))
                await _tokenise_alone(client, tokeniser, first, alone)
            for name in models:
                assert (await row(client, name))["restarts"] == 0
    print(
        "Both kinds of chunk come from the same code: the adaptive one has the default\n"
        "`decode_stall_target_ms`, the other one a target of a minute with a `step_timeout_s` of\n"
        "an hour, so that the chunk grows to 2,048 and stays there.\n"
    )
    print(f"{repeats} repeats; median (range)\n")
    print_prefill(prefill, count)
    print_tokenising(alone)


async def _tokenise_alone(
    client: AsyncClient, tokeniser: Tokeniser, prompt: str, figures: dict[str, list[Window]]
) -> None:
    async def beside() -> float:
        await asyncio.to_thread(tokeniser.work, prompt, TOKENISED_TIMES)
        return 0.0

    still = await watch(client, "refuses", quiet)
    still.took_s = 0.0
    figures["no prompt"].append(still)
    figures["worker's thread"].append(
        await watch(client, "refuses", lambda: ask_in_vain(client, "refuses", prompt))
    )
    figures["own process"].append(await watch(client, "refuses", beside))
