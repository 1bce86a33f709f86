"""Two models that read a long prompt each next to answers that stream, in turns and at once.

`python -m bench.leases [--shape tiny|small|7b] [--prompt-tokens N] [--repeats N]`. One daemon
serves both models throughout. Between two rounds its configuration is reloaded, with
`max_parallel_prefills` at 1 (the prompts are read in turns, chunk by chunk) or at 2 (leases are
never needed), so that neither kind of round has a warmer machine than the other. What a GPU shows
is kept by `python -m bench.gpu FOLDER --rows leases`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from mlxsup.cli.benchmark.burst import percentile
from mlxsup.client import AsyncClient

from .long_prompt import ROWS, SHAPE, live_rows
from .prompts import prompt_tokens
from .report import machine_lines, print_table, spread
from .shaped_model import SEVEN_B, SMALL, make_shaped_model
from support.daemon import Daemon, row

SHAPES = {"tiny": SHAPE, "small": SMALL, "7b": SEVEN_B}
CONTEXT = 40960
MODELS = ("one", "other")
LIMITS = {"in turns": 1, "at once": 2}
"""What a round is called, and its `max_parallel_prefills`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one round has shown.

    Attributes:
        first_s: from the question to the first token, of both prompts, the sooner one first.
        gaps_ms: from one token of an answer to its next, until both prompts were read.
        decoded_per_s: tokens of the answers meanwhile.
        read_per_s: tokens of both prompts, by the time until both were read.
    """

    first_s: tuple[float, float]
    gaps_ms: list[float]
    decoded_per_s: float
    read_per_s: float


async def read_prompt(client: AsyncClient, model: str, tokens: list[int]) -> float:
    """Has a prompt read, for one token; when that came."""
    async for delta in client.generate(model, prompt_tokens=tokens, max_tokens=1):
        if delta.token_ids:
            return time.perf_counter()
    raise AssertionError("no token")


async def one_round(client: AsyncClient, count: int, seed: int) -> Round:
    """Streams answers of both models, and has both read a prompt of that many tokens."""
    async with AsyncExitStack() as stack:
        lives = [await stack.enter_async_context(live_rows(client, name)) for name in MODELS]
        begin = time.perf_counter()
        first, second = sorted(
            await asyncio.gather(
                *(
                    read_prompt(client, name, prompt_tokens(count, seed + place))
                    for place, name in enumerate(MODELS)
                )
            )
        )
        for live in lives:
            await live.next_tokens()  # so that the last gap is whole
        answers = [times for live in lives for times in live.times]
    gaps = [
        (after - before) * 1000
        for times in answers
        for before, after in pairwise(times)
        if after > begin and before < second
    ]
    took_s = second - begin
    return Round(
        first_s=(first - begin, took_s),
        gaps_ms=gaps,
        decoded_per_s=sum(begin < at <= second for times in answers for at in times) / took_s,
        read_per_s=len(MODELS) * count / took_s,
    )


def print_rounds(rounds: dict[str, list[Round]]) -> None:
    """One row for each kind of round: medians and ranges over its rounds."""
    columns: dict[str, Callable[[Round], float]] = {
        "first token s": lambda one: one.first_s[0],
        "… of the later one": lambda one: one.first_s[1],
        "p50 gap ms": lambda one: percentile(one.gaps_ms, 50),
        "p99 gap ms": lambda one: percentile(one.gaps_ms, 99),
        "largest gap ms": lambda one: max(one.gaps_ms),
        "answers tok/s": lambda one: one.decoded_per_s,
        "prompts tok/s": lambda one: one.read_per_s,
    }
    rows = [
        [name, *(spread([of(one) for one in some], digits=1) for of in columns.values())]
        for name, some in rounds.items()
    ]
    print_table(["prompts are read", *columns], rows)


async def measure(
    daemon: Daemon, models: dict[str, Any], count: int, repeats: int
) -> dict[str, list[Round]]:
    """Rounds of both kinds in turn; the first of each warms up and is left out."""
    rounds: dict[str, list[Round]] = {name: [] for name in LIMITS}
    async with AsyncClient(daemon.endpoint) as client:
        for name in MODELS:
            await client.load(name)
        for repeat in range(repeats + 1):
            for place, (name, limit) in enumerate(LIMITS.items()):
                daemon.write_config(models, {"max_parallel_prefills": limit})
                reloaded = await asyncio.to_thread(daemon.run, "reload")
                assert reloaded.returncode == 0, reloaded.stderr
                found = await one_round(client, count, 10 * repeat + 2 * place)
                if repeat:
                    rounds[name].append(found)
    with daemon.client() as plain:
        assert all(row(plain, name)["restarts"] == 0 for name in MODELS)
    return rounds


def main() -> None:
    """Makes the models, starts a daemon with both, and measures."""
    parser = argparse.ArgumentParser(prog="python -m bench.leases", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--prompt-tokens", type=int, default=4096, metavar="N")
    given = parser.parse_args()
    print("\n".join(machine_lines()) + "\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="mlxsup-leases-") as folder:
        models = {
            name: {
                "path": str(
                    make_shaped_model(
                        Path(folder) / name, SHAPES[given.shape], seed=seed, context_length=CONTEXT
                    )
                ),
                "preload": False,
                "max_concurrency": 2 * ROWS,
            }
            for seed, name in enumerate(MODELS)
        }
        print(
            f"## Two models ({given.shape}) read {given.prompt_tokens:,} tokens each next to"
            f" {ROWS} answers each\n\n{given.repeats} rounds of each kind, in turn;"
            " median (range)\n"
        )
        with Daemon(models) as daemon:
            print_rounds(asyncio.run(measure(daemon, models, given.prompt_tokens, given.repeats)))


if __name__ == "__main__":
    main()
