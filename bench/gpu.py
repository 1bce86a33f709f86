"""What only a GPU can show, through the whole stack: `python -m bench.gpu [--repeats N] [--small]`.

Two models at once against one after the other, the small one's gaps and first tokens while the big
one prefills, and how often an answer is the same asked twice, in a batch, and resumed: on a GPU
these may round differently, so mlxsup publishes a rate and promises no bits. `--model FOLDER` adds
a trained model, whose next token is surer than that of random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from mlxsup.client import AsyncClient, Result

from .equality import print_equality
from .report import machine_lines, print_table, spread
from .shaped_model import SEVEN_B, SMALL, Shape, make_shaped_model
from support.daemon import Daemon
from support.verdict import Verdict

CONTEXT = 40960
ANSWER = 256
LONG_PROMPT = 16384
LONG_PROMPTS = 4

GAIN = 1.47
"""Of two bare processes, one model each, at once against one after the other, on one H200."""
GAP_MS = 8.0
"""p99 of the small model while the big one prefills; measured of two bare processes as well."""
TIMES = 2.0
"""First token of the small model meanwhile, to that alone."""
HEAD = ("what", "measured", "mark", "")


def prompt_tokens(length: int, seed: int) -> list[int]:
    """A prompt of that many ids, different for each seed."""
    return [300 + (seed * 7919 + n * 104729) % 1700 for n in range(length)]


async def timed(work: Awaitable[object]) -> float:
    """Seconds that the work takes."""
    begin = time.perf_counter()
    await work
    return time.perf_counter() - begin


async def answer(client: AsyncClient, model: str, length: int, seed: int) -> Result:
    """One greedy answer of ANSWER tokens."""
    return await client.complete(
        model, prompt_tokens=prompt_tokens(length, seed), max_tokens=ANSWER
    )


async def both_against_each(client: AsyncClient, repeats: int) -> list[list[str]]:
    """Wall time of both models at once against one after the other."""
    apart, together = [], []
    for repeat in range(repeats + 1):
        big = await timed(answer(client, "big", 64, repeat))
        small = await timed(answer(client, "small", 64, repeat))
        at_once = await timed(
            asyncio.gather(answer(client, "big", 64, repeat), answer(client, "small", 64, repeat))
        )
        if repeat:  # the first round warms both up
            apart.append(big + small)
            together.append(at_once)
    ratios = [a / t for a, t in zip(apart, together, strict=True)]
    gain = statistics.median(ratios)
    return [
        ["one after the other", spread(apart, " s"), "", ""],
        ["both at once", spread(together, " s"), "", ""],
        ["gain", spread(ratios), f"≥{GAIN:g}", verdict(gain >= GAIN)],
    ]


async def gaps(client: AsyncClient, until: asyncio.Event | None, tokens: int) -> list[float]:
    """Times between the tokens of a stream of the small model, in milliseconds."""
    found: list[float] = []
    before: float | None = None
    stream = client.generate("small", prompt_tokens=prompt_tokens(32, 1), max_tokens=tokens)
    async for _ in stream:
        now = time.perf_counter()
        if before is not None:
            found.append((now - before) * 1000)
        before = now
        if until is not None and until.is_set():
            stream.cancel()
    return found


async def first_token_ms(client: AsyncClient, seed: int) -> float:
    """Milliseconds until a new request to the small model has its first token."""
    begin = time.perf_counter()
    stream = client.generate("small", prompt_tokens=prompt_tokens(32, seed), max_tokens=2)
    first = 0.0
    async for _ in stream:
        first = first or time.perf_counter() - begin
    return first * 1000


async def beside_prefill(client: AsyncClient, repeats: int) -> list[list[str]]:
    """The small model's gaps and first tokens, alone and while the big one prefills."""
    alone_gaps, disturbed_gaps, alone_first, disturbed_first = [], [], [], []
    for repeat in range(repeats):
        alone_gaps.append(percentile(await gaps(client, None, 800), 99))
        alone_first.append(await first_token_ms(client, 100 + repeat))
        is_over = asyncio.Event()
        streaming = asyncio.create_task(gaps(client, is_over, 30_000))
        prefills = [
            asyncio.create_task(
                client.complete(
                    "big",
                    prompt_tokens=prompt_tokens(LONG_PROMPT, repeat * 10 + n),
                    max_tokens=1,
                )
            )
            for n in range(LONG_PROMPTS)
        ]
        await asyncio.sleep(0.2)  # well into the prefill
        disturbed_first.append(await first_token_ms(client, 200 + repeat))
        await asyncio.gather(*prefills)
        is_over.set()
        disturbed_gaps.append(percentile(await streaming, 99))
    gap_ms = statistics.median(disturbed_gaps)
    times = statistics.median(disturbed_first) / statistics.median(alone_first)
    beside = f"p99 gap, big one prefills {LONG_PROMPTS}×{LONG_PROMPT}"
    return [
        ["p99 gap, alone", spread(alone_gaps, " ms"), "", ""],
        [beside, spread(disturbed_gaps, " ms"), f"≤{GAP_MS:g} ms", verdict(gap_ms <= GAP_MS)],
        ["first token, alone", spread(alone_first, " ms"), "", ""],
        ["first token, during it", spread(disturbed_first, " ms"), "", ""],
        ["the same, median to median", f"{times:.2f}", f"≤{TIMES:g}", verdict(times <= TIMES)],
    ]


def verdict(is_kept: bool) -> Verdict:
    """Of a figure with a mark."""
    return Verdict.KEPT if is_kept else Verdict.MISSED


def percentile(values: Sequence[float], percent: int) -> float:
    """The value that this percentage of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


async def measure(endpoint: str, repeats: int) -> None:
    """Everything, one table after the other."""
    async with AsyncClient(endpoint) as client:
        for model in ("big", "small"):
            await client.load(model)
        print(f"## Two models on one GPU (CUDA), {repeats} repeats, {ANSWER} tokens each\n")
        print("The mark is what two bare processes gain on the same card.\n")
        print_table(HEAD, await both_against_each(client, repeats))
        print("## The small model while the big one prefills (CUDA)\n")
        print_table(HEAD, await beside_prefill(client, repeats))


def main() -> None:
    """Makes the models, starts a daemon with both, and measures."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="two small models, to try the script")
    parser.add_argument("--model", type=Path, help="a trained model, for the rates of equality")
    arguments = parser.parse_args()
    print("\n".join(machine_lines()) + "\n", flush=True)
    big: Shape = SMALL if arguments.small else SEVEN_B
    with tempfile.TemporaryDirectory(prefix="mlxsup-gpu-") as name:
        folder = Path(name)
        models = {
            model: {
                "path": str(
                    make_shaped_model(folder / model, shape, seed=n, context_length=CONTEXT)
                ),
                "preload": False,
            }
            for n, (model, shape) in enumerate((("big", big), ("small", SMALL)))
        }
        with Daemon(models) as daemon:
            asyncio.run(measure(daemon.endpoint, arguments.repeats))
        folders = {"small": folder / "small"}
        if arguments.model is not None:
            folders[arguments.model.name] = arguments.model
        print_equality(folders)


if __name__ == "__main__":
    main()
