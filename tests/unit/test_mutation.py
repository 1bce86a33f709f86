"""The tool behind `make mutants`, on a toy whose mutants are known."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from mutation.campaign import Kept, Mutant, draw, run_part
from mutation.document import Score, document_of
from mutation.equivalent import Equivalent, read_equivalents, stale_ones
from mutation.operators import mutations_of
from mutation.parts import PARTS, UNMEASURED, Part, Project
from mutation.pytest_run import Run
from mutation.reach import FastTest, Reach, measure
from mutation.tree import copy_of
from mutation.trial import Limits, Outcome, Result, choose, diff_of, judge, try_mutant
from support.verdict import NotShown, Verdict

ROOT = Path(__file__).parents[2]

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


def make_toy(root: Path, tests: str, code: str = TOY) -> Project:
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
    return copy_of(project, root.with_name("copy"))


def reach_of(toy: Project, cache: Path) -> Reach:
    reach = Reach()
    for _, measured in measure(toy, PART, cache):
        reach.add(measured)
    return reach


def run_toy(tmp_path: Path, tests: str, wanted: int = 200) -> list[Mutant]:
    toy = make_toy(tmp_path / "toy", tests)
    kept = Kept.read(tmp_path / "kept.json", "tree", is_kill_kept=False)
    return run_part(
        [toy],
        PART,
        seed=7,
        wanted=wanted,
        reach=reach_of(toy, tmp_path / "cache"),
        limits=LIMITS,
        kept=kept,
        say=lambda text: None,
    )


def test_every_operator_plants_its_bug() -> None:
    source = b"""
class Door:
    \"\"\"Left alone.\"\"\"

    width: int = 4

    def open(self, wide: bool = True, *, by: str = "me") -> str | None:
        if TYPE_CHECKING:
            x = 1
        if wide and not self.locked:
            self.turn(by)
            return f"{by} opened it"
        for hinge in self.hinges:
            if hinge is None:
                continue
            self.width += 2 * hinge
        logger.info("left alone %s", 1)
        return None
