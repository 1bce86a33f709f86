"""What the documents promise about themselves."""

from __future__ import annotations

import re
from pathlib import Path

from support.verdict import Verdict

DOCS = Path(__file__).parents[2] / "docs"


PLACE = re.compile(r"\b(CPU|CUDA|Metal|fake)\b")
"""Where a figure was measured: with the fake engine, or on which back-end of MLX."""

PLACE_CELL = re.compile(r"(MLX, )?(CPU|CUDA|Metal|fake engine)\b")


def tables(text: str) -> list[list[list[str]]]:
    """Every table of a document: its rows of cells, the header first."""
    found = re.findall(r"(?:^\|.*\n)+", text, re.M)
    rows = [[line.strip("|").split("|") for line in table.splitlines()] for table in found]
    return [
        [[cell.strip() for cell in row] for row in table if "---" not in row[0]] for table in rows
    ]


def test_every_section_of_the_benchmarks_says_in_its_heading_where_it_ran_J5() -> None:
    headings = re.findall(r"^## (.+)$", (DOCS / "benchmarks.md").read_text(), re.M)
    assert len(headings) > 5
    assert [heading for heading in headings if not PLACE.search(heading)] == []


def test_every_figure_of_a_promise_says_where_it_was_measured_J5() -> None:
    measured = [t for t in tables((DOCS / "reliability.md").read_text()) if "target" in t[0]]
    figures = [(table[0].index("on"), row) for table in measured for row in table[1:]]
    assert len(figures) > 40
    assert [row for column, row in figures if not PLACE_CELL.match(row[column])] == []


def test_links_between_documents_lead_somewhere() -> None:
    for document in [*DOCS.rglob("*.md"), DOCS.parent / "README.md"]:
        for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name}: {target}"


# ---------------------------------------------------------------- targets and marks

BENCHMARKS = (DOCS / "benchmarks.md").read_text()


def first_number(cell: str) -> float:
    """The median of a cell."""
    found = re.search(r"\d[\d,]*(?:\.\d+)?", cell)
    assert found, cell
    return float(found.group().replace(",", ""))


def verdicts() -> dict[str, str]:
    """How each claim of the fast path and of the HTTP gateway stands, by its id."""
    claims = [t for t in tables(BENCHMARKS) if t[0][:3] == ["", "claim", "on"]]
    rows = [(re.search(r'id="(\w+)"', row[0]), row[-1]) for table in claims for row in table[1:]]
    return {found[1]: verdict.strip("*") for found, verdict in rows if found}


def test_the_rule_for_long_prompts_is_judged_by_its_figures() -> None:
    text = " ".join(BENCHMARKS.split())
    found = re.search(
        r"without a prompt: ([\d.]+) ms\. The largest gap with the adaptive chunk,"
        r" ([\d.]+) ms: (\w+)",
        text,
    )
    assert found
    limit, largest, verdict = found.groups()
    is_kept = float(largest) <= float(limit)
    assert verdict == (Verdict.KEPT if is_kept else Verdict.MISSED)
    assert f"| {float(largest):.0f}" in text


def test_what_the_known_limits_call_missed_is_missed() -> None:
    limits = " ".join((DOCS / "known-limits.md").read_text().split())
    found = list(tables(BENCHMARKS))
    burst = next(t for t in found if "max/median" in t[0])
    assert burst[1][0] == "mlxsup"
    assert first_number(burst[1][4]) > 1.25
    assert "**Time to the first token in a burst** misses" in limits
    claims = verdicts()
    on_a_cpu = limits.split("- **On a CPU** a tiny model")[1].split(" - **")[0]
    missed = re.findall(r"benchmarks\.md#(\w+)\)", on_a_cpu)
    assert len(missed) >= 3
    assert {claims[one] for one in missed} == {Verdict.MISSED}, "with figures that say so"
