"""docs/clients.md: it has each case and each program, and none that the gateway does not pass."""

from __future__ import annotations

import pytest

pytest.importorskip("openai")
pytest.importorskip("anthropic")

from bench.clients.case import Case, Outcome, Verdict, is_refusal, outcome
from bench.clients.document import (
    PACKAGES,
    PAGE,
    PROGRAMS,
    block_of,
    markdown,
    program_rows,
    with_block,
)
from bench.clients.programs.programs import PROGRAMS as ALL
from bench.clients.run import CASES
from support.documents import rows_of

TEXT = PAGE.read_text()
NAMES = [program.name for program in ALL]


def table(name: str) -> list[list[str]]:
    block = block_of(TEXT, name)
    return rows_of(block[block.index("|") :])


def test_it_has_every_case_and_all_pass_with_the_gateway() -> None:
    rows = table(PACKAGES)
    assert [row[:2] for row in rows] == [[case.package, case.name] for case in CASES]
    assert {row[2] for row in rows} == {Verdict.PASSED}
    assert {row[3] for row in rows} == set(Verdict), "the other server passes some, not all"
    assert all(bool(row[4]) == (row[3] != Verdict.PASSED) for row in rows)


def test_it_has_every_program_and_what_it_does() -> None:
    rows = table(PROGRAMS)
    assert [row[0] for row in rows] == [f"`{name}`" for name in NAMES]
    assert [row[2] for row in rows] == [program.does for program in ALL]
    assert {row[3].partition(":")[0] for row in rows} <= {"yes", "no", "not installed"}


def test_a_program_that_is_measured_anew_replaces_its_row_alone() -> None:
    page = with_block(
        TEXT, PROGRAMS, "\n".join(markdown([["program"] * 4, ["`ai`", "1", "a|b", "yes"]]))
    )
    rows = program_rows(page, {"litellm": ["`litellm`", "2", "c", "yes"]}, NAMES)
    assert rows[1:] == [["`litellm`", "2", "c", "yes"], ["`ai`", "1", "a|b", "yes"]]


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
