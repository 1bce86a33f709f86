"""A light client next to a heavy one: how long its first token takes (`light_next_to_heavy`).

Each client is a process, so each has its own account. The light one asks again and again for a
short answer. Next to it, in turn and on the same daemon: a competitor that has one request for each
row, and so keeps all rows busy while none of them waits; a heavy client with many times as many;
and one with a single request. In a fourth kind of round the heavy one's requests come from the
light one's process: both are one account, and so the order is that of arrival.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from mlxsup.cli.benchmark.burst import percentile
from mlxsup.client import AsyncClient

from ..shaped_model import make_shaped_model
from .figures import finish, parser_of
from .real_party import Flood, Order, Party
from .real_place import (
    CONTEXT,
    SHAPE,
    first_token_s,
    leaving_out,
    pooled,
    prompt_tokens,
    tell,
    until_row,
)
from support.daemon import Daemon

CLAIM = "light_next_to_heavy"
MODEL = "model"
ROWS = 4
HEAVY = 48
SHORTEST, LONGEST = 8, 64
PROMPT = 16
THINKS_S = 0.1
OPEN = {"one competitor": ROWS, "heavy": HEAVY, "a single request": 1, "same account": HEAVY}
"""The kinds of rounds, and how many requests the other side has open."""

PART = {"one competitor": 1, "heavy": 1, "a single request": 3, "same account": 10}
"""Divides the samples of a kind: the last two are only reported, and the last one is slow."""

SMALLEST_SAMPLE = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The first tokens of one round of each kind, in seconds."""

    first_s: dict[str, list[float]]


@asynccontextmanager
async def other_side(
    kind: str, endpoint: str, client: AsyncClient, seed: int
) -> AsyncIterator[None]:
    """The other client of a kind of round, with its requests open."""
    order = Order(
        endpoint=endpoint, model=MODEL, open_requests=OPEN[kind], seed=seed,
        shortest=SHORTEST, longest=LONGEST,
    )  # fmt: skip
    if kind == "same account":
        flood = Flood(client, order)
        running = asyncio.create_task(flood.run())
        await flood.has_begun.wait()
        yield
        flood.end()
        await running
        return
    party = await asyncio.to_thread(Party, order)
    try:
        yield
    finally:
        await asyncio.to_thread(party.__exit__, None, None, None)


async def sample(
    client: AsyncClient, kind: str, endpoint: str, count: int, seed: int
) -> list[float]:
    """First tokens of the light client next to that kind of other side, in seconds."""
    dice = random.Random(seed)
    rows = min(ROWS, OPEN[kind])
    async with other_side(kind, endpoint, client, seed):
        await until_row(client, MODEL, lambda row: len(row["running"]) >= rows, "busy rows")
        found = []
        for number in range(count):
            prompt = prompt_tokens(PROMPT, 1000 * seed + number)
            found.append(await first_token_s(client, MODEL, prompt))
            # It comes at any moment of the others' answers, as a person does.
            await asyncio.sleep(dice.uniform(0, THINKS_S))
    await until_row(client, MODEL, lambda row: not row["running"], "an idle model")
    return found


def ratio(rounds: Sequence[Round], kind: str) -> float:
    """p99 of a kind to that with one competitor, over all samples of these rounds."""
    p99 = {
        one: percentile([s for each in rounds for s in each.first_s[one]], 99)
        for one in (kind, "one competitor")
    }
    return p99[kind] / p99["one competitor"]


async def measure(folder: Path, samples: int, rounds: int) -> list[Round]:
    """Rounds of all kinds in turn."""
    found = []
    entry = {"path": str(folder), "max_concurrency": ROWS}
    with Daemon({MODEL: entry}) as daemon:
        async with AsyncClient(daemon.endpoint) as client:
            await client.load(MODEL)
            for number in range(rounds + 1):
                count = samples // rounds if number else 4  # the first round warms up
                first_s = {}
                for place, kind in enumerate(OPEN):
                    part = max(1, count // PART[kind])
                    seed = 10 * number + place + 1
                    first_s[kind] = await sample(client, kind, daemon.endpoint, part, seed)
                    tell(f"round {number}: {kind}: {percentile(first_s[kind], 50):.3f} s")
                if number:
                    found.append(Round(first_s=first_s))
    return found


def main() -> int:
    """Measures, prints and keeps."""
    parser = parser_of("real_light", __doc__)
    parser.add_argument("--samples", type=int, default=0, help="first tokens of each kind")
    given = parser.parse_args()
    samples, rounds = given.samples or (SMALLEST_SAMPLE if given.short else 900), 6
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mlxsup-light-") as folder:
        model = make_shaped_model(Path(folder) / MODEL, SHAPE, seed=1, context_length=CONTEXT)
        found = asyncio.run(measure(model, samples, rounds))
    for kind in OPEN:
        first_s = [1000 * s for each in found for s in each.first_s[kind]]
        p50, p99 = percentile(first_s, 50), percentile(first_s, 99)
        print(f"{kind}: p50 {p50:.0f} ms, p99 {p99:.0f} ms of {len(first_s)}")
    print(f"took {time.perf_counter() - begin:.0f} s", flush=True)
    peers = {
        "from the heavy client's own account": [ratio(found, "same account")],
        "next to a single request": [ratio(found, "a single request")],
    }
    count = sum(len(each.first_s["heavy"]) for each in found)
    note = f"{HEAVY} open requests against {ROWS}, one for each row; {count} samples of each kind"
    if count < SMALLEST_SAMPLE:
        print(f"not shown: {CLAIM} needs {SMALLEST_SAMPLE} samples, these are {count}")
    of_heavy = leaving_out(found, lambda some: ratio(some, "heavy"))
    one = pooled(CLAIM, ratio(found, "heavy"), of_heavy, peers=peers, runs=len(found), note=note)
    return finish([one], is_kept=given.keep and count >= SMALLEST_SAMPLE)


if __name__ == "__main__":
    sys.exit(main())
