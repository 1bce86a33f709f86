"""Which fast test reaches which line: measured once for each content of the tree, and kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from support.verdict import NotShown

from .parts import MOST_TEST_S, SIMULATION, Part, Project
from .plugin import CONTEXT
from .pytest_run import Run, run_pytest
from .tree import digest_of

FILE_LIMIT_S = 1500.0
TEST_LIMIT_S = 300.0
"""Coverage makes tests slow, and the machine may be busy."""


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

    def add(self, measured: dict[str, object]) -> None:
        """Join what one file of tests reaches."""
        ids: dict[str, float] = measured["tests"]  # type: ignore[assignment]
        reached: dict[str, dict[str, list[int]]] = measured["reached"]  # type: ignore[assignment]
        for test_id, work_s in ids.items():
            self.tests[test_id] = FastTest(id=test_id, work_s=work_s)
        for test_id, files in reached.items():
            for path, lines in files.items():
                for line in lines:
                    self.lines.setdefault((path, line), set()).add(test_id)


def measure(copy: Project, part: Part, cache: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """What each file of a part's fast tests reaches, from the cache if nothing has changed.

    Raises:
        NotShown: if a fast test fails on the right code, twice.
    """
    cache.mkdir(parents=True, exist_ok=True)
    code = digest_of(
        copy.root, [*copy.packages, "tests/support"] if copy.has_support() else copy.packages
    )
    for file in copy.test_files(part):
        beside = [str(Path(file).with_name("conftest.py"))]
        own = digest_of(copy.root, [file, *(one for one in beside if (copy.root / one).exists())])
        place = cache / f"{Path(file).stem}-{code[:12]}-{own[:12]}.json"
        if not place.exists():
            measured = _measure_file(copy, file, place.with_suffix(".data"))
            place.with_suffix(".new").write_text(json.dumps(measured))
            place.with_suffix(".new").rename(place)
        yield file, json.loads(place.read_text())


def _measure_file(copy: Project, file: str, data: Path) -> dict[str, object]:
    import coverage

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
    prefix = ["-m", "coverage", "run", "--rcfile", str(settings)]
    for is_second in (False, True):
        for old in data.parent.glob(data.name + ".*"):
            old.unlink()
        run = run_pytest(
            copy, files=[file], limit_s=FILE_LIMIT_S, test_limit_s=TEST_LIMIT_S, prefix=prefix,
            extra={CONTEXT: ""}, options=_deselections(copy),
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
    return {"tests": _work_of(run), "reached": _reached(copy, joined, set(_work_of(run)))}


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


def _reached(copy: Project, data: object, tests: set[str]) -> dict[str, dict[str, list[int]]]:
    import coverage

    assert isinstance(data, coverage.CoverageData)
    found: dict[str, dict[str, list[int]]] = {}
    root = copy.root.resolve()
    for name in data.measured_files():
        path = Path(name).resolve().relative_to(root).as_posix()
        for line, contexts in data.contexts_by_lineno(name).items():
            for context in contexts:
                if (test := context.split("|")[-1]) in tests:
                    found.setdefault(test, {}).setdefault(path, []).append(line)
    return found
