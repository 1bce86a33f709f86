"""The tool behind `make mutants`, on a toy whose mutants are known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from mutation.campaign import Kept, run_part
from mutation.document import Score, document_of
from mutation.interpreter import Interpreter
from mutation.operators import mutations_of
from mutation.parts import Part, Project
from mutation.reach import FastTest, Reach, measure
from mutation.tree import copy_of
from mutation.trial import Limits, Outcome, choose, diff_of, try_mutant
from support.verdict import NotShown, Verdict

pytestmark = pytest.mark.slow

TOY = '''
LIMIT = int("3")


def is_full(count: int) -> bool:
    """Whether there is no place left."""
    return count >= LIMIT


def first_free(taken: list[int]) -> int:
    place = 0
    while place in taken:
        place += 1
    return place
'''

GOOD_TESTS = """
from toy.places import first_free, is_full

def test_full():
    assert [is_full(n) for n in (0, 2, 3, 4)] == [False, False, True, True]

def test_first_free():
    assert first_free([0, 1, 3]) == 2
    assert first_free([]) == 0
"""

EMPTY_TESTS = """
from contextlib import suppress
from toy.places import first_free, is_full

def test_full():
    with suppress(Exception):
        is_full(3)

def test_first_free():
    with suppress(Exception):
        assert first_free([]) in range(10)
