"""Two engines on one GPU: memory over long prompts, gaps, and what both at once gain."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Any

from mlxsup.client import AsyncClient, RequestError

from ..fast_path.results import Found
from ..fast_path.stages import Rows, Setting, Stage
from ..long_prompt import live_rows
from ..prompts import prompt_tokens
from .models import model
from support.daemon import Daemon

ENGINES = ("one", "other")
LONG = 32_768
TURNS = 20
SETTLE_S = 10.0
"""How long after the last turn it is looked at what an idle engine holds."""

REPEATS = 5
ANSWERS = {"a": 160, "03b": 416}
"""Tokens of the answers of 7b and 03b, which take about as long as each other alone, at 140 and 370
tokens per second: both at once take no less than the longer one."""

INTO_IT_S = 0.5
GIB = 2**30

StatusRows = dict[str, dict[str, Any]]
"""Each model's row of the status."""


async def timed(work: Awaitable[object]) -> float:
    """Seconds that the work takes."""
    begin = time.perf_counter()
    await work
    return time.perf_counter() - begin


async def rows_of(client: AsyncClient) -> StatusRows:
    """See `StatusRows`."""
    return {row["name"]: row for row in (await client.status())["models"]}


# ---------------------------------------------------------------- memory


async def is_answered(client: AsyncClient, name: str, length: int, seed: int) -> bool:
    """Whether a prompt of that length gets its answer."""
    try:
        await client.complete(name, prompt_tokens=prompt_tokens(length, seed), max_tokens=8)
    except RequestError:
        return False
    return True


def deaths(before: StatusRows, after: StatusRows) -> int:
    """How many processes have been replaced meanwhile."""
    return sum(after[name]["generation"] - before[name]["generation"] for name in after)


async def long_prompts(setting: Setting, wanted: Sequence[str]) -> Rows:
    """Both engines read a long prompt in every turn, at the same time."""
    length = 256 if setting.is_small else LONG
    entry = {"path": str(model(setting, "7b"))}
    died, lost = [], []
    with Daemon(dict.fromkeys(ENGINES, entry)) as daemon:
        async with AsyncClient(daemon.endpoint) as client:
            for name in ENGINES:
                await client.load(name)
            before = await rows_of(client)
            for turn in range(setting.runs(TURNS)):
                answers = await asyncio.gather(
                    *(
                        is_answered(client, name, length, 2 * turn + n)
                        for n, name in enumerate(before)
                    )
                )
                after = await rows_of(client)
                died.append(deaths(before, after))
                lost.append(answers.count(False))
                before = after
            await asyncio.sleep(0.1 if setting.is_small else SETTLE_S)
            after = await rows_of(client)
            died[-1] += deaths(before, after)
    idle = list(after.values())
    held = [(row["active_bytes"] + row["cache_bytes"]) / GIB for row in idle]
    parts = {
        "in arrays": [row["active_bytes"] / GIB for row in idle],
        "for reuse by MLX": [row["cache_bytes"] / GIB for row in idle],
        "of it prefixes": [row["prefix_bytes"] / GIB for row in idle],
        "peak": [row["peak_bytes"] / GIB for row in idle],
    }
    yield (
        "long_prompts",
        {
            "long_prompts_died": Found(values=died),
            "long_prompts_lost": Found(values=lost),
            "long_prompts_idle": Found(values=held, sides=parts, unit="GiB"),
        },
    )


# ---------------------------------------------------------------- gaps


async def gap_ms(client: AsyncClient, name: str, work: Awaitable[object]) -> float:
    """The largest gap between two tokens of an answer of the model while the work is done."""
    async with live_rows(client, name) as live:
        begin = time.perf_counter()
        await work
        end = time.perf_counter()
        await live.next_tokens()  # so that the last gap is whole
        gaps = [b - a for own in live.times for a, b in pairwise(own) if b > begin and a < end]
    return 1000 * max(gaps)


async def first_ms(client: AsyncClient, name: str, seed: int) -> float:
    """Until a new request has its first token."""
    begin, first = time.perf_counter(), 0.0
    prompt = prompt_tokens(32, seed)
    async for delta in client.generate(name, prompt_tokens=prompt, max_tokens=2):
        if delta.token_ids and not first:
            first = time.perf_counter() - begin
    return 1000 * first


async def beside(setting: Setting, wanted: Sequence[str]) -> Rows:
    """A model next to one that reads, and two that answer at once."""
    length = 256 if setting.is_small else LONG
    repeats = setting.runs(REPEATS)
    folders = {"a": "7b", "03b": "03b", "7b": "7b"}
    needed = {"a", *(name.removeprefix("beside_") for name in wanted if name != "at_once")}
    needed |= {"03b"} if "at_once" in wanted else set()
    entries = {name: {"path": str(model(setting, folders[name]))} for name in sorted(needed)}

    def read(seed: int) -> Awaitable[object]:
        return client.complete("a", prompt_tokens=prompt_tokens(length, seed), max_tokens=1)

    with Daemon(entries) as daemon:
        async with AsyncClient(daemon.endpoint) as client:
            for name in entries:
                await client.load(name)
            await read(0)  # the first one is slower
            for name in ("03b", "7b"):
                if f"beside_{name}" not in wanted:
                    continue
                await gap_ms(client, name, asyncio.sleep(INTO_IT_S))
                gaps = [await gap_ms(client, name, read(10 + n)) for n in range(repeats)]
                found = {f"beside_{name}": Found(values=gaps)}
                if name == "03b":
                    found["beside_03b_first"] = await firsts(client, name, read, repeats)
                yield f"beside_{name}", found
            if "at_once" in wanted:
                yield "at_once", {"at_once": await gain(client, repeats)}


async def firsts(
    client: AsyncClient, name: str, read: Callable[[int], Awaitable[object]], repeats: int
) -> Found:
    """First tokens of new requests, alone and while the other model reads."""
    alone, meanwhile = [], []
    for repeat in range(repeats):
        alone.append(await first_ms(client, name, 100 + repeat))
        reading = asyncio.ensure_future(read(50 + repeat))
        await asyncio.sleep(INTO_IT_S)
        meanwhile.append(await first_ms(client, name, 200 + repeat))
        await reading
    middle = statistics.median(alone)
    sides = {"alone": alone, "meanwhile": meanwhile}
    return Found(values=[one / middle for one in meanwhile], sides=sides, unit="ms")


async def gain(client: AsyncClient, repeats: int) -> Found:
    """Wall time of answers one after the other, to that of both at once."""

    async def answer(name: str, seed: int) -> None:
        await client.complete(name, prompt_tokens=prompt_tokens(64, seed), max_tokens=ANSWERS[name])

    apart: list[list[float]] = []
    together = []
    for repeat in range(repeats + 1):
        each = [await timed(answer(name, repeat)) for name in ANSWERS]
        both = await timed(asyncio.gather(*(answer(name, repeat) for name in ANSWERS)))
        if repeat:  # the first round warms both up
            apart.append(each)
            together.append(both)
    values = [sum(each) / both for each, both in zip(apart, together, strict=True)]
    one, other = (list(own) for own in zip(*apart, strict=True))
    sides = {"7b alone": one, "03b alone": other, "at once": together}
    return Found(values=values, sides=sides, unit="s")


STAGES = (
    Stage(name="long_prompts", rows=("long_prompts",), measure=long_prompts),
    Stage(name="beside", rows=("beside_03b", "beside_7b", "at_once"), measure=beside),
)
