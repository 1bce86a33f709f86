"""Draws mutants of a part, tries them side by side, and keeps what became of each."""

from __future__ import annotations

import json
import queue
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from .interpreter import Interpreter
from .operators import Mutation, mutations_of
from .parts import Part, Project
from .reach import Reach
from .trial import KILLED, Limits, Outcome, Result, choose, diff_of, key_of, mentioning, try_mutant


class Saved(TypedDict):
    """A result as the file of earlier runs has it; see `Result` and `Kept`."""

    outcome: str
    test: str
    detail: str
    tests_run: int
    tree: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A drawn bug and its end.

    Attributes:
        diff: the changed lines.
        result: what the tests said.
    """

    mutation: Mutation
    diff: str
    result: Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Results of earlier runs.

    Attributes:
        place: the file they are in.
        tree: digest of the code and the tests that run now.
        is_kill_kept: whether a kill counts though the tests have changed since.
        results: by key of the mutant.
    """

    place: Path
    tree: str
    is_kill_kept: bool
    results: dict[str, Saved]
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def read(cls, place: Path, tree: str, *, is_kill_kept: bool) -> Kept:
        """What is in a file, or nothing."""
        results = json.loads(place.read_text()) if place.exists() else {}
        return cls(place=place, tree=tree, is_kill_kept=is_kill_kept, results=results)

    def find(self, key: str) -> Result | None:
        """What became of a mutant, if that still counts."""
        if (saved := self.results.get(key)) is None:
            return None
        outcome = Outcome(saved["outcome"])
        is_same = saved["tree"] == self.tree and outcome is not Outcome.NOT_SHOWN
        if not is_same and not (self.is_kill_kept and outcome in KILLED):
            return None
        return Result(
            outcome=outcome,
            test=saved["test"],
            detail=saved["detail"],
            tests_run=saved["tests_run"],
        )

    def keep(self, key: str, result: Result) -> None:
        """Write it down at once: a run may be broken off and taken up again."""
        with self.lock:
            self.results[key] = Saved(
                outcome=result.outcome.value,
                test=result.test,
                detail=result.detail,
                tests_run=result.tests_run,
                tree=self.tree,
            )
            new = self.place.with_suffix(".new")
            new.write_text(json.dumps(self.results, indent=0))
            new.rename(self.place)


def draw(project: Project, part: Part, seed: int) -> list[Mutation]:
    """All bugs of a part, in the order in which they are tried for this seed."""
    found = [
        mutation
        for path in part.files(project.root)
        for mutation in mutations_of(path, (project.root / path).read_bytes())
    ]
    random.Random(f"{seed}:{part.name}").shuffle(found)
    return found


def run_part(
    interpreters: list[Interpreter],
    part: Part,
    *,
    seed: int,
    wanted: int,
    reach: Reach,
    limits: Limits,
    kept: Kept,
    say: Callable[[str], None],
) -> list[Mutant]:
    """Try mutants until as many as are wanted could be imported.

    Args:
        interpreters: as many mutants are tried side by side.
        wanted: how many must count.
    """
    project = interpreters[0].copy
    drawn = iter(draw(project, part, seed))
    idle: queue.SimpleQueue[Interpreter] = queue.SimpleQueue()
    for interpreter in interpreters:
        idle.put(interpreter)
    sources = {path: (project.root / path).read_bytes() for path in part.files(project.root)}

    def end_of(mutation: Mutation) -> Mutant:
        source = sources[mutation.path]
        key = key_of(source, mutation)
        result = kept.find(key)
        if result is None:
            interpreter = idle.get()
            try:
                tests = choose(project, reach, mutation)
                tests = tests or mentioning(project, reach, mutation.path)
                result = try_mutant(interpreter, mutation, tests, limits)
            finally:
                idle.put(interpreter)
            kept.keep(key, result)
            place = f"{mutation.path}:{mutation.line}"
            say(f"{part.name} {place} {mutation.operator}: {result.outcome}")
        return Mutant(mutation=mutation, diff=diff_of(mutation, source), result=result)

    tried: list[Mutant] = []
    with ThreadPoolExecutor(len(interpreters)) as pool:
        while batch := list(_next_of(drawn, wanted - counted(tried))):
            tried += pool.map(end_of, batch)
    return tried


def counted(mutants: list[Mutant]) -> int:
    """How many could be imported."""
    return sum(mutant.result.outcome is not Outcome.NOT_COUNTED for mutant in mutants)


def _next_of(drawn: Iterator[Mutation], count: int) -> Iterator[Mutation]:
    for _, mutation in zip(range(count), drawn, strict=False):
        yield mutation
