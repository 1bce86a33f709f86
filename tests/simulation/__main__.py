"""`python -m simulation [--seeds N] [--first N] [--jobs N]`: many seeds; a failing one is named.

Exits with 4 if a promise is broken, and with 3 if the run shows nothing, because it did not meet
the faults that it is to judge by.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from .ground import Violation
from .plan import EVENTS, LOADING, MEMORY, STRAY, STUCK, WITHOUT_EVIDENCE
from .world import World

VIOLATED, NOT_SHOWN = 4, 3
"""Exit codes."""
CHUNK = 10
"""Seeds that one process takes at a time."""
FULL_RUN = 1000
"""With that many seeds or more, a run must have met everything."""
FAULTS = (*WITHOUT_EVIDENCE, *STRAY, *MEMORY, *LOADING, *STUCK, "poison", "too_large", "idle_dies")
COUNTED = (
    "cancel met finish", "cancel met rejection", "cancel met exit", "cancel met pause", "yielded",
    "turns", "pause", "pause refused", "resume", "resume refused", "continued after a pause",
    "paused for a class", "quarantine", "given up", "back-off", "unloaded as idle", "stall found",
    "broken found", "FAILED: too often", "FAILED: load", "FAILED: version", "FAILED: engine",
    "FAILED: download", "tried again for memory", "ended: insufficient_memory",
    "ended: queue_timeout", "ended: deadline_exceeded", "ended: overloaded",
    "ended: slow_consumer", "swapped for another", "a swap is due", "evicted",
    "refused for memory", "dry run", "memory short", "asked to give back", "rows gave way",
    "downloaded", "attached later", "attach refused", "cancelled by another",
)  # fmt: skip
RESUMES_PER_SEED = 2
PULSE_SHARE = 0.25
"""Of all events: heartbeats and ticks, at most."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one seed showed, or several.

    Attributes:
        seeds: how many.
        events: by kind.
        counts: what happened how often, faults as `fault: name`.
        with_deaths: seeds in which a process died under requests.
        with_resumes: those of them in which an answer was resumed.
        problem: what went wrong in the seed that failed; empty if none did.
        is_violation: whether a check found it, and the simulation itself did not just break.
    """

    seeds: int = 0
    events: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    with_deaths: int = 0
    with_resumes: int = 0
    problem: str = ""
    is_violation: bool = False

    def add(self, other: Outcome) -> None:
        """Sums up."""
        self.seeds += other.seeds
        self.events += other.events
        self.counts += other.counts
        self.with_deaths += other.with_deaths
        self.with_resumes += other.with_resumes


def run_seed(seed: int) -> Outcome:
    """Lives through one seed."""
    world = World.of(seed)
    outcome = Outcome(seeds=1)
    try:
        world.run()
    except Exception as error:  # noqa: BLE001 - whatever it is, the seed must be named
        outcome.problem = f"{traceback.format_exc()}\nseed {seed} fails ({error}); again:"
        outcome.problem += f" make simulate SEEDS=1 FIRST={seed}"
        outcome.is_violation = isinstance(error, Violation)
    outcome.events.update(world.events)
    outcome.counts.update(world.record.counts)
    outcome.counts.update({f"fault: {name}": count for name, count in world.faults.items()})
    outcome.with_deaths = int("interrupted" in world.record.counts)
    outcome.with_resumes = int("resumed" in world.record.counts)
    return outcome


def summary(whole: Outcome, took_s: float) -> str:
    """What the run has shown, for the document."""
    events = whole.events.total()
    kinds = ", ".join(f"{name} {count / events:.1%}" for name, count in whole.events.most_common(9))
    return (
        f"simulation of the core (played workers, virtual time): {whole.seeds} seeds,"
        f" {events} events ({kinds}), {whole.counts['resumed']} resumed streams,"
        f" {whole.with_resumes} of {whole.with_deaths} seeds with interrupted streams resumed"
        f" some, no violation, {took_s:.0f} s, {whole.seeds / took_s:.0f} seeds/s"
    )


def not_shown(whole: Outcome) -> Iterable[str]:
    """What a full run must have met, and this one has not."""
    if whole.counts["resumed"] < RESUMES_PER_SEED * whole.seeds:
        yield f"only {whole.counts['resumed']} streams were resumed"
    if 2 * whole.with_resumes < whole.with_deaths:
        yield f"only {whole.with_resumes} of {whole.with_deaths} seeds resumed a stream"
    if 2 * whole.with_deaths < whole.seeds:
        yield f"only {whole.with_deaths} seeds interrupted a stream"
    pulse = whole.events["Heartbeat"] + whole.events["Tick"]
    if pulse > PULSE_SHARE * whole.events.total():
        yield f"{pulse} of {whole.events.total()} events are beats and ticks"
    for name in (*(f"fault: {fault}" for fault in FAULTS), *COUNTED):
        if not whole.counts[name]:
            yield f"never met: {name}"
    if whole.events.total() - pulse < EVENTS * whole.seeds:
        yield "too few events"


def main() -> int:
    """Runs the seeds."""
    parser = argparse.ArgumentParser(prog="simulation")
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.seeds)
    start_s = time.monotonic()
    whole = Outcome()
    with multiprocessing.get_context("fork").Pool(given.jobs) as pool:
        for outcome in pool.imap_unordered(run_seed, seeds, CHUNK):
            whole.add(outcome)
            if outcome.problem:
                print(outcome.problem)
                pool.terminate()
                return VIOLATED if outcome.is_violation else NOT_SHOWN
    print(summary(whole, time.monotonic() - start_s))
    missing = list(not_shown(whole)) if whole.seeds >= FULL_RUN else []
    for reason in missing:
        print(f"not shown: {reason}")
    return NOT_SHOWN if missing else 0


if __name__ == "__main__":
    sys.exit(main())
