"""The rows that a CPU can show: `python -m bench fast_path`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from mlxsup.cli.benchmark.burst import percentile
from mlxsup.client import AsyncClient

from .. import long_prompt
from ..floor import Floor
from ..peers import Mlxsup
from ..shaped_model import make_shaped_model
from ..two_models import ANSWER, Seen, quiet, watch, words, words_per_second
from .bursts import Contest, Pairs
from .claims import PAIRED_STREAMS
from .quiet import until_quiet
from .results import Found
from .router import paced, unpaced
from .stages import Rows, Setting, Stage
from support.daemon import Daemon
from support.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]
SMOLLM2 = ROOT / "models" / "smollm2"
TOKENS = 256
REPEATS = 21
WATCHES = 9
PREFILL_S = 9.0
"""How long A's prompt takes to read, alone."""

WITHIN_REPEATS = 3


# ---------------------------------------------------------------- next to one process


async def pairs(setting: Setting, wanted: Sequence[str]) -> Rows:
    """The tiny model through mlxsup and in one process, in turn."""
    tokens = 32 if setting.is_small else TOKENS
    model = make_tiny_model(setting.models / "tiny")
    async with AsyncExitStack() as stack:
        floor = stack.enter_context(Floor(model))
        entry = {"path": str(model), "max_concurrency": max(PAIRED_STREAMS)}
        daemon = stack.enter_context(Daemon({"tiny": entry}))
        client = await stack.enter_async_context(AsyncClient(daemon.endpoint))
        await client.load("tiny")
        contest = Contest(client=client, floor=floor, server=None, model="tiny")
        for streams in PAIRED_STREAMS:
            if f"tiny_{streams}" not in wanted:
                continue
            await contest.pair(None, streams, tokens)
            found = Pairs()
            for _ in range(setting.runs(REPEATS)):
                await until_quiet(setting)
                await contest.pair(found, streams, tokens)
            yield f"tiny_{streams}", {f"tiny_{streams}": found.ratio("whole_per_s", "tok/s")}


# ---------------------------------------------------------------- next to a long prompt


async def undisturbed_and_beside(
    setting: Setting, client: AsyncClient, answer: int, *, probes: bool
) -> list[tuple[Seen, Seen]]:
    """What B's users see while nothing happens and while A reads a prompt, time and again.

    Args:
        setting: decides how often.
        client: of a daemon with both.
        answer: length of each answer of B.
        probes: whether new requests come to B meanwhile.
    """
    server = Mlxsup(client)
    for model in ("a", "b"):
        await client.load(model)
    count = 24 if setting.is_small else int(PREFILL_S * await words_per_second(server, "a"))
    found = []
    for repeat in range(setting.runs(WATCHES)):
        prompt = words(count, 10 + repeat)
        await until_quiet(setting)
        alone = await watch(server, "b", answer, quiet, probes=probes)
        read = partial(server.ask, "a", prompt, 1)
        beside = await watch(server, "b", answer, read, probes=probes)
        found.append((alone, beside))
    [row] = [row for row in (await client.status())["models"] if row["name"] == "b"]
    assert row["restarts"] == 0
    return found


async def beside_tiny(setting: Setting, wanted: Sequence[str]) -> Rows:
    """A tiny model next to one that reads."""
    tiny = make_tiny_model(setting.models / "tiny")
    large = tiny if setting.is_small else SMOLLM2
    with Daemon(
        {name: {"path": str(path)} for name, path in (("a", large), ("b", tiny))}
    ) as daemon:
        async with AsyncClient(daemon.endpoint) as client:
            found = await undisturbed_and_beside(setting, client, ANSWER, probes=True)
    sides = {
        "alone": [alone.silence_ms for alone, _ in found],
        "reading took": [beside.took_s * 1000 for _, beside in found],
    }
    gaps = [beside.silence_ms for _, beside in found]
    yield "beside_tiny", {"beside_tiny": Found(values=gaps, sides=sides, unit="ms")}


async def beside_equal(setting: Setting, wanted: Sequence[str]) -> Rows:
    """A model next to an equal one that reads."""
    model = make_tiny_model(setting.models / "tiny") if setting.is_small else SMOLLM2
    answer = 256 if setting.is_small else 64
    with Daemon({name: {"path": str(model)} for name in ("a", "b")}) as daemon:
        async with AsyncClient(daemon.endpoint) as client:
            found = await undisturbed_and_beside(setting, client, answer, probes=False)
    steps = [percentile(alone.gaps_ms, 99) for alone, _ in found]
    gaps = [beside.gap_ms for _, beside in found]
    values = [gap - 2 * step for gap, step in zip(gaps, steps, strict=True)]
    sides = {"largest gap": gaps, "a step alone, p99": steps}
    yield "beside_equal", {"beside_equal": Found(values=values, sides=sides, unit="ms")}


async def within(setting: Setting, wanted: Sequence[str]) -> Rows:
    """Four rows next to a prompt of the same model, by the rule of `bench/long_prompt.py`."""
    model = make_shaped_model(
        setting.models / "long", long_prompt.SHAPE, seed=1, context_length=long_prompt.CONTEXT
    )
    tokens = 400 if setting.is_small else long_prompt.PROMPT_TOKENS
    tokeniser = long_prompt.Tokeniser(model)
    per_word = tokeniser.work(words(2000, 0), 1)["tokens"] / 2000
    tokeniser.close()
    entry = {
        "path": str(model),
        "max_concurrency": 2 * long_prompt.ROWS,
        "decode_stall_target_ms": long_prompt.TARGET_MS,
    }
    gaps, steps = [], []
    with Daemon({"m": entry}) as daemon:
        async with AsyncClient(daemon.endpoint) as client:
            await client.load("m")
            for repeat in range(setting.runs(WITHIN_REPEATS)):
                prompt = words(int(tokens / per_word), 10 + repeat)
                await until_quiet(setting)
                still = await long_prompt.watch(client, "m", long_prompt.quiet)
                beside = await long_prompt.watch(
                    client, "m", partial(long_prompt.ask, client, "m", prompt)
                )
                steps.append(percentile(still.gaps_ms, 99))
                gaps.append(max(beside.gaps_ms))
    values = [gap - step for gap, step in zip(gaps, steps, strict=True)]
    sides = {"largest gap": gaps, "a step alone, p99": steps}
    yield "within", {"within": Found(values=values, sides=sides, unit="ms")}


LIMIT_S = 3600.0
"""Of a row: most of it is spent waiting until the machine is quiet."""

MEASURES: dict[str, tuple[tuple[str, ...], Callable[[Setting, Sequence[str]], Rows]]] = {
    "pairs": (tuple(f"tiny_{streams}" for streams in PAIRED_STREAMS), pairs),
    "router": (("router",), unpaced),
    "paced": (("paced",), paced),
    "beside_tiny": (("beside_tiny",), beside_tiny),
    "beside_equal": (("beside_equal",), beside_equal),
    "within": (("within",), within),
}

STAGES = tuple(
    Stage(name=name, rows=rows, measure=measure, limit_s=LIMIT_S)
    for name, (rows, measure) in MEASURES.items()
)
