"""Which fast test reaches which line: measured once for each content of the code it runs."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .interpreter import Interpreter
from .parts import MOST_TEST_S, SIMULATION, Part, Project
from .plugin import CONTEXT
from .pytest_run import Run, run_pytest
from .tree import digests_of
from support.verdict import NotShown

if TYPE_CHECKING:
    from coverage import CoverageData

FILE_LIMIT_S = 1500.0
TEST_LIMIT_S = 300.0
"""Coverage makes tests slow, and the machine may be busy."""
ALWAYS_USED = ("tests/support", "pyproject.toml")
"""Child processes of tests run helpers that no test imports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FastTest:
    """A test that may be chosen.

    Attributes:
        id: as pytest names it.
        work_s: processor seconds on the right code, under coverage.
    """

    id: str
    work_s: float

    @property
    def file(self) -> str:
        """The file it is in."""
        return self.id.split("::")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Who reaches what.

    Attributes:
        tests: every fast test by id.
        lines: file and line -> ids of the tests that ran it.
    """

    tests: dict[str, FastTest] = field(default_factory=dict)
    lines: dict[tuple[str, int], set[str]] = field(default_factory=dict)

    def tests_of(self, path: str, first: int, last: int, *, is_at_import: bool) -> list[FastTest]:
        """The tests that may notice a bug in these lines, quickest first.

        What runs at import may be noticed by any test: a default, a table or a word need not be
        run to be read.
        """
        if is_at_import:
            return sorted(self.tests.values(), key=lambda test: (test.work_s, test.id))
        ids = set[str]().union(*(self.lines.get((path, n), ()) for n in range(first, last + 1)))
        return sorted((self.tests[i] for i in ids), key=lambda test: (test.work_s, test.id))

    def add(self, measured: dict[str, Any]) -> None:
        """Join what one file of tests reaches."""
        ids: dict[str, float] = measured["tests"]
        reached: dict[str, dict[str, list[int]]] = measured["reached"]
        for test_id, work_s in ids.items():
            self.tests[test_id] = FastTest(id=test_id, work_s=work_s)
        for test_id, files in reached.items():
            for path, lines in files.items():
                for line in lines:
                    self.lines.setdefault((path, line), set()).add(test_id)


def measure(
    interpreters: Sequence[Interpreter], part: Part, cache: Path
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What each file of a part's fast tests reaches, from the cache if nothing of it has changed.

    Args:
        interpreters: as many files are measured side by side.

    Raises:
        NotShown: if a fast test fails on the right code, twice.
    """
    cache.mkdir(parents=True, exist_ok=True)
    idle: queue.SimpleQueue[Interpreter] = queue.SimpleQueue()
    for interpreter in interpreters:
        idle.put(interpreter)

    def measured(file: str) -> dict[str, Any]:
        interpreter = idle.get()
        try:
            return _kept_or_measured(interpreter, file, cache)
        finally:
            idle.put(interpreter)

    files = interpreters[0].copy.test_files(part)
    files.sort(key=lambda file: file != SIMULATION)  # it takes longest
    with ThreadPoolExecutor(len(interpreters)) as pool:
        yield from zip(files, pool.map(measured, files), strict=True)


def _kept_or_measured(interpreter: Interpreter, file: str, cache: Path) -> dict[str, Any]:
    """It stays valid while every file that was imported or run for it is the same."""
    copy = interpreter.copy
    asked = [*_deselections(copy), str(MOST_TEST_S)]
    place = cache / f"{file.removesuffix('.py').replace('/', '-')}.json"
    if place.exists():
        kept: dict[str, Any] = json.loads(place.read_text())
        is_same = kept["digests"] == digests_of(copy.root, kept["digests"])
        if is_same and kept["asked"] == asked:
            return kept
    measured = _measure_file(interpreter, file, place.with_suffix(".data"))
    used = {file, str(Path(file).with_name("conftest.py")), *ALWAYS_USED, *measured.pop("files")}
    measured |= {"asked": asked, "digests": digests_of(copy.root, used)}
    place.with_suffix(".new").write_text(json.dumps(measured))
    place.with_suffix(".new").rename(place)
    return measured


def _measure_file(interpreter: Interpreter, file: str, data: Path) -> dict[str, Any]:
    import coverage

    copy = interpreter.copy
    settings = data.with_suffix(".ini")
    settings.write_text(
        "[run]\n"
        f"data_file = {data}\n"
        f"source = {','.join(str(copy.root / package) for package in copy.packages)}\n"
        f"context = ${{{CONTEXT}-}}\n"
        "parallel = true\ncore = ctrace\npatch = subprocess, _exit\n"
        "disable_warnings = no-data-collected, module-not-measured, module-not-imported, "
        "couldnt-parse, already-imported, no-ctracer, include-ignored\n"
    )
    for is_second in (False, True):
        for old in data.parent.glob(data.name + ".*"):
            old.unlink()
        run = run_pytest(
            interpreter, files=[file], limit_s=FILE_LIMIT_S, test_limit_s=TEST_LIMIT_S,
            coverage=settings, extra={CONTEXT: ""}, options=_deselections(copy),
        )  # fmt: skip
        if run.exit_code in (0, 5):  # 5: it holds no test that is not slow
            break
        if is_second:
            failed = [f"{e['failed']}: {e['message']}" for e in run.events if "failed" in e]
            raise NotShown(f"{file} fails on the right code: {failed or run.output}")
    joined = coverage.CoverageData(basename=str(data), no_disk=True)
    for piece in data.parent.glob(data.name + ".*"):
        part = coverage.CoverageData(basename=str(piece))
        part.read()
        joined.update(part)
        piece.unlink()
    settings.unlink()
    return {
        "tests": _work_of(run),
        "reached": _reached(copy, joined, set(_work_of(run))),
        "files": sorted(_run_files(copy, joined) | _imported_files(copy, run)),
    }


def _run_files(copy: Project, data: CoverageData) -> set[str]:
    """The product's files of which any line ran, in child processes too."""
    root = copy.root.resolve()
    return {
        Path(name).resolve().relative_to(root).as_posix()
        for name in data.measured_files()
        if data.lines(name)
    }


def _imported_files(copy: Project, run: Run) -> set[str]:
    """The copy's files that the process of the tests had imported, tests and conftest included.

    This tool's own are left out: what they change, they do not change in the tests.
    """
    root = copy.root.resolve()
    names = {Path(name).resolve() for names in run.values("imported") for name in names}
    found = {name.relative_to(root).as_posix() for name in names if name.is_relative_to(root)}
    return {name for name in found if not name.startswith("tests/mutation/")}


def _deselections(copy: Project) -> list[str]:
    if not copy.never_chosen:
        return []
    return ["-k", " and ".join(f"not {name}" for name in copy.never_chosen)]


def _work_of(run: Run) -> dict[str, float]:
    return {
        event["ended"]: event["work_s"]
        for event in run.events
        if "ended" in event
        and (event["work_s"] <= MOST_TEST_S or event["ended"].startswith(SIMULATION))
    }


def _reached(copy: Project, data: CoverageData, tests: set[str]) -> dict[str, dict[str, list[int]]]:
    found: dict[str, dict[str, list[int]]] = {}
    root = copy.root.resolve()
    for name in data.measured_files():
        path = Path(name).resolve().relative_to(root).as_posix()
        for line, contexts in data.contexts_by_lineno(name).items():
            for context in contexts:
                if (test := context.split("|")[-1]) in tests:
                    found.setdefault(test, {}).setdefault(path, []).append(line)
    return found
