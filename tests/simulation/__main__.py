"""`python -m simulation [--seeds N] [--first N] [--jobs N]`: many seeds; a failing one is named."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import traceback

from .world import World

CHUNK = 25
"""Seeds that one process takes at a time."""


def run_seed(seed: int) -> tuple[int, int, int, str]:
    """One seed: itself, its events, its resumed answers, and what went wrong."""
    world = World(seed)
    problem = ""
    try:
        world.run()
    except Exception:  # noqa: BLE001 - whatever it is, the seed must be named
        story = "\n".join(line for lines in world.core.stories().values() for line in lines[-12:])
        problem = f"{traceback.format_exc()}\n{story}"
    return seed, world.events, world.clients.resumed, problem


def main() -> int:
    """Runs the seeds; exit code 1 where one fails."""
    parser = argparse.ArgumentParser(prog="simulation")
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.seeds)
    start_s = time.monotonic()
    events = resumed = 0
    with multiprocessing.get_context("fork").Pool(given.jobs) as pool:
        for seed, count, went_on, problem in pool.imap_unordered(run_seed, seeds, CHUNK):
            events += count
            resumed += went_on
            if problem:
                print(problem, file=sys.stderr)
                print(f"seed {seed} fails; again: make simulate SEEDS=1 FIRST={seed}")
                pool.terminate()
                return 1
    took_s = time.monotonic() - start_s
    print(
        f"simulation of the core (fake workers, virtual time): {len(seeds)} seeds, {events} events,"
        f" {resumed} resumed streams, no violation, {took_s:.0f} s,"
        f" {len(seeds) / took_s:.0f} seeds/s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
