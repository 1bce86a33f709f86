"""Does `mlxsup bench` agree with the bursts of the fast path (`python -m bench fast_path`)?

Both measure the same daemon, in turn and in changing order: bursts of the same number of requests,
with prompts and answers of the same length. The command has its own process, as users run it.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlxsup.client import AsyncClient

from .fast_path.bursts import counted_burst, prompts_of
from .report import interval_of_median, print_table, spread
from support.daemon import Daemon

MODEL = "tiny"
STREAMS = (1, 4, 16)
TOKENS = 256
LIMIT_S = 600.0

FIGURES = ("tokens_per_s", "steady_tokens_per_s", "first_token_s")
"""As the command names what both of them tell."""

Figures = Mapping[str, float]


async def of_bursts(client: AsyncClient, streams: int, tokens: int, seed: int) -> Figures:
    """What the fast path measures, in one burst."""
    burst = await counted_burst(client, MODEL, prompts_of(streams, seed), tokens)
    return {
        "tokens_per_s": burst.whole_per_s,
        "steady_tokens_per_s": burst.steady_per_s,
        "first_token_s": burst.first_s,
    }


def of_command(endpoint: str, streams: int, tokens: int, prompt_tokens: int) -> Figures:
    """What the command measures, in one repeat after its warm-up."""
    sizes = ("--prompt-tokens", str(prompt_tokens), "--output-tokens", str(tokens))
    command = Daemon.command(
        "bench", MODEL, *sizes, "--concurrency", str(streams), "--repeats", "1", "--json",
        "--endpoint", endpoint,
    )  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    run = json.loads(done.stdout)
    assert run["remarks"] == [], run["remarks"]
    [cell] = run["cells"]
    return {name: cell["figures"][name]["median"] for name in FIGURES}


async def ratios(endpoint: str, streams: int, tokens: int, repeats: int) -> dict[str, list[float]]:
    """The command's figures to those of the fast path, pair by pair.

    Args:
        endpoint: of a daemon in which MODEL is READY.
        streams: how many requests at once.
        tokens: length of each answer.
        repeats: how many pairs; one more warms up.
    """
    found: dict[str, list[float]] = {name: [] for name in FIGURES}
    async with AsyncClient(endpoint) as client:
        asked = await client.complete(MODEL, prompt=prompts_of(1, streams)[0], max_tokens=1)
        length = asked.usage.prompt_tokens
        for repeat in range(repeats + 1):
            sides: dict[bool, Figures] = {}
            for is_command in (True, False) if repeat % 2 else (False, True):
                if is_command:
                    sides[True] = await asyncio.to_thread(
                        of_command, endpoint, streams, tokens, length
                    )
                else:
                    seed = 1000 * repeat + streams
                    sides[False] = await of_bursts(client, streams, tokens, seed)
            for name in FIGURES if repeat else ():
                found[name].append(sides[True][name] / sides[False][name])
    return found


def verdict(values: Sequence[float]) -> str:
    """Whether ratios are 1 but for noise."""
    interval = interval_of_median(values)
    if interval is None:
        return "too few pairs to tell"
    low, high = interval
    agrees = "agrees" if low <= 1 <= high else "**differs**"
    return f"{agrees}: 95 % {low:.3f} to {high:.3f}"


def run(model: Path, repeats: int) -> None:
    """Measures and prints."""
    print("## `mlxsup bench` next to the bursts of the fast path (CPU, tiny)\n", flush=True)
    entry = {"path": str(model), "max_concurrency": max(STREAMS)}
    rows = []
    with Daemon({MODEL: entry}) as daemon, daemon.client() as client:
        client.load(MODEL)
        for streams in STREAMS:
            found = asyncio.run(ratios(daemon.endpoint, streams, TOKENS, repeats))
            rows += [
                [str(streams), name, spread(values, digits=3), verdict(values)]
                for name, values in found.items()
            ]
            medians = [f"{statistics.median(values):.3f}" for values in found.values()]
            print(f"{streams} streams: {', '.join(medians)}", flush=True)
    print(f"\n{repeats} pairs; the command's figure to the other, median (range)\n")
    print_table(["streams", "figure", "ratio", "verdict"], rows)
