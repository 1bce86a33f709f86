"""An interactive request among eight batch rows (`interactive_first_token`, `interactive_bits`).

Two kinds of rounds in turn, on one daemon: eight batch rows that have all run past `min_run_s`, so
that a row has to be paused for the interactive request; and seven, so that a row is free for it.
Afterwards the eight answers are asked for again and nobody disturbs them: what the rounds have
delivered must be the beginning of these, token by token.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from mlxsup.client import AsyncClient, RequestError
from mlxsup.protocol.errors import ErrorCode

from ..shaped_model import make_shaped_model
from .figures import Figure, figure, finish, parser_of
from .real_place import (
    CONTEXT,
    SHAPE,
    Live,
    first_token_s,
    leaving_out,
    pooled,
    prompt_tokens,
    require_keys,
    sampled,
    tell,
    until,
)
from support.daemon import Daemon
from support.verdict import EXIT_CODES, NotShown, Verdict

FIRST_TOKEN, BITS = "interactive_first_token", "interactive_bits"
MODEL = "model"
ROWS = 8
KINDS = {"eight rows": ROWS, "seven rows": ROWS - 1}
MIN_RUN_S = 2.0
PROMPT = 32
ANSWER = CONTEXT - 2 * PROMPT
PER_ROUND = 3
MORE_TOKENS = 3
LIMIT_S = 10.0
"""A first token that takes longer counts as one that took so long."""

SMALLEST_SAMPLE = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What a round of one kind has shown.

    Attributes:
        first_s: first tokens of the interactive requests.
        gaps_s: from one token of a batch row to its next.
        answers: what each batch row delivered.
        pauses: how often each batch row was paused.
    """

    first_s: list[float]
    gaps_s: list[float]
    answers: list[list[int]]
    pauses: list[int]


async def batch_row(client: AsyncClient, live: Live, place: int, max_tokens: int) -> None:
    """One long answer in the class `batch`, the same one for the same place."""
    parameters = sampled(prompt_tokens(PROMPT, place), place, max_tokens)
    await live.read(client, MODEL, priority="batch", **parameters)


def have_run(lives: Sequence[Live], for_s: float) -> bool:
    """Whether all of these rows run and have run for so long.

    Raises:
        NotShown: one has ended.
    """
    if any(live.is_over for live in lives):
        raise NotShown(f"a batch row has ended: {[live.error for live in lives]}")
    now = time.perf_counter()
    return all(live.ran_since and now - live.ran_since > for_s for live in lives)


async def interactive(client: AsyncClient, seed: int) -> float:
    """Seconds to the first token of an interactive request, at most `LIMIT_S`."""
    try:
        return await first_token_s(
            client,
            MODEL,
            prompt_tokens(PROMPT, seed),
            priority="interactive",
            first_token_timeout_s=LIMIT_S,
        )
    except RequestError as error:
        if error.code != ErrorCode.DEADLINE_EXCEEDED:
            raise
        return LIMIT_S


async def one_round(client: AsyncClient, rows: int, samples: int, seed: int) -> Round:
    """Interactive requests, one at a time, next to that many batch rows."""
    lives = [Live() for _ in range(rows)]
    reading = [
        asyncio.create_task(batch_row(client, live, place, ANSWER))
        for place, live in enumerate(lives)
    ]
    first_s = []
    for number in range(samples):
        await until(lambda: have_run(lives, 1.1 * MIN_RUN_S), "batch rows past min_run_s")
        first_s.append(await interactive(client, 1000 * seed + number))
    # What was resumed must have shown that it continues with the right token.
    sent = [len(live.token_ids) for live in lives]
    await until(
        lambda: all(
            live.is_over or len(live.token_ids) >= before + MORE_TOKENS
            for live, before in zip(lives, sent, strict=True)
        ),
        "resumed rows",
    )
    for live in lives:
        live.cancel()
    await asyncio.gather(*reading)
    if errors := [live.error for live in lives if live.error]:
        raise AssertionError(f"a batch row was lost: {errors[0]}")
    return Round(
        first_s=first_s,
        gaps_s=[b - a for live in lives for a, b in pairwise(live.times)],
        answers=[live.token_ids for live in lives],
        pauses=[live.pauses for live in lives],
    )


