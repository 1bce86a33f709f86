"""Two models that do not fit together, both with streams that wait (`swap_*`, `swaps_per_minute`).

Answers last about as long as a turn, so most are interrupted; afterwards they must be what they
are without any swap. `mlx_lm.server` holds one model at a time and is asked for answers of both in
turn: it changes the model when a request names the other one, and interrupts nothing.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..peers import MlxLmServer
from ..shaped_model import make_shaped_model
from ..two_models import words
from .figures import Figure, figure, finish, parser_of
from .real_budget import BudgetWatch, with_kept
from .real_crowding import Crowd, Work, crowded, tell_turns, until_swaps
from .real_place import CONTEXT, SHAPE, require_keys, tell
from .real_timeline import Turn, idle_share, imbalance, turns_of, whole_cycles
from support.verdict import EXIT_CODES, NotShown, Verdict

SHARES, LOST, PER_MINUTE, IDLE = "swap_shares", "swap_lost", "swaps_per_minute", "swap_time"
MODELS = ("one", "other")
ROOM = 1.5
WORK = Work(prompt=64, answer=4000)
SMALLEST_SAMPLE = 60
PATIENCE_S = 30.0
"""For each swap, on average."""

PEER_ANSWER = 256
"""Tokens: mlx_lm.server changes the model as soon as an answer has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the swaps have shown.

    Attributes:
        turns: of both models, in order.
        swaps: how many there were.
        took_s: how long all of it took.
        crowd: what the clients got.
        watch: looks at the budget meanwhile.
    """

    turns: list[Turn]
    swaps: int
    took_s: float
    crowd: Crowd
    watch: BudgetWatch


async def measure(folders: Mapping[str, Path], swaps: int) -> Found:
    """Keeps both models wanted until that many swaps have happened."""
    async with crowded(folders, ROOM, WORK) as (daemon, _, crowd, timeline):
        begin = time.perf_counter()
        with BudgetWatch(daemon.endpoint) as watch:
            await until_swaps(timeline, swaps, PATIENCE_S * swaps)
        took_s = time.perf_counter() - begin
        seen = list(timeline.changes)
        count = timeline.swaps
    times = crowd.token_times()
    return Found(turns=turns_of(seen, times), swaps=count, took_s=took_s, crowd=crowd, watch=watch)


async def of_peer(folders: Mapping[str, Path], switches: int) -> list[float]:
    """Changes of the model per minute by mlx_lm.server, one value for each change."""
    with MlxLmServer(folders) as peer:
        for model in folders:
            await peer.ask(model, words(8, 1), 1)
        rates = []
        for number in range(switches):
            begin = time.perf_counter()
            model = MODELS[number % len(MODELS)]
            await peer.ask(model, words(WORK.prompt // 2, 100 + number), PEER_ANSWER)
            rates.append(60.0 / (time.perf_counter() - begin))
    return rates


def figures_of(found: Found, peer: list[float]) -> list[Figure]:
    """All figures; how fast the swaps come is a choice of `min_residency_s`.

    Raises:
        NotShown: there was no whole cycle of turns.
    """
    cycles = whole_cycles(found.turns) if found.turns else []
    if not cycles:
        raise NotShown(f"no whole cycle in {found.swaps} swaps")
    interrupted = sum(live.pauses for _, _, live in found.crowd.ended)
    whole = sum(found.crowd.whole(model) for model in MODELS)
    tell_turns(found.turns)
    tell(f"{found.swaps} swaps, {interrupted} interruptions, {whole} answers to their ends")
    return [
        figure(SHARES, [imbalance(cycles, MODELS)], runs=found.swaps),
        figure(
            LOST,
            [float(found.crowd.lost())],
            runs=len(found.crowd.ended),
            note=f"{interrupted} interruptions by {found.swaps} swaps, {whole} whole answers",
        ),
        figure(
            PER_MINUTE,
            [60.0 * found.swaps / found.took_s],
            {"mlx_lm.server": peer},
            runs=found.swaps,
            note=f"mlx_lm.server changes after each answer of {PEER_ANSWER} tokens; mlxsup after"
            " three times what the load took, or min_residency_s (3 s here)",
        ),
        figure(IDLE, [idle_share(found.turns)], runs=found.swaps),
        *found.watch.figures("swaps of two models"),
    ]


def main() -> int:
    """Measures, prints and keeps."""
    parser = parser_of("real_swaps", __doc__)
    parser.add_argument("--samples", type=int, default=0, help="swaps")
    given = parser.parse_args()
    swaps = given.samples or (SMALLEST_SAMPLE if given.short else 3 * SMALLEST_SAMPLE)
    try:
        require_keys("swap_after_s")
        with tempfile.TemporaryDirectory(prefix="mlxsup-swaps-") as folder:
            folders = {
                name: make_shaped_model(
                    Path(folder) / name, SHAPE, seed=seed, context_length=CONTEXT
                )
                for seed, name in enumerate(MODELS)
            }
            found = asyncio.run(measure(folders, swaps))
            peer = asyncio.run(of_peer(folders, min(swaps, 20)))
        figures = figures_of(found, peer)
    except NotShown as reason:
        print(f"not measured: {SHARES}, {LOST}, {PER_MINUTE}, {IDLE}: {reason}", flush=True)
        return EXIT_CODES[Verdict.NOT_SHOWN]
    is_enough = swaps >= SMALLEST_SAMPLE
    if not is_enough:
        print(f"not shown: {SHARES} needs {SMALLEST_SAMPLE} swaps, these are {swaps}")
    return finish(with_kept(figures), is_kept=given.keep and is_enough)


if __name__ == "__main__":
    sys.exit(main())
