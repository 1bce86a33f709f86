"""docs/clients.md: it says what was measured, of each case and each program, and nothing else."""

from __future__ import annotations

import re
from copy import deepcopy
from datetime import date

import pytest

pytest.importorskip("openai")
pytest.importorskip("anthropic")

from bench.__main__ import CLIENTS, NAMES, chosen
from bench.clients.case import Case, Outcome, Verdict, is_refusal, outcome
from bench.clients.document import (
    PACKAGES,
    PAGE,
    PROGRAMS,
    blocks,
    markdown,
    package_results,
    package_table,
    program_result,
    program_table,
    read_results,
    rendered,
    with_program,
)
from bench.clients.programs.programs import PROGRAMS as ALL
from bench.clients.programs.run import run as run_programs
from bench.clients.run import CASES

RESULTS = read_results()
COMMIT = "0123456789" * 4


def test_the_page_says_what_was_measured() -> None:
    page = PAGE.read_text()
    assert rendered(page, RESULTS) == page, "a table was edited: measure, and do not write"
    for block in blocks(RESULTS).values():
        assert page.count(block) == 1


def test_it_has_every_case_and_all_pass_with_the_gateway() -> None:
    _, *rows = package_table(RESULTS[PACKAGES])
    assert [row[:2] for row in rows] == [[case.package, case.name] for case in CASES]
    assert {row[2] for row in rows} == {Verdict.PASSED}
    assert {row[3] for row in rows} == set(Verdict), "the other server passes some, not all"
    assert all(bool(row[4]) == (row[3] != Verdict.PASSED) for row in rows)


def test_it_has_every_program_and_what_it_does() -> None:
    measured = RESULTS[PROGRAMS]
    assert [(one["program"], one["does"]) for one in measured] == [
        (program.name, program.does) for program in ALL
    ]
    for one in measured:
        kind = one["result"].partition(":")[0]
        assert kind in (Verdict.PASSED, Verdict.FAILED, "not installed")
        assert bool(one["version"]) == (kind != "not installed")


def test_it_says_which_tree_was_measured_and_when() -> None:
    for one in (RESULTS[PACKAGES], *RESULTS[PROGRAMS]):
        assert re.fullmatch(r"[0-9a-f]{40}", one["commit"])
        assert date.fromisoformat(one["date"])
    *_, when = program_table([program_result("ai", "99", "all", "yes", COMMIT)])[1]
    assert when.endswith(f", `{COMMIT[:9]}`")


def test_a_row_is_what_became_of_the_case() -> None:
    case = CASES[0]
    seen = {
        "ours": [Outcome(verdict=Verdict.PASSED)],
        "theirs": [Outcome(verdict=Verdict.FAILED, reason="a|b")],
    }
    measured = package_results([case], seen, COMMIT)
    rows = package_table(measured)
    assert rows == [
        ["package", "what", "ours", "theirs", "why not"],
        [case.package, case.name, "yes", "no", "a|b"],
    ]
    assert markdown(rows)[2] == f"| {case.package} | {case.name} | yes | no | a\\|b |"
    block = blocks({**RESULTS, PACKAGES: measured})[PACKAGES]
    assert f"{measured['date']}, `{COMMIT[:9]}`. Of 1 cases pass: ours 1, theirs 0." in block


def test_a_program_that_is_measured_anew_replaces_its_row_alone() -> None:
    before = deepcopy(RESULTS)
    order = [program.name for program in ALL]
    new = program_result("ai", "99", "all", "no: not any more", COMMIT)
    after = with_program(RESULTS, new, order)
    assert [one["program"] for one in after[PROGRAMS]] == order
    assert [one for one in after[PROGRAMS] if one not in before[PROGRAMS]] == [new]
    assert (after[PACKAGES], before) == (before[PACKAGES], RESULTS)
    assert with_program(RESULTS, new, ["ai"])[PROGRAMS] == [new], "of no other program"


def test_clients_run_only_if_they_are_named() -> None:
    assert chosen([]).names == list(NAMES)
    assert CLIENTS not in NAMES
    assert chosen(["burst", CLIENTS]).names == ["burst", CLIENTS]
    assert chosen([CLIENTS, "--programs", "--only", "ai"]).only == ["ai"]


@pytest.mark.parametrize("given", [["--programs"], ["burst", "--only", "ai"], ["strange"]])
def test_words_that_mean_nothing_are_refused(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        chosen(given)
    assert CLIENTS in capsys.readouterr().err


def test_a_program_that_there_is_not_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"no program is called 'litelm'; there are litellm, "):
        run_programs(["litelm"])


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (AssertionError("x"), "x"),
        (AssertionError(), "not so: raise error"),
        (KeyError("x"), "KeyError: 'x'"),
    ],
)
def test_what_goes_wrong_in_a_case_is_a_failure(error: Exception, reason: str) -> None:
    def run(place: object) -> None:
        raise error

    case = Case(package="openai", name="x", run=run)
    seen = outcome(case, None)  # type: ignore[arg-type]
    assert seen == Outcome(verdict=Verdict.FAILED, reason=reason)


def test_a_refusal_is_a_status_that_says_so() -> None:
    assert [is_refusal(status) for status in (400, 404, 429, 500, 501, 503)] == [
        True, True, True, False, True, False,
    ]  # fmt: skip
