"""`python -m simulation [--seeds N] [--first N] [--jobs N]`: many seeds; a failing one is named.

Exits with 4 if a promise is broken, and with 3 if the run shows nothing: the simulation itself
broke, or a long run has not met the faults that it is to judge by.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable

from .ground import Violation
from .plan import EVENTS, LOADING, MEMORY, STRAY, STUCK, WITHOUT_EVIDENCE
from .world import World

VIOLATED, NOT_SHOWN = 4, 3
# With that many seeds or more, a run must have met everything.
FULL_RUN = 1000
MET = (
    *(f"fault: {name}" for name in (*WITHOUT_EVIDENCE, *STRAY, *MEMORY, *LOADING, *STUCK, "poison",
                                    "too_large", "idle_dies")),
    "cancel met finish", "cancel met rejection", "cancel met exit", "cancel met pause", "yielded",
    "turns", "pause", "pause refused", "resume", "resume refused", "continued after a pause",
    "paused for a class", "quarantine", "given up", "back-off", "unloaded as idle", "stall found",
    "broken found", "FAILED: too often", "FAILED: load", "FAILED: version", "FAILED: engine",
    "FAILED: download", "tried again for memory", "ended: insufficient_memory",
    "ended: queue_timeout", "ended: deadline_exceeded", "ended: overloaded",
    "ended: slow_consumer", "swapped for another", "a swap is due", "evicted",
    "refused for memory", "dry run", "dry run of a reload", "memory short", "asked to give back",
    "rows gave way", "downloaded", "attached later", "attach refused", "cancelled by another",
    "lease", "engines at once", "moved up", "made room", "left for want of memory",
    "a budget is raised", "estimate raised", "loaded side by side",
)  # fmt: skip


def run_seed(seed: int) -> tuple[Counter[str], str, int]:
    """Return what a seed has met, and what went wrong with its exit code, if anything did."""
    world, problem, code = World.of(seed), "", 0
    try:
        world.run()
    except Exception as error:  # noqa: BLE001 - whatever it is, the seed must be named
        problem = f"{traceback.format_exc()}\nseed {seed} fails ({error}); again:"
        problem += f" make simulate SEEDS=1 FIRST={seed}"
        code = VIOLATED if isinstance(error, Violation) else NOT_SHOWN
    counts = world.record.counts
    counts.update({f"fault: {name}": count for name, count in world.faults.items()})
    counts.update({f"event: {name}": count for name, count in world.events.items()})
    for name in ("interrupted", "resumed"):
        counts[f"seeds: {name}"] = int(name in counts)
    return counts, problem, code


def not_shown(met: Counter[str], seeds: int, events: int) -> Iterable[str]:
    """Return what a full run must have met, and this one has not."""
    if met["resumed"] < 2 * seeds:
        yield f"only {met['resumed']} streams were resumed"
    if 2 * met["seeds: resumed"] < met["seeds: interrupted"]:
        yield f"only {met['seeds: resumed']} of {met['seeds: interrupted']} seeds resumed a stream"
    if 2 * met["seeds: interrupted"] < seeds:
        yield f"only {met['seeds: interrupted']} seeds interrupted a stream"
    pulse = met["event: Heartbeat"] + met["event: Tick"]
    if 4 * pulse > events or events - pulse < EVENTS * seeds:
        yield f"{pulse} of {events} events are beats and ticks"
    yield from (f"never met: {name}" for name in MET if not met[name])


def main() -> int:
    """Run the seeds."""
    parser = argparse.ArgumentParser(prog="simulation")
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    given = parser.parse_args()
    start_s, met = time.monotonic(), Counter[str]()
    with multiprocessing.get_context("fork").Pool(given.jobs) as pool:
        seeds = range(given.first, given.first + given.seeds)
        for counts, problem, code in pool.imap_unordered(run_seed, seeds, 10):
            met += counts
            if problem:
                print(problem)
                pool.terminate()
                return code
    events = sum(count for name, count in met.items() if name.startswith("event: "))
    print(
        f"simulation of the core (played workers, virtual time): {given.seeds} seeds, {events}"
        f" events, {met['resumed']} resumed streams, {met['seeds: resumed']} of"
        f" {met['seeds: interrupted']} seeds with interrupted streams resumed some, no violation,"
        f" {time.monotonic() - start_s:.0f} s"
    )
    missing = list(not_shown(met, given.seeds, events)) if given.seeds >= FULL_RUN else []
    for reason in missing:
        print(f"not shown: {reason}")
    return NOT_SHOWN if missing else 0


if __name__ == "__main__":
    sys.exit(main())
