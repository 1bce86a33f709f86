"""Bursts of prompts of different lengths of crowd: tokens per second and time to first token.

mlxsup over its socket and over HTTP, mlx-lm's BatchGenerator in a process of its own (the floor),
and mlx_lm.server. Each round asks all of them once, in changing order, with prompts that no cache
has seen. A server that fails takes no further part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from mlxsup.cli.benchmark import AnswerError, Burst, ask_over_socket
from mlxsup.client import AsyncClient

from .floor import Floor
from .report import order_in_round, print_table, spread
from .servers import MlxLmServer, gateway, mlx_lm
from support.gateway.http_daemon import HttpDaemon

MODEL = "m"
STREAMS = (1, 4, 16)
TOKENS = 64
PEER_LIMIT_S = 600.0
WORDS = (
    "is the number of this prompt of the benchmark which has some more words so that it is as long"
    " as a short question"
)

Ask = Callable[[Sequence[str]], Awaitable[Burst]]


def prompts_of(count: int, seed: int) -> list[str]:
    """Return prompts that differ from their first word on."""
    return [f"{seed} {number} {WORDS}" for number in range(count)]


async def _measure(sides: dict[str, Ask], repeats: int) -> dict[tuple[int, str], list[Burst]]:
    """Return the bursts of each number of streams and side; of a side that fails, none."""
    found: dict[tuple[int, str], list[Burst]] = {}
    seed = 0
    for streams in STREAMS:
        for repeat in range(-1, repeats):  # the first round warms up
            for side in order_in_round(list(sides), repeat):
                seed += 1
                try:
                    async with asyncio.timeout(PEER_LIMIT_S):
                        burst = await sides[side](prompts_of(streams, seed))
                except (AssertionError, AnswerError, OSError, TimeoutError) as error:
                    print(f"{side} takes no further part: {error}", flush=True)
                    del sides[side]
                    continue
                if repeat >= 0:
                    found.setdefault((streams, side), []).append(burst)
    return found


async def _run(folder: Path, repeats: int) -> dict[tuple[int, str], list[Burst]]:
    entry = {"path": str(folder), "preload": True, "max_concurrency": max(STREAMS)}
    with ExitStack() as stack:
        daemon = stack.enter_context(HttpDaemon({MODEL: entry}))
        stack.enter_context(daemon.client()).load(MODEL)
        floor = stack.enter_context(Floor(folder, max(STREAMS)))
        process = stack.enter_context(MlxLmServer({MODEL: folder}, "--model", str(folder)))
        over_http, peer = gateway(daemon, [MODEL]), mlx_lm(process, {MODEL: folder})
        async with AsyncClient(daemon.endpoint) as client:

            async def alone(prompts: Sequence[str]) -> Burst:
                sent_s = [0.0] * len(prompts)
                times = await asyncio.to_thread(floor.burst, prompts, sent_s, TOKENS)
                return Burst(sent_s=sent_s, times=times)

            sides: dict[str, Ask] = {
                "mlxsup": lambda prompts: ask_over_socket(
                    client, MODEL, [{"prompt": prompt} for prompt in prompts], TOKENS
                ),
                "mlxsup over HTTP": lambda prompts: over_http.burst(MODEL, prompts, TOKENS),
                "in process": alone,
                "mlx_lm.server": lambda prompts: peer.burst(MODEL, prompts, TOKENS),
            }
            return await _measure(sides, repeats)


def run(folder: Path, repeats: int) -> None:
    """Measure and print.

    Args:
        folder: of the model.
        repeats: rounds.
    """
    print(f"## Throughput of bursts ({folder.name}, answers of {TOKENS} tokens)\n", flush=True)
    found = asyncio.run(_run(folder, repeats))
    print(f"{repeats} rounds; median (range)\n")
    print_table(
        ["streams", "side", "tokens per second", "time to first token, ms"],
        [
            [
                str(streams),
                side,
                spread([burst.whole_per_s for burst in bursts], digits=1),
                spread([1000 * burst.first_s for burst in bursts], digits=1),
            ]
            for (streams, side), bursts in found.items()
        ],
    )
