"""The tool behind `make mutants`: which bugs it plants, and what it concludes."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest

from mutation.campaign import Kept, Mutant, draw
from mutation.document import Score
from mutation.equivalent import Equivalent, read_equivalents, stale_ones
from mutation.operators import mutations_of
from mutation.parts import PARTS, UNMEASURED, Project
from mutation.pytest_run import Run
from mutation.tree import commit_of
from mutation.trial import Outcome, Result, diff_of, judge
from mutation.zygote import what_is_not_clean
from support.verdict import NotShown, Verdict

ROOT = Path(__file__).parents[2]


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
        for package in (
            "protocol",
            "store",
            "supervisor",
            "worker",
            "client",
            "gateway",
            "downloader",
            "cli",
        )
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
        (
            run_of({"collected": 1}, {"started": "t"}, {"ended": "t"}, exit_code=1),
            Outcome.EXCEPTION,
        ),
        (
            run_of({"collected": 2}, {"started": "t"}, {"ended": "t"}, exit_code=1),
            Outcome.NOT_SHOWN,
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


def test_a_warm_process_must_hold_nothing_of_the_copy(tmp_path: Path) -> None:
    assert "support.verdict" in what_is_not_clean(ROOT)
    assert [one for one in what_is_not_clean(tmp_path) if not one.endswith(" threads")] == []


@pytest.mark.parametrize(("name", "is_refused"), [("docs/x.md", False), ("code.py", True)])
def test_a_seed_needs_a_commit_that_the_code_does_not_differ_from(
    name: str, is_refused: bool, tmp_path: Path
) -> None:
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    (tmp_path / "docs").mkdir()
    for file in ("docs/x.md", "code.py"):
        (tmp_path / file).write_text("1")
    for arguments in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "all")):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    (tmp_path / name).write_text("2")
    if is_refused:
        with pytest.raises(NotShown, match=name):
            commit_of(tmp_path, is_dirty_allowed=False)
    assert len(commit_of(tmp_path, is_dirty_allowed=is_refused)) == 40


def test_an_assertion_is_deleted_unless_it_only_tells_the_type_checker() -> None:
    source = (
        b"def f(x):\n    assert x is not None\n    assert isinstance(x, int)\n    assert x > 1\n"
    )
    found = mutations_of("a.py", source)
    assert [m.line for m in found if m.operator == "deleted statement"] == [4]


def test_none_is_returned_for_a_value_but_not_for_false() -> None:
    source = b"def f(x):\n    if x:\n        return False\n    return 0\n"
    found = mutations_of("a.py", source)
    assert [m.line for m in found if m.operator == "return None"] == [4]
