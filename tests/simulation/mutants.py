"""`python -m simulation.mutants`: plants bugs in the core, one at a time; the seeds see each.

A bug counts as seen only by a check from outside: it starts itself again with -O, which takes the
core's own assertions away, and the invariants are not called. It counts only in a seed that the
core as it is passes; otherwise the check may have failed for the same reason as without the bug.
Each bug is planted in a separate process, whose import of that one module reads changed text; this
one imports nothing of the core.

A run looks first at the seed in which a bug was seen the last time (SEEN_IN, written by
--remember): that spares nearly all of the search, and decides nothing, because a bug that this
seed does not show is looked for in all others.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType

from .planted import MUTANTS, Mutant
from support.verdict import EXIT_CODES, Verdict

CORE = "mlxsup.supervisor.core."
MOST_SEEDS = 2000
LIMIT_S = 400
"""Of processor time for one bug; one that hangs is neither seen nor missed."""

SEEN_IN = Path(__file__).parent / "planted" / "seen_in.json"
"""The seed that showed each bug, by its name."""

Job = tuple[int, tuple[int, ...]]
"""The number of a bug, and the seeds to look at, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """How a planted bug was seen.

    Attributes:
        name: of the bug.
        check: that saw it; empty if none did.
        seed: in which run.
        problem: why nothing can be said of it.
    """

    name: str
    check: str = ""
    seed: int = 0
    problem: str = ""


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, mutant: Mutant) -> None:
        super().__init__(name, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        """Never from a cache."""
        changed = self._mutant.plant(self.get_data(self.path).decode())
        return self.source_to_code(changed.encode(), self.path)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The changed module, and no other."""
        if fullname != CORE + self._mutant.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.origin is None:
            return None
        spec.loader = _Loader(fullname, spec.origin, self._mutant)
        return spec


def _hangs(number: int, frame: object) -> None:
    raise TimeoutError(f"no end within {LIMIT_S} s")


def plant(number: int, seeds: Sequence[int]) -> Sight:
    """Runs seeds with one bug in this very process; call it in a separate one."""
    mutant = MUTANTS[number]
    sys.meta_path.insert(0, _Finder(mutant))
    _limit_time()
    from .violation import Violation
    from .world import World

    for seed in seeds:
        try:
            World(seed, has_invariants=False).run()
        except Violation as violation:
            return Sight(name=mutant.name, check=violation.name, seed=seed)
        except Exception as error:  # noqa: BLE001 - the simulation itself is at fault: say so
            problem = f"seed {seed}: {type(error).__name__}: {error}"
            return Sight(name=mutant.name, problem=problem)
    return Sight(name=mutant.name)


def passes(seed: int) -> bool:
    """Whether the core as it is passes a seed, in this very process; call it in a separate one."""
    _limit_time()
    from .violation import Violation
    from .world import World

    try:
        World(seed, has_invariants=False).run()
    except Violation:
        return False
    return True


def confirmed(
    sight: Sight, passes: Callable[[int], bool], look_after: Callable[[int], Sight]
) -> Sight:
    """What remains of a sight: the first in a seed that the core passes without the bug.

    Args:
        sight: the first one of all.
        passes: whether the core as it is passes a seed.
        look_after: looks for the next sight, in the seeds that follow one.
    """
    while sight.check and not passes(sight.seed):
        print(f"{sight.name}: not counted: seed {sight.seed} fails without it", flush=True)
        sight = look_after(sight.seed)
    return sight


def _limit_time() -> None:
    signal.signal(signal.SIGPROF, _hangs)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)


def _plant(job: Job) -> Sight:
    return plant(*job)


def sights(jobs: Sequence[Job], processes: int) -> Iterator[Sight]:
    """Plants bugs, one in each process, and confirms what was seen in processes without any."""
    context = multiprocessing.get_context("fork")
    with (
        context.Pool(processes, maxtasksperchild=1) as pool,
        context.Pool(1, maxtasksperchild=1) as second,
    ):

        @cache
        def is_passed(seed: int) -> bool:
            return second.apply(passes, (seed,))

        for job, sight in zip(jobs, pool.imap(_plant, jobs, 1), strict=True):

            def look_after(seed: int, job: Job = job) -> Sight:
                number, seeds = job
                return second.apply(plant, (number, seeds[seeds.index(seed) + 1 :]))

            yield confirmed(sight, is_passed, look_after)


def in_order(last: int, seen_in: int | None) -> tuple[int, ...]:
    """Every seed up to the last one, first of all the one that showed the bug before."""
    if seen_in is None:
        return tuple(range(1, last + 1))
    return (seen_in, *(seed for seed in range(1, last + 1) if seed != seen_in))


def main() -> int:
    """Plants every bug: or those with --only in their names, after the first --skip, --most."""
    parser = argparse.ArgumentParser(prog="simulation.mutants")
    parser.add_argument("--only", default="")
    parser.add_argument("--most", type=int, default=len(MUTANTS))
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=MOST_SEEDS)
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--remember", action="store_true")
    given = parser.parse_args()
    if __debug__:
        again = [sys.executable, "-O", "-m", "simulation.mutants", *sys.argv[1:]]
        os.execv(sys.executable, again)
    for mutant in MUTANTS:
        spec = importlib.util.find_spec("mlxsup.supervisor")
        if spec is None or CORE + mutant.module in sys.modules:
            print("not shown: the core is imported already, or is not there")
            return EXIT_CODES[Verdict.NOT_SHOWN]
    seen_in: dict[str, int] = json.loads(SEEN_IN.read_text())
    jobs = [
        (number, in_order(given.seeds, seen_in.get(mutant.name)))
        for number, mutant in enumerate(MUTANTS)
        if given.only in mutant.name
    ]
    jobs = jobs[given.skip : given.skip + given.most]
    missed, unclear = 0, 0
    for sight in sights(jobs, given.jobs):
        said = f"{sight.check}, seed {sight.seed}" if sight.check else "NOT SEEN"
        print(f"{sight.name}: {sight.problem or said}", flush=True)
        unclear += bool(sight.problem)
        missed += not (sight.problem or sight.check)
        if sight.check:
            seen_in[sight.name] = sight.seed
    if given.remember:
        known = {mutant.name for mutant in MUTANTS}
        kept = {name: seed for name, seed in sorted(seen_in.items()) if name in known}
        SEEN_IN.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(jobs) - missed - unclear} of {len(jobs)} planted bugs were seen from outside")
    if missed:
        return EXIT_CODES[Verdict.MISSED]
    return EXIT_CODES[Verdict.NOT_SHOWN if unclear or not jobs else Verdict.KEPT]


if __name__ == "__main__":
    sys.exit(main())
