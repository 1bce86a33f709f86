"""Does `mlxsup bench` agree with the bursts of the fast path (`python -m bench fast_path`)?

Both measure the same daemon, in turn and in changing order: bursts of the same number of requests,
with prompts and answers of the same length. The command has its own process, as users run it. What
noise is, the fast path says by itself: it measures twice in each round.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mlxsup.client import AsyncClient

from .fast_path.bursts import counted_burst, prompts_of
from .report import interval_of_median, print_table, spread
from .rounds import order_in_round
from support.daemon import Daemon

MODEL = "tiny"
STREAMS = (1, 4, 16)
TOKENS = 256
LIMIT_S = 600.0

SIDES = COMMAND, FIRST, AGAIN = ("command", "fast path", "fast path again")

FIGURES = ("tokens_per_s", "steady_tokens_per_s", "first_token_s")
"""As the command names what both of them tell."""

Figures = Mapping[str, float]

MOST_WIDTH = 1.25
"""An interval of a median whose ends differ by more, as a factor, shows nothing."""

LEAST_REPEATS = 12
"""Fewer rounds have no interval that leaves out the most extreme values at either end."""


@dataclass(slots=True)
class Ratios:
    """Of one figure, round by round.

    Attributes:
        command: the command's to the fast path's.
        again: the fast path's second measurement to its first.
    """

    command: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """Whether the command differs from the fast path by more than this does from itself: then
        the intervals of the two medians have nothing in common."""
        ours, again = interval_of_median(self.command), interval_of_median(self.again)
        if ours is None or again is None or max(map(_width, (ours, again))) > MOST_WIDTH:
            return "too noisy to tell"
        return "within noise" if ours[0] <= again[1] and again[0] <= ours[1] else "**differs**"


def _width(interval: tuple[float, float]) -> float:
    return interval[1] / interval[0]


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


async def ratios(endpoint: str, streams: int, tokens: int, repeats: int) -> dict[str, Ratios]:
    """The command's figures to those of the fast path, and these to themselves.

    Args:
        endpoint: of a daemon in which MODEL is READY.
        streams: how many requests at once.
        tokens: length of each answer.
        repeats: how many rounds; one more warms up.
    """
    found = {name: Ratios() for name in FIGURES}
    async with AsyncClient(endpoint) as client:
        asked = await client.complete(MODEL, prompt=prompts_of(1, streams)[0], max_tokens=1)
        length = asked.usage.prompt_tokens
        for repeat in range(repeats + 1):
            sides: dict[str, Figures] = {}
            for side in order_in_round(SIDES, repeat):
                if side == COMMAND:
                    sides[side] = await asyncio.to_thread(
                        of_command, endpoint, streams, tokens, length
                    )
                else:
                    seed = 1000 * repeat + 100 * SIDES.index(side) + streams
                    sides[side] = await of_bursts(client, streams, tokens, seed)
            for name, one in found.items() if repeat else ():
                one.command.append(sides[COMMAND][name] / sides[FIRST][name])
                one.again.append(sides[AGAIN][name] / sides[FIRST][name])
    return found


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
                [
                    str(streams),
                    name,
                    spread(one.command, digits=3),
                    _shown(one.command),
                    spread(one.again, digits=3),
                    _shown(one.again),
                    one.verdict,
                ]
                for name, one in found.items()
            ]
            medians = [f"{statistics.median(one.command):.3f}" for one in found.values()]
            print(f"{streams} streams: {', '.join(medians)}", flush=True)
    print(
        f"\n{repeats} rounds, median (range), and the 95 % interval of the median. Ratio: the"
        " command's figure to that of the fast path. Again: the fast path's second to its first in"
        " the same round, which is the noise. Within noise: the two intervals have values in"
        f" common. One whose ends differ by more than a factor of {MOST_WIDTH:g} shows nothing.\n"
    )
    head = ["streams", "figure", "ratio", "95 %", "again", "95 % of again", "verdict"]
    print_table(head, rows)


def _shown(values: Sequence[float]) -> str:
    interval = interval_of_median(values)
    return "–" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}"
