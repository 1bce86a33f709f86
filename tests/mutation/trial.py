"""One bug, planted: whether a fast test notices it, which, and how."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path

from .interpreter import Interpreter
from .operators import Mutation
from .parts import MOST_WORK_S, Project
from .pytest_run import Run, run_pytest
from .reach import FastTest, Reach

IMPORT_LIMIT_S = 60.0
LIMIT_S = 60.0
"""Of all tests of one mutant together."""
MOST_FAILURES = "--maxfail=10"
"""An assertion ends the run at once; after that many exceptions it ends without one."""
WHOLE_RUN = "the limit of all tests of a mutant"


class Outcome(StrEnum):
    """What became of a mutant."""

    ASSERTION = "killed by an assertion"
    EXCEPTION = "killed by an exception in a test"
    TIME_LIMIT = "killed by a time limit"
    SURVIVED = "survived"
    NOT_SHOWN = "not shown"
    NOT_COUNTED = "cannot be imported"


KILLED = frozenset({Outcome.ASSERTION, Outcome.EXCEPTION, Outcome.TIME_LIMIT})


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A mutant's end.

    Attributes:
        test: the id of the test that failed; empty if none did.
        detail: what it said, or why nothing can be said.
        tests_run: how many tests were chosen.
    """

    outcome: Outcome
    test: str = ""
    detail: str = ""
    tests_run: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long things may take, in seconds.

    Attributes:
        run_s: all tests of one mutant.
        test_s: one test; ten times what a fast one may work.
    """

    run_s: float = LIMIT_S
    test_s: float = 30.0


def key_of(source: bytes, mutation: Mutation) -> str:
    """Names a mutant by content: the same bug in the same text is the same mutant."""
    text = f"{mutation.path}\0{mutation.start}\0{mutation.end}\0{mutation.replacement}\0".encode()
    return hashlib.sha256(text + source).hexdigest()[:24]


def choose(
    project: Project, reach: Reach, mutation: Mutation, most_work_s: float = MOST_WORK_S
) -> list[FastTest]:
    """The tests that reach a bug, as many as may be run: first those of files that name its module,
    which were written for it, then the others, in both cases the quickest first."""
    first, last = mutation.statement_lines
    reaching = reach.tests_of(mutation.path, first, last, is_at_import=mutation.is_at_import)
    named = {test.id for test in mentioning(project, reach, mutation.path)}
    chosen: list[FastTest] = []
    work_s = 0.0
    for test in sorted(reaching, key=lambda test: test.id not in named):
        work_s += test.work_s
        if work_s > most_work_s and chosen:
            break
        chosen.append(test)
    return chosen


def mentioning(project: Project, reach: Reach, path: str) -> list[FastTest]:
    """Tests of files that name the module: a child that is killed says of no line that it ran."""
    module = project.module_of(path)
    files = {test.file for test in reach.tests.values()}
    naming = {file for file in files if module in (project.root / file).read_text()}
    tests = [test for test in reach.tests.values() if test.file in naming]
    return sorted(tests, key=lambda test: (test.work_s, test.id))


def try_mutant(
    interpreter: Interpreter, mutation: Mutation, tests: list[FastTest], limits: Limits
) -> Result:
    """Plant a bug in the copy, run tests on it, and take it out again."""
    if not tests:
        return Result(outcome=Outcome.SURVIVED, detail="no fast test runs this line")
    copy = interpreter.copy
    target = copy.root / mutation.path
    source = target.read_bytes()
    target.write_bytes(mutation.apply(source))
    shutil.rmtree(
        copy.root / ".hypothesis" / "examples", ignore_errors=True
    )  # what another mutant taught
    try:
        if mutation.is_at_import and (error := _import_error(interpreter, mutation.path)):
            return Result(outcome=Outcome.NOT_COUNTED, detail=error)
        result = _first_failure(interpreter, tests, limits)
    finally:
        target.write_bytes(source)
    if _needs_control(result):
        return _controlled(interpreter, tests, limits, result)
    return result


def _import_error(interpreter: Interpreter, path: str) -> str:
    """Why the changed module cannot be imported; empty if it can."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        return interpreter.import_error(path, Path(folder) / "output", IMPORT_LIMIT_S)