async def undisturbed(client: AsyncClient, rounds: Sequence[Round]) -> list[list[int]]:
    """The answers of all places, as long as any round has read them, with nobody else there."""
    longest = [max(len(one.answers[place]) for one in rounds) for place in range(ROWS)]
    lives = [Live() for _ in range(ROWS)]
    await asyncio.gather(
        *(batch_row(client, live, place, longest[place]) for place, live in enumerate(lives))
    )
    if errors := [live.error for live in lives if live.error]:
        raise NotShown(f"an undisturbed answer failed: {errors[0]}")
    return [live.token_ids for live in lives]


@dataclass(slots=True, kw_only=True)
class Found:
    """All rounds, by kind, and the undisturbed answers."""

    rounds: dict[str, list[Round]]
    answers: list[list[int]]

    def times_over(self, chosen: Sequence[int]) -> float:
        """Median first token less one step, to that on a free row, of the chosen rounds."""
        among, free = (
            statistics.median(s for n in chosen for s in self.rounds[kind][n].first_s)
            for kind in KINDS
        )
        return (among - self.step_s) / free

    @property
    def step_s(self) -> float:
        """The median step of eight rows."""
        return statistics.median(s for one in self.rounds["eight rows"] for s in one.gaps_s)

    def equal(self) -> list[bool]:
        """Of each paused answer, whether it begins like the undisturbed one."""
        return [
            answer == self.answers[place][: len(answer)]
            for one in self.rounds["eight rows"]
            for place, answer in enumerate(one.answers)
            if one.pauses[place]
        ]


async def measure(folder: Path, samples: int) -> Found:
    """Rounds of both kinds in turn; the first ones warm up."""
    rounds: dict[str, list[Round]] = {kind: [] for kind in KINDS}
    entry = {"path": str(folder), "max_concurrency": ROWS}
    with Daemon({MODEL: entry}, {"min_run_s": MIN_RUN_S}) as daemon:
        async with AsyncClient(daemon.endpoint) as client:
            await client.load(MODEL)
            for number in range(-(-samples // PER_ROUND) + 1):
                for place, (kind, rows) in enumerate(KINDS.items()):
                    count = PER_ROUND if number else 1
                    found = await one_round(client, rows, count, 10 * number + place + 100)
                    shown = ", ".join(f"{1000 * s:.0f}" for s in found.first_s)
                    tell(f"round {number}: {kind}: {shown} ms, {sum(found.pauses)} pauses")
                    if number:
                        rounds[kind].append(found)
            seen = rounds["eight rows"]
            return Found(rounds=rounds, answers=await undisturbed(client, seen))


def figures_of(found: Found) -> list[Figure]:
    """Both figures; only the first one if no stream was paused."""
    among = found.rounds["eight rows"]
    asked, paused = sum(len(one.first_s) for one in among), sum(sum(o.pauses) for o in among)
    everything = range(len(among))
    step_ms = 1000 * found.step_s
    times = pooled(
        FIRST_TOKEN,
        found.times_over(everything),
        leaving_out(everything, found.times_over),
        runs=asked,
        note=f"a step of eight rows, {step_ms:.1f} ms, is subtracted",
    )
    equal = found.equal()
    if not equal:
        print(f"not measured: {BITS}: no stream was paused", flush=True)
        return [times]
    bits = figure(
        BITS,
        [sum(equal) / len(equal)],
        runs=len(equal),
        note=f"{paused} pauses for {asked} requests; sampled answers, each with its own seed",
    )
    return [times, bits]


def main() -> int:
    """Measures, prints and keeps."""
    parser = parser_of("real_interactive", __doc__)
    parser.add_argument("--samples", type=int, default=0, help="interactive requests of each kind")
    given = parser.parse_args()
    samples = given.samples or (SMALLEST_SAMPLE if given.short else 3 * SMALLEST_SAMPLE)
    try:
        require_keys("min_run_s")
        with tempfile.TemporaryDirectory(prefix="mlxsup-interactive-") as folder:
            model = make_shaped_model(Path(folder) / MODEL, SHAPE, seed=1, context_length=CONTEXT)
            figures = figures_of(asyncio.run(measure(model, samples)))
    except NotShown as reason:
        print(f"not measured: {FIRST_TOKEN}, {BITS}: {reason}", flush=True)
        return EXIT_CODES[Verdict.NOT_SHOWN]
    is_enough = samples >= SMALLEST_SAMPLE
    if not is_enough:
        print(f"not shown: {FIRST_TOKEN} needs {SMALLEST_SAMPLE} samples, these are {samples}")
    return finish(figures, is_kept=given.keep and is_enough)


if __name__ == "__main__":
    sys.exit(main())
