"""`python -m bench traffic [SCENARIO …]`: one model under the traffic of many users.

Scenarios: *burst*: 1, 4 and 16 equal prompts at once; *arrivals*: requests at any time, whether
earlier ones have been answered or not, at shares of what the machine can do; *long*: four answers
beside a long prompt; *prefix*: six chats that begin with one system prompt that is new; *kill*: the
model's process is killed under 16 answers.

Sides take turns, each is started afresh for each round, and everything follows from the seed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from mlxsup.cli.commands.bench import percentile
from mlxsup.client import AsyncClient, RequestError

from . import servers
from .floor import Floor
from .openai_stream import AnswerError
from .report import machine_lines, order_in_round, print_table
from .shaped_model import SHAPES, make_shaped_model
from support.daemon.child import EndedError
from support.daemon.daemon import Daemon, row
from support.gateway.http_daemon import HttpDaemon
from support.machine import machine_facts
from support.models.tiny_model import make_tiny_model

MODEL = "m"
ROWS = 32
CONTEXT = 65_536
SYLLABLES = [consonant + vowel for consonant in "bdfghklmnprst" for vowel in "aeiou"]
"""Each is a token of the tiny model and of SmolLM2 where it follows a space; 65 of them."""

FAILURES = (AnswerError, AssertionError, EndedError, OSError, RequestError, TimeoutError)
PERCENTS = (50, 95, 99)
BURSTS = (1, 4, 16)
STREAMS = 16
NEIGHBOURS = 4
CHATS = 6
LEAD_TOKENS = 32
"""Of each neighbour before the long prompt comes."""

MOST_TOKENS = 2048
"""Of each neighbour altogether; if they end before the prompt is read, `covered` says so."""


# ---------------------------------------------------------------- what is asked, and what came


class Arrival(NamedTuple):
    """A request: when it is sent, in seconds; its prompt; how many tokens it asks for."""

    at_s: float
    prompt: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a request.

    Attributes:
        sent_s: when it was sent, in seconds after the beginning.
        times: when each token was there, by the same clock; empty if the request failed.
        prompt_tokens: as the server counted them.
        cached_tokens: of these, the ones that it says it did not read.
        error: why it failed; empty if it did not.
    """

    sent_s: float
    times: Sequence[float] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""

    @property
    def first_s(self) -> float:
        """Time to first token."""
        return self.times[0] - self.sent_s


def text(dice: random.Random, tokens: int) -> str:
    """Return a prompt of about that many tokens."""
    return " ".join(dice.choices(SYLLABLES, k=tokens))


def arrivals(count: int, per_s: float, lengths: int, words: int) -> list[Arrival]:
    """Return Poisson arrivals with log-normal lengths.

    Args:
        count: of requests.
        per_s: how many arrive in a second; infinite: all at once.
        lengths: seed of gaps and lengths.
        words: seed of what the prompts say.
    """
    dice, choice = random.Random(lengths), random.Random(words)
    at_s, plan = 0.0, []
    for _ in range(count):
        prompt = min(3000, max(20, round(dice.lognormvariate(math.log(180), 1.0))))
        answer = min(400, max(4, round(dice.lognormvariate(math.log(80), 0.8))))
        plan.append(Arrival(at_s, text(choice, prompt), answer))
        at_s += dice.expovariate(1.0) / per_s
    return plan


def at_once(prompts: Sequence[str], tokens: int) -> list[Arrival]:
    """Return requests that are all sent at the beginning."""
    return [Arrival(0.0, prompt, tokens) for prompt in prompts]