"""
    found = mutations_of("door.py", source)
    assert Counter(m.operator for m in found) == {
        "constant": 5,
        "dropped default": 2,
        "boolean": 1,
        "removed not": 1,
        "negated condition": 1,
        "deleted statement": 2,
        "return None": 1,
        "compare": 1,
        "arithmetic": 2,
        "break and continue": 1,
    }
    diffs = [diff_of(m, source) for m in found]
    assert '-            return f"{by} opened it"\n+            return None' in diffs
    assert "-            if hinge is None:\n+            if hinge is not None:" in diffs
    assert "-        if wide and not self.locked:\n+        if wide or not self.locked:" in diffs
    assert "-            self.turn(by)\n+            pass" in diffs
    for mutation in found:
        compile(mutation.apply(source), "door.py", "exec")


def test_every_file_of_mlxsup_can_be_mutated_and_belongs_to_one_part() -> None:
    parts = {part.name: set(part.files(ROOT)) for part in PARTS}
    together = [path for files in parts.values() for path in files]
    assert len(together) == len(set(together))
    left_out = {p.relative_to(ROOT).as_posix() for glob in UNMEASURED for p in ROOT.glob(glob)}
    every = {
        path.relative_to(ROOT).as_posix()
        for package in ("protocol", "supervisor", "worker", "client", "cli")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert set(together) | left_out >= every
    for path in together:
        source = (ROOT / path).read_bytes()
        for mutation in mutations_of(path, source)[::40]:
            compile(mutation.apply(source), path, "exec")
            assert mutation.apply(source) != source


def test_a_sample_depends_on_the_seed_alone() -> None:
    project = Project(root=ROOT)
    part = PARTS[-1]
    assert draw(project, part, 0xABCD) == draw(project, part, 0xABCD)
    assert draw(project, part, 0xABCD)[:20] != draw(project, part, 0xABCE)[:20]


@pytest.mark.timeout(600)
def test_good_tests_kill_every_bug_of_the_toy_and_an_import_error_is_no_kill(
    tmp_path: Path,
) -> None:
    mutants = run_toy(tmp_path, GOOD_TESTS)
    outcomes = {m.diff: m.result.outcome for m in mutants}
    assert outcomes.pop('-LIMIT = int("3")\n+LIMIT = int("XX3")') is Outcome.NOT_COUNTED
    endless = [diff for diff, outcome in outcomes.items() if outcome is Outcome.TIME_LIMIT]
    assert "-        place += 1\n+        pass" in endless
    survivors = [diff for diff, outcome in outcomes.items() if outcome is Outcome.SURVIVED]
    assert survivors == ["-        place += 1\n+        place += 2"]
    assert outcomes["-    return count >= LIMIT\n+    return count > LIMIT"] is Outcome.ASSERTION
    others = len(outcomes) - 1
    score = Score.of("toy", mutants, [], wanted=others)
    assert (score.killed, score.uncounted) == (others, 1)
    row = f"| toy | {others + 1} |"
    assert row in document_of([score], commit="c" * 40, seed=7, run_s=60.0)
    listed = Equivalent(path="toy/places.py", diff=survivors[0], reason="steps over holes")
    assert Score.of("toy", mutants, [listed], wanted=others).share == 1.0


@pytest.mark.timeout(600)
def test_tests_that_assert_nothing_kill_nothing(tmp_path: Path) -> None:
    toy = make_toy(tmp_path / "toy", EMPTY_TESTS)
    reach = reach_of(toy, tmp_path / "cache")
    source = (toy.root / "toy" / "places.py").read_bytes()
    bugs = mutations_of("toy/places.py", source)
    endless = (b"place += 1", b"in", b"place in taken", b"+=")
    outcomes = Counter(
        try_mutant(toy, bug, choose(reach, bug), LIMITS).outcome
        for bug in bugs
        if not bug.is_at_import and source[bug.start : bug.end] not in endless
    )
    assert set(outcomes) == {Outcome.SURVIVED}
    assert outcomes.total() >= 5


def test_a_file_without_a_test_leaves_survivors(tmp_path: Path) -> None:
    toy = make_toy(tmp_path / "toy", GOOD_TESTS)
    source = (toy.root / "toy" / "places.py").read_bytes()
    [bug, *_] = mutations_of("toy/places.py", source)
    result = try_mutant(toy, bug, [], LIMITS)
    assert (result.outcome, result.test) == (Outcome.SURVIVED, "")


def test_tests_that_fail_on_the_right_code_show_nothing(tmp_path: Path) -> None:
    toy = make_toy(tmp_path / "toy", GOOD_TESTS + "\ndef test_wrong():\n    assert False\n")
    with pytest.raises(NotShown, match="test_wrong"):
        reach_of(toy, tmp_path / "cache")


def test_a_kill_by_time_counts_only_if_the_right_code_is_in_time(tmp_path: Path) -> None:
    toy = make_toy(tmp_path / "toy", "import time\n\ndef test_slow():\n    time.sleep(60)\n")
    source = (toy.root / "toy" / "places.py").read_bytes()
    bug = next(m for m in mutations_of("toy/places.py", source) if not m.is_at_import)
    tests = [FastTest(id="tests/unit/test_toy.py::test_slow", work_s=0.0)]
    result = try_mutant(toy, bug, tests, Limits(run_s=60.0, test_s=0.2))
    assert result.outcome is Outcome.NOT_SHOWN
    assert "the right code fails too" in result.detail
    assert (toy.root / "toy" / "places.py").read_bytes() == source


def run_of(*events: dict[str, object], exit_code: int | None) -> Run:
    return Run(events=events, exit_code=exit_code, output="the end")


FAILED = {"failed": "t", "phase": "call", "error": "E", "message": "m"}


@pytest.mark.parametrize(
    ("run", "outcome"),
    [
        (run_of({"collection_error": "NameError"}, exit_code=2), Outcome.NOT_COUNTED),
        (run_of({**FAILED, "kind": "import"}, exit_code=1), Outcome.NOT_COUNTED),
        (run_of({**FAILED, "kind": "assertion"}, exit_code=1), Outcome.ASSERTION),
        (run_of({**FAILED, "kind": "exception"}, exit_code=1), Outcome.EXCEPTION),
        (run_of({**FAILED, "kind": "time limit"}, exit_code=1), Outcome.TIME_LIMIT),
        (
            run_of({**FAILED, "kind": "import"}, {**FAILED, "kind": "exception"}, exit_code=1),
            Outcome.EXCEPTION,
        ),
        (
            run_of({**FAILED, "kind": "exception"}, {**FAILED, "kind": "assertion"}, exit_code=1),
            Outcome.ASSERTION,
        ),
        (run_of({**FAILED, "kind": "exception"}, exit_code=None), Outcome.EXCEPTION),
        (run_of({"collected": 1}, {"started": "t"}, exit_code=None), Outcome.TIME_LIMIT),
        (run_of({"collected": 1}, {"started": "t"}, exit_code=70), Outcome.EXCEPTION),
        (run_of({"collected": 1}, {"started": "t"}, exit_code=0), Outcome.EXCEPTION),
        (
            run_of({"collected": 1}, {"started": "t"}, {"ended": "t"}, exit_code=0),
            Outcome.SURVIVED,
        ),
        (run_of({"collected": 0}, exit_code=5), Outcome.NOT_SHOWN),
        (run_of(exit_code=4), Outcome.NOT_SHOWN),
    ],
)
def test_what_a_run_of_pytest_says_of_a_mutant(run: Run, outcome: Outcome) -> None:
    assert judge(run, 1).outcome is outcome


def test_what_is_kept_counts_while_code_and_tests_are_the_same(tmp_path: Path) -> None:
    place = tmp_path / "kept.json"
    kept = Kept.read(place, "before", is_kill_kept=False)
    killed = Result(outcome=Outcome.ASSERTION, test="t", tests_run=1)
    kept.keep("killed", killed)
    kept.keep("survived", Result(outcome=Outcome.SURVIVED))
    kept.keep("not shown", Result(outcome=Outcome.NOT_SHOWN))
    names = ("killed", "survived", "not shown", "never tried")
    same = Kept.read(place, "before", is_kill_kept=False)
    assert [same.find(name) is not None for name in names] == [True, True, False, False]
    changed = Kept.read(place, "after", is_kill_kept=False)
    assert [changed.find(name) is not None for name in names] == [False, False, False, False]
    more_tests = Kept.read(place, "after", is_kill_kept=True)
    assert [more_tests.find(name) is not None for name in names] == [True, False, False, False]
    assert same.find("killed") == killed


def test_a_score_with_too_few_or_unjudged_mutants_is_not_shown() -> None:
    source = b"def f():\n    return 1 + 2 + 3\n"
    mutations = mutations_of("f.py", source)
    killed, unjudged, lived = (
        Mutant(mutation=mutations[0], diff="", result=Result(outcome=outcome))
        for outcome in (Outcome.ASSERTION, Outcome.NOT_SHOWN, Outcome.SURVIVED)
    )
    verdicts = [
        Score.of("p", [killed] * 9 + [lived], [], wanted=10).verdict,
        Score.of("p", [killed] * 8 + [lived] * 2, [], wanted=10).verdict,
        Score.of("p", [killed] * 9, [], wanted=10).verdict,
        Score.of("p", [killed] * 9 + [unjudged], [], wanted=10).verdict,
    ]
    assert verdicts == [Verdict.KEPT, Verdict.MISSED, Verdict.NOT_SHOWN, Verdict.NOT_SHOWN]
    equivalent = Equivalent(path="f.py", diff="", reason="none")
    two_of_ten = Score.of("p", [killed] * 8 + [lived] * 2, [equivalent], wanted=10)
    assert (two_of_ten.share, two_of_ten.verdict) == (1.0, Verdict.MISSED)


def test_what_is_listed_as_equivalent_can_still_be_planted() -> None:
    assert stale_ones(ROOT, read_equivalents()) == []
    gone = Equivalent(path="protocol/ids.py", diff="-was\n+is", reason="none")
    assert stale_ones(ROOT, [gone]) == [gone]