def _first_failure(interpreter: Interpreter, tests: list[FastTest], limits: Limits) -> Result:
    """Folder by folder, because importing MLX takes longer than most tests of the others."""
    in_folder = {"tests/unit": 0, "tests/contract": 1, "tests/integration": 2, "tests/mlx": 3}
    ordered = sorted(tests, key=lambda test: in_folder.get(os.path.dirname(test.file), 0))
    result = Result(outcome=Outcome.SURVIVED, tests_run=len(tests))
    for _, group in groupby(ordered, key=lambda test: os.path.dirname(test.file)):
        chosen = list(group)
        files = list(dict.fromkeys(test.file for test in chosen))  # the quickest test's file first
        run = run_pytest(
            interpreter,
            files=files,
            chosen=[test.id for test in chosen],
            limit_s=limits.run_s,
            test_limit_s=limits.test_s,
            options=[
                MOST_FAILURES,
                *(["--hypothesis-seed=0"] if interpreter.copy.has_hypothesis else []),
            ],
        )
        result = judge(run, len(tests))
        if result.outcome is not Outcome.SURVIVED:
            break
    return result


def judge(run: Run, tests: int) -> Result:
    """What a run of pytest says of the mutant."""
    if errors := run.values("collection_error"):
        return Result(outcome=Outcome.NOT_COUNTED, detail=errors[0][-200:])
    failures = [event for event in run.events if "failed" in event]
    if not failures:
        return _without_failure(run, tests)
    outcomes = {
        "assertion": Outcome.ASSERTION,
        "time limit": Outcome.TIME_LIMIT,
        "exception": Outcome.EXCEPTION,
        "import": Outcome.NOT_COUNTED,
    }
    first = min(failures, key=lambda event: list(outcomes).index(event["kind"]))
    return Result(
        outcome=outcomes[first["kind"]],
        test=first["failed"],
        detail=f"{first['error']}: {first['message']}",
        tests_run=tests,
    )


def _without_failure(run: Run, tests: int) -> Result:
    started, ended = run.values("started"), run.values("ended")
    if run.exit_code is None:
        last = started[-1] if started else ""
        return Result(outcome=Outcome.TIME_LIMIT, test=last, detail=WHOLE_RUN, tests_run=tests)
    if len(started) > len(ended):
        died = f"the process of the tests died with {run.exit_code}"
        return Result(outcome=Outcome.EXCEPTION, test=started[-1], detail=died, tests_run=tests)
    if run.exit_code == 0 and ended and run.values("collected") == [len(ended)]:
        return Result(outcome=Outcome.SURVIVED, tests_run=tests)
    reason = f"pytest exits with {run.exit_code}: {run.output[-200:]}"
    # All tests have passed, and then something was left unclosed or raised: no test gets the blame.
    is_outside = run.exit_code == 1 and ended and run.values("collected") == [len(ended)]
    outcome = Outcome.EXCEPTION if is_outside else Outcome.NOT_SHOWN
    return Result(outcome=outcome, detail=reason, tests_run=tests)


def _needs_control(result: Result) -> bool:
    """Whether a busy machine could have looked like the bug."""
    is_elsewhere = result.outcome in KILLED and not result.test.startswith("tests/unit/")
    return result.outcome is Outcome.TIME_LIMIT or is_elsewhere


def _controlled(
    interpreter: Interpreter, tests: list[FastTest], limits: Limits, result: Result
) -> Result:
    """The same tests on the right code must pass within the same limit."""
    is_whole_run = result.detail == WHOLE_RUN or not result.test
    same = tests if is_whole_run else [test for test in tests if test.id == result.test]
    control = _first_failure(interpreter, same, limits)
    if control.outcome is Outcome.SURVIVED:
        return result
    reason = f"the right code fails too: {control.test} {control.detail}"
    return Result(outcome=Outcome.NOT_SHOWN, test=result.test, detail=reason, tests_run=len(tests))


def diff_of(mutation: Mutation, source: bytes) -> str:
    """The changed lines, before and after."""
    right = source.decode().splitlines()
    wrong = mutation.apply(source).decode().splitlines()
    first = mutation.line - 1
    after = len(right) - 1
    fewer = len(right) - len(wrong)
    while after > first and right[after] == wrong[after - fewer] and after - fewer > first:
        after -= 1
    old = [f"-{line}" for line in right[first : after + 1]]
    new = [f"+{line}" for line in wrong[first : after - fewer + 1]]
    return "\n".join([*old, *new])
