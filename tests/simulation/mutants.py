"""`python -m simulation.mutants`: plants bugs in the core, one at a time; the seeds see each.

A bug counts as seen only by a check from outside: it starts itself again with -O, which takes the
core's own assertions away, and the invariants are not called. It counts only in a seed that the
core as it is passes; otherwise the check may have failed for the same reason as without the bug.
Each bug is planted in a separate process, whose import of that one module reads changed text; this
one imports nothing of the core.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType, ModuleType

from .planted import MUTANTS, Mutant
from support.verdict import EXIT_CODES, Verdict

CORE = "mlxsup.supervisor.core."
MOST_SEEDS = 1000
LIMIT_S = 400
"""Of processor time for one bug; one that hangs is neither seen nor missed."""

Job = tuple[int, int, int]
"""The number of a bug, the first seed to look at, and the last one."""


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


def plant(number: int, first: int, last: int) -> Sight:
    """Runs seeds with one bug in this very process; call it in a separate one."""
    mutant = MUTANTS[number]
    sys.meta_path.insert(0, _Finder(mutant))
    _limit_time()
    from .violation import Violation
    from .world import World

    for seed in range(first, last + 1):
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
    sight: Sight, passes: Callable[[int], bool], look_from: Callable[[int], Sight]
) -> Sight:
    """What remains of a sight: the first in a seed that the core passes without the bug.

    Args:
        sight: the first one of all.
        passes: whether the core as it is passes a seed.
        look_from: looks for the next sight, from a seed on.
    """
    while sight.check and not passes(sight.seed):
        print(f"{sight.name}: not counted: seed {sight.seed} fails without it", flush=True)
        sight = look_from(sight.seed + 1)
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

        for (number, _, last), sight in zip(jobs, pool.imap(_plant, jobs, 1), strict=True):

            def look_from(seed: int, number: int = number, last: int = last) -> Sight:
                return second.apply(plant, (number, seed, last))

            yield confirmed(sight, is_passed, look_from)


def main() -> int:
    """Plants every bug: or those with --only in their names, after the first --skip, --most."""
    parser = argparse.ArgumentParser(prog="simulation.mutants")
    parser.add_argument("--only", default="")
    parser.add_argument("--most", type=int, default=len(MUTANTS))
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=MOST_SEEDS)
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    given = parser.parse_args()
    if __debug__:
        again = [sys.executable, "-O", "-m", "simulation.mutants", *sys.argv[1:]]
        os.execv(sys.executable, again)
    for mutant in MUTANTS:
        spec = importlib.util.find_spec("mlxsup.supervisor")
        if spec is None or CORE + mutant.module in sys.modules:
            print("not shown: the core is imported already, or is not there")
            return EXIT_CODES[Verdict.NOT_SHOWN]
    jobs = [(n, 1, given.seeds) for n, m in enumerate(MUTANTS) if given.only in m.name]
    jobs = jobs[given.skip : given.skip + given.most]
    missed, unclear = 0, 0
    for sight in sights(jobs, given.jobs):
        said = f"{sight.check}, seed {sight.seed}" if sight.check else "NOT SEEN"
        print(f"{sight.name}: {sight.problem or said}", flush=True)
        unclear += bool(sight.problem)
        missed += not (sight.problem or sight.check)
    print(f"{len(jobs) - missed - unclear} of {len(jobs)} planted bugs were seen from outside")
    if missed:
        return EXIT_CODES[Verdict.MISSED]
    return EXIT_CODES[Verdict.NOT_SHOWN if unclear or not jobs else Verdict.KEPT]


if __name__ == "__main__":
    sys.exit(main())
