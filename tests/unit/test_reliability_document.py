"""docs/reliability.md: what the run wrote, at which commit, and what README makes of it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from promises.campaigns import CAMPAIGNS
from promises.document import PROSE, figures_of
from promises.measures import MEASURES
from support.documents import rows_of, section
from support.verdict import Verdict

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "reliability.md"
FIGURES = figures_of(DOCUMENT.read_text())
ANCHOR = re.compile(r'<a id="([^"]+)"></a>')
LINK = re.compile(r"\[P\d+\]\(docs/reliability\.md#([^)]+)\)")
QUANTITY = re.compile(r"\d[\d,.]*\s?(?:ms|min|s|MB|GB|MiB|GiB|%|×|µs|crashes|starts)(?![a-zA-Z])")


def commit_of(figures: str) -> str:
    """The commit at which they were measured."""
    found = re.findall(r"^Commit `([0-9a-f]{40})` · ", figures, re.MULTILINE)
    assert len(found) == 1, "the figures name no commit, or several"
    return str(found[0])


def rows(figures: str) -> dict[str, list[str]]:
    """The rows of the promises, by the name that others link to."""
    return {
        match.group(1): cells for cells in rows_of(figures) if (match := ANCHOR.match(cells[0]))
    }


def test_every_promise_has_a_row_or_a_campaign() -> None:
    found = {ANCHOR.sub("", cells[0]) for cells in rows(FIGURES).values()}
    campaigns = rows_of(section(FIGURES, "Campaigns"))
    found |= {promise for cells in campaigns for promise in cells[0].split()}
    assert found == {f"P{number}" for number in range(1, 27)}
    assert [cells[1] for cells in campaigns] == [campaign.name for campaign in CAMPAIGNS]


def test_every_verdict_is_one_of_the_four() -> None:
    verdicts = {cells[6] for cells in rows(FIGURES).values()}
    verdicts |= {cells[4] for cells in rows_of(section(FIGURES, "Campaigns"))}
    assert verdicts <= set(Verdict)


def test_no_figure_without_a_target_is_called_kept() -> None:
    for name, cells in rows(FIGURES).items():
        assert (cells[5], cells[6]) != ("–", Verdict.KEPT), name


# ---------------------------------------------------------------- the commit


def git(*arguments: str, root: Path = ROOT) -> str:
    """What git says; nothing if it refuses."""
    done = subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def differs_from_its_commit(commit: str, root: Path = ROOT) -> list[str]:
    """What differs, prose aside, between a commit and the one that added its figures.

    Raises:
        Skipped: there is no git, or the history does not reach so far.
        AssertionError: the commit is not in the history.
    """
    if shutil.which("git") is None or not git("rev-parse", "HEAD", root=root):
        pytest.skip("no git, or no history")
    if not git("cat-file", "-t", commit, root=root):
        assert git("rev-parse", "--is-shallow-repository", root=root) == "true", (
            f"the history has no commit {commit}"
        )
        pytest.skip("the history does not reach so far back")
    added = git("log", "-1", "--format=%H", f"-S{commit}", "--", "docs/reliability.md", root=root)
    # Figures that are not committed yet are compared with the tree itself.
    return git("diff", "--name-only", commit, *added.split(), "--", ".", *PROSE,
               root=root).splitlines()  # fmt: skip


def test_only_prose_differs_between_the_measured_commit_and_the_one_that_added_the_figures() -> (
    None
):
    assert differs_from_its_commit(commit_of(FIGURES)) == []


def repository_with_figures(root: Path, *, also: str) -> str:
    """One commit that is measured, and one that adds its figures, and something else."""
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    (root / "docs").mkdir()
    (root / "code.py").write_text("1")
    git("init", "-q", root=root)
    git("add", ".", root=root)
    git(*who, "commit", "-qm", "code", root=root)
    commit = git("rev-parse", "HEAD", root=root)
    (root / "docs" / "reliability.md").write_text(f"Commit `{commit}` · today\n")
    (root / also).write_text("2")
    git("add", ".", root=root)
    git(*who, "commit", "-qm", "figures", root=root)
    (root / "later.py").write_text("3")
    git("add", ".", root=root)
    git(*who, "commit", "-qm", "later", root=root)
    return commit


@pytest.mark.parametrize(
    ("also", "found"), [("docs/more.md", []), ("README.md", []), ("code.py", ["code.py"])]
)
def test_figures_of_another_tree_are_seen(also: str, found: list[str], tmp_path: Path) -> None:
    commit = repository_with_figures(tmp_path, also=also)
    assert differs_from_its_commit(commit, tmp_path) == found
    with pytest.raises(AssertionError, match="no commit"):
        differs_from_its_commit("0" * 40, tmp_path)


# ---------------------------------------------------------------- README


def claims_of(readme: str) -> Iterator[tuple[str, str]]:
    """What README says before each link to a row, and the row; a row of "" for what follows."""
    for item in re.split(r"^- ", section(readme, "mlxsup"), flags=re.MULTILINE)[1:]:
        text = " ".join(item.split("\n\n")[0].split())
        parts = LINK.split(text)
        yield from zip(parts[::2], [*parts[1::2], ""], strict=True)


def problem_of(claim: str, row: list[str] | None) -> str:
    """What is wrong about a claim; nothing if it follows from its row."""
    quantities = [match.group() for match in QUANTITY.finditer(claim)]
    if row is None:
        return f"no row is linked for {quantities}" if quantities else ""
    verdict = row[6]
    if verdict not in (Verdict.KEPT, Verdict.NOT_SHOWN) and verdict.lower() not in claim.lower():
        return f"{verdict}, and README does not say so"
    said = f"{row[1]} {row[5]}"
    missing = [one for one in quantities if not re.search(rf"(?<![\d.]){re.escape(one)}", said)]
    return f"{missing} is not in the row" if missing else ""


def test_every_figure_in_readme_follows_from_its_row() -> None:
    table, linked = rows(FIGURES), 0
    readme = (ROOT / "README.md").read_text()
    assert "*not shown* has still to be measured" in " ".join(readme.split())
    for claim, anchor in claims_of(readme):
        assert not anchor or anchor in table, f"no row is called {anchor}"
        problem = problem_of(claim, table.get(anchor))
        assert not problem, f"{anchor}: {problem}: {claim}"
        linked += bool(anchor)
    assert linked >= 8


@pytest.mark.parametrize(
    ("claim", "cells", "problem"),
    [
        ("found within 3 s (", "limit 2 s|≤3 s|kept", ""),
        ("found within 2 s (", "limit 12 s|≤3 s|kept", "not in the row"),
        ("found within 3 s (", "limit 2 s|≤3 s|MISSED", "does not say so"),
        ("found within 3 s (missed so far: ", "limit 2 s|≤3 s|MISSED", ""),
        ("nothing is killed (", "false kills|0|reported", "does not say so"),
        ("found within 2 s (", "limit 12 s|≤3 s|not shown", "not in the row"),
        ("gone within 1 s.", "", "no row"),
        ("it runs on Macs.", "", ""),
    ],
)
def test_a_claim_is_held_against_its_row(claim: str, cells: str, problem: str) -> None:
    what, *rest = cells.split("|")
    row = ["P1", what, "x", "x", "x", *rest, "5 of 5"] if cells else None
    assert problem_of(claim, row) == "" if not problem else problem in problem_of(claim, row)


def test_every_row_that_readme_links_is_measured() -> None:
    names = {
        f"{measure.key}-{figure.key}".replace("_", "-")
        for measure in MEASURES
        for figure in measure.figures
    }
    assert set(LINK.findall((ROOT / "README.md").read_text())) <= names