def whole(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the requests that were answered.

    Raises:
        AnswerError: none was.
    """
    if answered := [one for one in outcomes if not one.error]:
        return answered
    raise AnswerError(outcomes[0].error)


def figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the figures of a plan: milliseconds, tokens per second, failures by their error."""
    answered = whole(outcomes)
    per_token = [
        (own.times[-1] - own.times[0]) / (len(own.times) - 1)
        for own in answered
        if len(own.times) > 1
    ]
    gaps = [after - before for own in answered for before, after in pairwise(own.times)]
    took_s = max(own.times[-1] for own in answered) - min(one.sent_s for one in outcomes)
    return {
        "first_ms": {p: 1000 * percentile([o.first_s for o in answered], p) for p in PERCENTS},
        "per_token_ms": {p: 1000 * percentile(per_token, p) for p in PERCENTS if per_token},
        "gap_ms": 1000 * max(gaps, default=0.0),
        "tokens_per_s": sum(len(own.times) for own in answered) / took_s,
        "failed": len(outcomes) - len(answered),
        "errors": dict(Counter(one.error for one in outcomes if one.error)),
    }


# ---------------------------------------------------------------- who is asked

Answer = Callable[[Sequence[Arrival], float], Awaitable[list[Outcome]]]
"""Answers a plan, within so many seconds for each request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A side that has been started.

    Attributes:
        answer: asks it.
        root: the process that was started; what its children work counts, too.
        server: the same as `answer` for one request; None for the loop in process.
        pid: of the model's process; None where that is not known.
    """

    answer: Answer
    root: int
    server: servers.Server | None = None
    pid: Callable[[], int] | None = None

    def cpu_s(self) -> float:
        """Return the processor time of all of its processes so far."""
        root = psutil.Process(self.root)
        times = [one.cpu_times() for one in (root, *root.children(recursive=True))]
        return sum(one.user + one.system for one in times)


Start = Callable[[Path], AbstractAsyncContextManager[Running]]


def error_of(error: BaseException) -> str:
    """Return one line about why a request failed."""
    return str(error).partition("\n")[0][:200] or type(error).__name__


async def open_loop(
    server: servers.Server, plan: Sequence[Arrival], limit_s: float
) -> list[Outcome]:
    """Send each request when it is due, whatever became of the earlier ones."""
    begin = time.perf_counter()

    async def send(arrival: Arrival) -> Outcome:
        await asyncio.sleep(begin + arrival.at_s - time.perf_counter())
        sent_s = time.perf_counter() - begin
        try:
            async with asyncio.timeout(limit_s):
                answer = await server.ask(MODEL, arrival.prompt, arrival.tokens)
        except FAILURES as error:
            return Outcome(sent_s=sent_s, error=error_of(error))
        return Outcome(
            sent_s=sent_s,
            times=[at - begin for at in answer.times],
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
        )

    return await asyncio.gather(*map(send, plan))


def running(server: servers.Server, root: int, pid: Callable[[], int] | None = None) -> Running:
    """Return a side that is asked one request at a time."""
    return Running(answer=partial(open_loop, server), root=root, server=server, pid=pid)


@asynccontextmanager
async def mlxsup(folder: Path, warm: int = 0, *, http: bool = False) -> AsyncIterator[Running]:
    """Start a daemon, to be asked over its socket or over HTTP."""
    entry = {"path": str(folder), "preload": True, "max_concurrency": ROWS}
    daemon = (HttpDaemon if http else Daemon)({MODEL: entry}, {"warm_workers": warm})
    with daemon, daemon.client() as client:
        assert daemon.process is not None
        client.load(MODEL)

        def pid() -> int:
            return int(row(client, MODEL)["pid"])

        if isinstance(daemon, HttpDaemon):
            yield running(servers.gateway(daemon, [MODEL]), daemon.process.pid, pid)
        else:
            async with AsyncClient(daemon.endpoint) as asked:
                yield running(servers.Mlxsup(asked), daemon.process.pid, pid)


@asynccontextmanager
async def in_process(folder: Path) -> AsyncIterator[Running]:
    """Run the loop of mlx-lm, without a server."""
    with Floor(folder, ROWS) as floor:

        async def answer(plan: Sequence[Arrival], limit_s: float) -> list[Outcome]:
            at_s, prompts, tokens = zip(*plan, strict=True)
            try:
                job = asyncio.to_thread(floor.answer, prompts, at_s, tokens)
                times, prompt_tokens = await job
            except FAILURES as error:
                return [Outcome(sent_s=one, error=error_of(error)) for one in at_s]
            found = zip(at_s, times, prompt_tokens, strict=True)
            return [Outcome(sent_s=s, times=t, prompt_tokens=p) for s, t, p in found]

        yield Running(answer=answer, root=floor.pid)


@asynccontextmanager
async def other(
    start: Callable[[Path], servers.ServerProcess], folder: Path
) -> AsyncIterator[Running]:
    """Another server over HTTP; whatever it prints is no failure of the benchmark."""
    process = start(folder)
    with process:
        try:
            yield running(servers.peer(process, {MODEL: folder}), process.pid)
        finally:
            process.give_up()


def vllm_mlx(environment: str, folder: Path) -> servers.ServerProcess:
    """Return vllm-mlx from its own virtual environment."""
    command = [f"{environment}/bin/vllm-mlx", "serve", str(folder), "--continuous-batching"]
    return servers.ServerProcess("vllm-mlx", [*command, "--max-num-seqs", str(ROWS)])


SIDES: dict[str, Start] = {
    "mlxsup": mlxsup,
    "mlxsup over HTTP": partial(mlxsup, http=True),
    "in process": in_process,
    "mlx_lm.server": partial(other, servers.mlx_lm_server),
}
SPARED: dict[str, Start] = {
    "mlxsup": mlxsup,
    "mlxsup over HTTP": partial(mlxsup, http=True),
    "mlxsup, a prewarmed worker": partial(mlxsup, warm=1),
}
"""The sides of *kill*: with all others every answer is lost."""


@contextmanager
def empty_caches() -> Iterator[None]:
    """Let processes that start meanwhile find no kernel and no prompt of an earlier one."""
    names = ("MLX_PTX_CACHE_DIR", "TMPDIR", "HOME")  # of CUDA, of the CPU, of vllm-mlx
    before = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory(prefix="mlxsup-k-") as folder:
        os.environ.update(dict.fromkeys(names, folder))
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


# ---------------------------------------------------------------- scenarios


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run measures.

    Attributes:
        seed: of all plans.
        requests: of each plan of *arrivals*.
        rates: requests per second by the name of the load.
        tokens: of the long prompt, and of the system prompt.
        limit_s: how long a request may take.
    """

    seed: int
    requests: int
    rates: Mapping[str, float]
    tokens: tuple[int, int]
    limit_s: float


Rows = AsyncIterator[tuple[str, dict[str, Any]]]
"""What was measured, and its figures."""


async def burst(side: Running, settings: Settings, number: int) -> Rows:
    """Equal prompts at once, after one such burst that warms up."""
    for streams in BURSTS:
        for turn in range(2):
            dice = random.Random(f"{settings.seed} {number} {streams} {turn}")
            plan = at_once([text(dice, 24) for _ in range(streams)], 64)
            before_s = side.cpu_s()
            found = await side.answer(plan, settings.limit_s)
        cpu_ms = 1000 * (side.cpu_s() - before_s) / (64 * streams)
        yield f"{streams} at once", {**figures(found), "cpu_ms": cpu_ms}


async def at_any_time(load: str, side: Running, settings: Settings, number: int) -> Rows:
    """First traffic after READY, the same with other words, and with other lengths."""
    seed = settings.seed + 10 * number
    for place, (what, lengths) in enumerate((("first", 0), ("again", 0), ("new", 1))):
        plan = arrivals(
            settings.requests, settings.rates[load], seed + lengths, 1000 * seed + place
        )
        yield f"{load}, {what}", figures(await side.answer(plan, settings.limit_s))


def rate(outcomes: Sequence[Outcome], begin: float, end: float) -> float:
    """Return the tokens per second that came in a window."""
    return sum(begin < at <= end for own in outcomes for at in own.times) / (end - begin)


async def long(side: Running, settings: Settings, number: int) -> Rows:
    """Four answers beside a long prompt: what they keep of their speed, and what it takes."""
    dice = random.Random(f"{settings.seed} {number}")

    async def answers(*plan: Arrival) -> list[Outcome]:
        found = await side.answer(plan, settings.limit_s)
        if failed := [one for one in found if one.error]:
            raise AnswerError(failed[0].error)
        return found

    def neighbours(tokens: int) -> list[Arrival]:
        return at_once([text(dice, 40) for _ in range(NEIGHBOURS)], tokens)

    for _ in range(2):  # the first one warms up
        [alone] = await answers(Arrival(0.0, text(dice, settings.tokens[0]), 1))
        quiet = await answers(*neighbours(2 * LEAD_TOKENS))
    begun, ended = max(own.times[0] for own in quiet), min(own.times[-1] for own in quiet)
    alone_rate = rate(quiet, begun, ended)
    step_s = NEIGHBOURS / alone_rate
    answer = min(MOST_TOKENS, 2 * LEAD_TOKENS + round(3 * alone.first_s / step_s))
    at_s = begun + LEAD_TOKENS * step_s
    plan = (*neighbours(answer), Arrival(at_s, text(dice, settings.tokens[0]), 1))
    *beside, asked = await answers(*plan)
    begin, end = asked.sent_s, min(asked.times[0], *(own.times[-1] for own in beside))
    yield (
        f"{alone.prompt_tokens:,} tokens",
        {
            "decode_kept": rate(beside, begin, end) / alone_rate,
            "gap_ms": 1000 * max(b - a for o in beside for a, b in pairwise(o.times) if b > begin),
            "alone_s": alone.first_s,
            "prompt_times_alone": asked.first_s / alone.first_s,
            "covered": (end - begin) / asked.first_s,
        },
    )


async def prefix(side: Running, settings: Settings, number: int) -> Rows:
    """Chats that begin with the same new system prompt: how often it is read, and how late."""
    dice = random.Random(f"{settings.seed} {number}")

    async def chats(count: int) -> list[Outcome]:
        system = text(dice, settings.tokens[1])
        prompts = [f"{system} {text(dice, 20)}" for _ in range(count)]
        return whole(await side.answer(at_once(prompts, 32), settings.limit_s))

    for _ in range(2):  # the first one warms up
        [alone] = await chats(1)
    for turn in ("first", "again"):  # with another system prompt, whose shapes are known
        found = await chats(CHATS)
        read = sum(one.prompt_tokens - one.cached_tokens for one in found)
        last_s = max(one.first_s for one in found)
        yield (
            f"{alone.prompt_tokens:,} tokens, {turn}",
            {
                "prompt_tokens": sum(one.prompt_tokens for one in found),
                "read_tokens": read,
                "alone_s": alone.first_s,
                "last_first_s": last_s,
                "last_times_alone": last_s / alone.first_s,
                "failed": CHATS - len(found),
            },
        )


async def _outcome(asked: Awaitable[object]) -> str:
    try:
        await asked
    except FAILURES as error:
        return error_of(error)
    return ""


def continued_at(times: Sequence[float], killed_at: float) -> float | None:
    """Return when the longest silence after a kill ended; None if nothing came after it.

    What was on its way at that moment still arrives, so the first text after it proves nothing.
    """
    silences = [(after - before, after) for before, after in pairwise(times) if after > killed_at]
    return max(silences)[1] if silences else None


async def kill(side: Running, settings: Settings, number: int) -> Rows:
    """SIGKILL to the model's process once all of 16 answers run: until the last one continues."""
    assert side.server is not None
    assert side.pid is not None
    dice = random.Random(f"{settings.seed} {number}")
    seen = [list[float]() for _ in range(STREAMS)]
    have_begun = asyncio.Event()

    def on_token(own: list[float]) -> servers.OnToken:
        def take(at: float) -> None:
            own.append(at)
            if all(len(one) > 1 for one in seen):
                have_begun.set()

        return take

    async with asyncio.timeout(settings.limit_s), asyncio.TaskGroup() as tasks:
        asked = [
            tasks.create_task(_outcome(side.server.ask(MODEL, text(dice, 60), 400, on_token(own))))
            for own in seen
        ]
        await have_begun.wait()
        pid = await asyncio.to_thread(side.pid)
        killed_at = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
    lost = [error for error in (one.result() for one in asked) if error]
    continued = [at for own in seen if (at := continued_at(own, killed_at)) is not None]
    shown = {
        "lost": len(lost),
        "struck": len(continued),
        "last_continues_s": max(continued, default=math.nan) - killed_at,
        "errors": dict(Counter(lost)),
    }
    yield f"{STREAMS} streams", shown


# ---------------------------------------------------------------- a run

Scenario = Callable[[Running, Settings, int], Rows]
SCENARIOS = ("burst", "arrivals", "long", "prefix", "kill")

HEADS = {
    "burst": ["tokens/s", "first token, ms", "processor time per token, ms"],
    "arrivals": [
        "first token p50 / p95 / p99, ms",
        "per token p50 / p95 / p99, ms",
        "largest gap, ms",
        "tokens/s",
        "failed",
    ],
    "long": ["decode_kept", "while, of it", "largest gap, ms", "prompt alone, s", "beside, times"],
    "prefix": ["tokens read, of", "alone, s", "last first token, times as long", "failed"],
    "kill": ["lost, of those struck", "last continues, s"],
}


def scenarios(names: Sequence[str], loads: Sequence[str]) -> Iterator[tuple[str, Scenario]]:
    """Yield what each start of a side measures; every load begins with a fresh one."""
    plain: dict[str, Scenario] = {"burst": burst, "long": long, "prefix": prefix, "kill": kill}
    for name in names:
        if name == "arrivals":
            yield from ((name, partial(at_any_time, load)) for load in loads)
        else:
            yield name, plain[name]


async def measured(
    start: Start, folder: Path, scenario: Scenario, settings: Settings, number: int
) -> AsyncIterator[dict[str, Any]]:
    """Start a side, and yield what the scenario shows; a side that fails is a row, too."""
    began = time.perf_counter()
    try:
        with empty_caches():
            async with start(folder) as running:
                ready_s = time.perf_counter() - began
                async for what, shown in scenario(running, settings, number):
                    yield {"what": what, "ready_s": ready_s, **shown}
    except FAILURES as error:
        yield {"what": "failed", "error": error_of(error)}


async def capacity(folder: Path, requests: int, seed: int) -> float:
    """Return how many requests per second the loop in process answers if all come at once."""
    plan = arrivals(requests, math.inf, seed, seed)
    async with in_process(folder) as running:
        for _ in range(2):  # the first one warms up
            found = whole(await running.answer(plan, math.inf))
    return len(found) / max(own.times[-1] for own in found)


def _middle(rows: Sequence[Mapping[str, Any]], key: str, percent: int | None = None) -> float:
    values = [one[key] if percent is None else one[key][percent] for one in rows]
    return float(statistics.median(values))


def cells(scenario: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the medians of all rounds of one side, in the order of `HEADS`."""
    of = partial(_middle, rows)
    by_percent = [
        " / ".join(f"{of(key, percent):,.{0 if of(key, 50) >= 20 else 1}f}" for percent in PERCENTS)
        for key in ("first_ms", "per_token_ms")
        if key in rows[0]
    ]
    failed = sum(one.get("failed", 0) for one in rows)
    if scenario == "burst":
        speed = [f"{of('tokens_per_s'):,.0f}", f"{of('first_ms', 50):,.0f}"]
        return [*speed, f"{of('cpu_ms'):.2f}"]
    if scenario == "arrivals":
        return [*by_percent, f"{of('gap_ms'):,.0f}", f"{of('tokens_per_s'):,.0f}", str(failed)]
    if scenario == "long":
        kept, covered = f"{of('decode_kept'):.0%}", f"{of('covered'):.0%}"
        times = f"{of('prompt_times_alone'):.2f}"
        return [kept, covered, f"{of('gap_ms'):,.0f}", f"{of('alone_s'):.2f}", times]
    if scenario == "prefix":
        read = f"{of('read_tokens'):,.0f} of {of('prompt_tokens'):,.0f}"
        return [read, f"{of('alone_s'):.2f}", f"{of('last_times_alone'):.2f}", str(failed)]
    lost = f"{sum(one['lost'] for one in rows)} of {sum(one['struck'] for one in rows)}"
    return [lost, f"{of('last_continues_s'):.2f}"]


def print_report(runs: Sequence[Mapping[str, Any]]) -> None:
    """Print a table for each scenario, and what failed."""
    for scenario, head in HEADS.items():
        own = [one for one in runs if one["scenario"] == scenario and "error" not in one]
        table = []
        for what in dict.fromkeys(one["what"] for one in own):
            for side in dict.fromkeys(one["side"] for one in own):
                rows = [one for one in own if (one["what"], one["side"]) == (what, side)]
                table += [[what, side, *cells(scenario, rows)]] if rows else []
        if table:
            print(f"## {scenario}\n")
            print_table(["what", "side", *head], table)
    for one in runs:
        for error in [one["error"]] if "error" in one else one.get("errors", ()):
            print(f"{one['scenario']}, {one['side']}, {one['what']}: {error}")


def progress(words: str) -> None:
    """Say on standard error what goes on."""
    print(f"{time.strftime('%H:%M:%S')} {words}", file=sys.stderr, flush=True)


async def _run(given: argparse.Namespace, folder: Path, runs: list[dict[str, Any]]) -> None:
    rates, limit_s = {f"{rate:g}/s": rate for rate in given.rate}, 600.0
    if "arrivals" in given.scenarios and not rates:
        progress(f"how many of {given.requests} requests a second the loop in process answers …")
        most = await capacity(folder, given.requests, given.seed)
        progress(f"… {most:.2f}")
        rates = {f"{load} % ({most * load / 100:.2g}/s)": most * load / 100 for load in given.load}
        limit_s = 60 + 4 * given.requests / most
    settings = Settings(
        seed=given.seed, requests=given.requests, rates=rates, tokens=given.tokens, limit_s=limit_s
    )
    sides = {**SIDES}
    if given.vllm_mlx:
        sides["vllm-mlx"] = partial(other, partial(vllm_mlx, given.vllm_mlx))
    for name, scenario in scenarios(given.scenarios, list(rates)):
        took_part = (
            SPARED if name == "kill" else {side: sides[side] for side in given.side or sides}
        )
        for number in range(given.repeats):
            for side in order_in_round(list(took_part), number):
                progress(f"{name}, round {number + 1} of {given.repeats}: {side} starts")
                async for found in measured(took_part[side], folder, scenario, settings, number):
                    run = {"scenario": name, "round": number, "side": side, **found}
                    runs.append(run)
                    progress(
                        f"  {found['what']}: {found.get('error') or ', '.join(cells(name, [run]))}"
                    )
                    _write(given, runs)


def _write(given: argparse.Namespace, runs: Sequence[Mapping[str, Any]]) -> None:
    """Keep what there is; a run that is interrupted is worth something."""
    if given.output:
        about = {"machine": machine_facts(), "arguments": vars(given), "runs": runs}
        Path(given.output).write_text(json.dumps(about, indent=1, default=str) + "\n")


def _positive(kind: Callable[[str], float], given: str) -> float:
    value = kind(given)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, not {given}")
    return value


def main(arguments: Sequence[str]) -> None:
    """Measure what the arguments say, and print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench traffic", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join(SCENARIOS))
    count, per_s = partial(_positive, int), partial(_positive, float)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--shape", choices=["tiny", *SHAPES], default="tiny", help="random weights")
    which.add_argument("--model", metavar="FOLDER", help="a real model instead")
    parser.add_argument("--side", action="append", help=f"one of {', '.join(SIDES)}, vllm-mlx")
    parser.add_argument("--repeats", type=count, default=1, help="rounds; sides take turns")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=count, default=60, help="of each plan of arrivals")
    parser.add_argument(
        "--load",
        type=count,
        nargs="+",
        default=[40, 70, 100],
        metavar="PERCENT",
        help="of the requests per second that the loop in process can answer",
    )
    parser.add_argument(
        "--rate",
        type=per_s,
        nargs="+",
        default=[],
        metavar="PER_S",
        help="requests per second instead of --load",
    )
    parser.add_argument(
        "--tokens",
        type=count,
        nargs=2,
        default=(4000, 900),
        metavar=("LONG", "PREFIX"),
        help="of the long prompt, and of the system prompt",
    )
    parser.add_argument("--vllm-mlx", metavar="FOLDER", help="the virtual environment that has it")
    parser.add_argument("--output", metavar="FILE", help="every run as JSON")
    given = parser.parse_args(arguments)
    given.scenarios = given.scenarios or ["arrivals"]
    known = [*SIDES, *(["vllm-mlx"] if given.vllm_mlx else [])]
    for value, of in ((given.scenarios, SCENARIOS), (given.side or (), known)):
        if unknown := sorted(set(value) - set(of)):
            parser.error(f"there is no {unknown[0]!r}; there are {', '.join(of)}")
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(given.model) if given.model else _shaped(Path(place), given.shape)
        print("\n".join(machine_lines()) + "\n", flush=True)
        try:
            asyncio.run(_run(given, folder.resolve(), runs))
        finally:
            print(f"{folder.name}; medians of {given.repeats} rounds\n")
            print_report(runs)


def _shaped(place: Path, shape: str) -> Path:
    if shape == "tiny":
        return make_tiny_model(place / shape, config={"max_position_embeddings": CONTEXT})
    progress(f"a model of the shape {shape} is written …")
    return make_shaped_model(place / shape, SHAPES[shape], seed=1, context_length=CONTEXT)