"""

PART = Part(name="toy", globs=("toy/*.py",), tests=("tests/unit/test_*.py",))
LIMITS = Limits(run_s=60.0, test_s=3.0)


@contextmanager
def make_toy(root: Path, tests: str, code: str = TOY) -> Iterator[Interpreter]:
    (root / "toy").mkdir(parents=True)
    (root / "tests" / "unit").mkdir(parents=True)
    (root / "toy" / "places.py").write_text(code)
    (root / "tests" / "unit" / "test_toy.py").write_text(tests)
    (root / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\naddopts = "--import-mode=importlib"\n'
        'markers = ["slow: never"]\n'
    )
    project = Project(
        root=root,
        parts=(PART,),
        packages=("toy",),
        import_roots=(".",),
        not_fast=(),
        never_chosen=(),
        namespace="",
        has_hypothesis=False,
    )
    with Interpreter.start(copy_of(project, root.with_name("copy"))) as interpreter:
        yield interpreter


def reach_of(toy: Interpreter, cache: Path) -> Reach:
    reach = Reach()
    for _, measured in measure([toy], PART, cache):
        reach.add(measured)
    return reach


IMPORT_ERROR = '-LIMIT = int("3")\n+LIMIT = int("XX3")'
ENDLESS = "-        place += 1\n+        pass"
BORDER = "-    return count >= LIMIT\n+    return count > LIMIT"
UNDEFINED = "-    place = 0\n+    pass"
STEPS_OVER_HOLES = "-        place += 1\n+        place += 2"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("tests", "outcomes"),
    [
        (
            GOOD_TESTS,
            {
                IMPORT_ERROR: Outcome.NOT_COUNTED,
                ENDLESS: Outcome.TIME_LIMIT,
                BORDER: Outcome.ASSERTION,
                UNDEFINED: Outcome.EXCEPTION,
                STEPS_OVER_HOLES: Outcome.SURVIVED,
            },
        ),
        (EMPTY_TESTS, dict.fromkeys((BORDER, UNDEFINED, STEPS_OVER_HOLES), Outcome.SURVIVED)),
    ],
    ids=["good tests", "tests that assert nothing"],
)
def test_how_known_bugs_end(tmp_path: Path, tests: str, outcomes: dict[str, Outcome]) -> None:
    with make_toy(tmp_path / "toy", tests) as toy:
        reach = reach_of(toy, tmp_path / "cache")
        source = (toy.copy.root / "toy" / "places.py").read_bytes()
        bugs = {diff_of(m, source): m for m in mutations_of("toy/places.py", source)}
        assert {
            diff: try_mutant(toy, bugs[diff], choose(toy.copy, reach, bugs[diff]), LIMITS).outcome
            for diff in outcomes
        } == outcomes
        assert (toy.copy.root / "toy" / "places.py").read_bytes() == source


@pytest.mark.parametrize(
    ("most_work_s", "chosen"),
    [(0.1, ["own"]), (3.1, ["own", "quick"]), (9.0, ["own", "quick", "slow"])],
)
def test_tests_of_files_that_name_the_module_go_first(
    tmp_path: Path, most_work_s: float, chosen: list[str]
) -> None:
    (tmp_path / "own.py").write_text("import toy.places\n")
    (tmp_path / "others.py").write_text("import toy\n")
    (mutation,) = (m for m in mutations_of("toy/places.py", b"def f():\n    return 1 + g()\n")
                   if m.operator == "arithmetic")  # fmt: skip
    costs = {"others.py::slow": 5.0, "others.py::quick": 0.1, "own.py::own": 3.0}
    tests = {name: FastTest(id=name, work_s=work_s) for name, work_s in costs.items()}
    reach = Reach(tests=tests, lines={("toy/places.py", 2): set(tests)})
    project = Project(root=tmp_path, namespace="")
    found = choose(project, reach, mutation, most_work_s)
    assert [test.id.split("::")[1] for test in found] == chosen


@pytest.mark.timeout(600)
def test_what_cannot_be_imported_is_replaced_by_the_next(tmp_path: Path) -> None:
    code = 'LIMIT = int("3")\n\n\ndef is_full(count: int) -> bool:\n    return count >= LIMIT\n'
    tests = GOOD_TESTS[: GOOD_TESTS.index("def test_first_free")].replace("first_free, ", "")
    with make_toy(tmp_path / "toy", tests, code) as toy:
        mutants = run_part(
            [toy],
            PART,
            seed=7,
            wanted=2,
            reach=reach_of(toy, tmp_path / "cache"),
            limits=LIMITS,
            kept=Kept.read(tmp_path / "kept.json", "tree", is_kill_kept=False),
            say=lambda text: None,
        )
        score = Score.of("toy", mutants, [], wanted=2)
        assert (len(score.mutants), score.uncounted) == (2, 1)
        assert (score.share, score.verdict) == (1.0, Verdict.KEPT)
        assert "| toy | 2 |" in document_of([score], commit="c" * 40, seed=7, run_s=60.0)


def test_a_file_without_a_test_leaves_survivors(tmp_path: Path) -> None:
    with make_toy(tmp_path / "toy", GOOD_TESTS) as toy:
        source = (toy.copy.root / "toy" / "places.py").read_bytes()
        [bug, *_] = mutations_of("toy/places.py", source)
        result = try_mutant(toy, bug, [], LIMITS)
        assert (result.outcome, result.test) == (Outcome.SURVIVED, "")


def test_tests_that_fail_on_the_right_code_show_nothing(tmp_path: Path) -> None:
    wrong = GOOD_TESTS + "\ndef test_wrong():\n    assert False\n"
    with make_toy(tmp_path / "toy", wrong) as toy, pytest.raises(NotShown, match="test_wrong"):
        reach_of(toy, tmp_path / "cache")


def test_a_kill_by_time_counts_only_if_the_right_code_is_in_time(tmp_path: Path) -> None:
    with make_toy(tmp_path / "toy", "import time\n\ndef test_slow():\n    time.sleep(60)\n") as toy:
        source = (toy.copy.root / "toy" / "places.py").read_bytes()
        bug = next(m for m in mutations_of("toy/places.py", source) if not m.is_at_import)
        tests = [FastTest(id="tests/unit/test_toy.py::test_slow", work_s=0.0)]
        result = try_mutant(toy, bug, tests, Limits(run_s=60.0, test_s=0.2))
        assert result.outcome is Outcome.NOT_SHOWN
        assert "the right code fails too" in result.detail
        assert (toy.copy.root / "toy" / "places.py").read_bytes() == source


@pytest.mark.timeout(600)
def test_reach_is_measured_again_only_if_a_file_that_it_used_has_changed(tmp_path: Path) -> None:
    with make_toy(tmp_path / "toy", GOOD_TESTS) as toy:
        reach_of(toy, tmp_path / "cache")
        (place,) = (tmp_path / "cache").iterdir()

        def is_measured_again() -> bool:
            before = place.stat().st_ino
            reach_of(toy, tmp_path / "cache")
            return place.stat().st_ino != before

        outcomes = [is_measured_again()]
        for path in (
            "toy/places.py",
            "toy/unused.py",
            "tests/unit/test_toy.py",
            "tests/unit/test_other.txt",
            "tests/unit/conftest.py",
        ):
            with (toy.copy.root / path).open("a") as file:
                file.write("\n# changed\n")
            outcomes.append(is_measured_again())
        assert outcomes == [False, True, False, True, False, True]


def test_a_warm_process_that_holds_what_is_mutated_is_refused(tmp_path: Path) -> None:
    with make_toy(tmp_path / "toy", GOOD_TESTS) as toy:
        copy = toy.copy
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.path.insert(0, '.')\nimport toy.places\n"
    )
    roots = (".", str(tmp_path))
    with pytest.raises(NotShown, match="the warm process is gone"):
        Interpreter.start(replace(copy, import_roots=roots))
