"""Three and five models that all want in, with long prompts (`turns_three`, `turns_five`).

There is memory for one of them. A turn that ends before it has delivered a token would have read a
prompt for nothing, and models that only do that would never get anywhere. The prompts take a good
part of a turn to read.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..shaped_model import make_shaped_model
from .figures import Figure, figure, finish, parser_of
from .real_budget import BudgetWatch, with_kept
from .real_crowding import Crowd, Work, crowded, tell_turns
from .real_place import CONTEXT, SHAPE, require_keys
from .real_timeline import Change, Turn, longest_gap_s, turns_of
from support.verdict import EXIT_CODES, NotShown, Verdict

CLAIMS = {"turns_three": 3, "turns_five": 5}
"""How many models each is about."""

ROOM = 1.5
WORK = Work(prompt=1500, answer=200, kinds=2)
MINUTES = 10.0
SHORT_MINUTES = {"turns_three": 1.5, "turns_five": 2.5}
LEAST_TURNS = 2
"""For each model; with fewer the run was too short to show anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the turns of some models have shown.

    Attributes:
        turns: that a swap has ended, in order.
        crowd: what the clients got.
        longest_s: the longest time in which a model got no token.
        watch: looks at the budget meanwhile.
    """

    turns: list[Turn]
    crowd: Crowd
    longest_s: float
    watch: BudgetWatch


async def measure(folders: Mapping[str, Path], seconds: float) -> Found:
    """Lets all of these models be wanted for so long."""
    async with crowded(folders, ROOM, WORK) as (daemon, _, crowd, timeline):
        begin = time.perf_counter()
        with BudgetWatch(daemon.endpoint) as watch:
            await asyncio.sleep(seconds)
        end = time.perf_counter()
        seen: list[Change] = list(timeline.changes)
    times = crowd.token_times()
    turns = turns_of(seen, times)
    longest = max(longest_gap_s(times[model], begin, end) for model in folders)
    tell_turns(turns)
    return Found(turns=turns, crowd=crowd, longest_s=longest, watch=watch)


def figures_of(claim: str, found: Found, models: Sequence[str], minutes: float) -> list[Figure]:
    """The turns without a token, and what the budget did meanwhile.

    Raises:
        NotShown: there were too few turns.
    """
    counts = {model: sum(turn.model == model for turn in found.turns) for model in models}
    if min(counts.values()) < LEAST_TURNS:
        raise NotShown(f"fewer than {LEAST_TURNS} turns of a model: {counts}")
    if lost := found.crowd.lost():
        raise AssertionError(f"{lost} streams were lost or changed")
    whole = {model: found.crowd.whole(model) for model in models}
    note = (
        f"{minutes:g} minutes; at least {min(whole.values())} whole answers of each model; the"
        f" longest time without a token for one: {found.longest_s:.0f} s"
    )
    empty = sum(turn.tokens == 0 for turn in found.turns)
    return [
        figure(claim, [float(empty)], runs=len(found.turns), note=note),
        *found.watch.figures(f"swaps of {len(models)} models"),
    ]


def run_one(claim: str, minutes: float) -> list[Figure]:
    """Measures with as many models as a claim is about.

    Raises:
        NotShown: the run could not judge.
    """
    require_keys("swap_after_s")
    with tempfile.TemporaryDirectory(prefix="mlxsup-turns-") as folder:
        folders = {
            f"m{seed}": make_shaped_model(
                Path(folder) / f"m{seed}", SHAPE, seed=seed, context_length=CONTEXT
            )
            for seed in range(CLAIMS[claim])
        }
        found = asyncio.run(measure(folders, 60 * minutes))
        return figures_of(claim, found, list(folders), minutes)


def main() -> int:
    """Measures, prints and keeps."""
    parser = parser_of("real_turns", __doc__)
    parser.add_argument("--minutes", type=float, default=0.0, help="for each number of models")
    given = parser.parse_args()
    code = 0
    for claim in CLAIMS:
        minutes = given.minutes or (SHORT_MINUTES[claim] if given.short else MINUTES)
        try:
            figures = run_one(claim, minutes)
        except NotShown as reason:
            print(f"not measured: {claim}: {reason}", flush=True)
            code = EXIT_CODES[Verdict.NOT_SHOWN]
            continue
        # One by one: what the budget did during the next run is added to what is kept.
        code = max(code, finish(with_kept(figures), is_kept=given.keep))
    return code


if __name__ == "__main__":
    sys.exit(main())
