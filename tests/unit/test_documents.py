"""What the documents promise about themselves."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


PLACE = re.compile(r"\b(CPU|CUDA|Metal|fake)\b")
"""Where a figure was measured: with the fake engine, or on which back-end of MLX."""

PLACE_CELL = re.compile(r"(MLX, )?(CPU|CUDA|Metal|fake engine)\b")


def tables(text: str) -> list[list[list[str]]]:
    """Every table of a document: its rows of cells, the header first."""
    found = re.findall(r"(?:^\|.*\n)+", text, re.M)
    rows = [[line.strip("|").split("|") for line in table.splitlines()] for table in found]
    return [[[cell.strip() for cell in row] for row in table] for table in rows]


def test_every_section_of_the_benchmarks_says_in_its_heading_where_it_ran_J5() -> None:
    headings = re.findall(r"^## (.+)$", (DOCS / "benchmarks.md").read_text(), re.M)
    assert len(headings) > 5
    assert [heading for heading in headings if not PLACE.search(heading)] == []


def test_every_figure_of_a_promise_says_where_it_was_measured_J5() -> None:
    measured = [t for t in tables((DOCS / "reliability.md").read_text()) if "target" in t[0]]
    figures = [(table[0].index("on"), row) for table in measured for row in table[2:]]
    assert len(figures) > 40
    assert [row for column, row in figures if not PLACE_CELL.match(row[column])] == []


def test_links_between_documents_lead_somewhere() -> None:
    for document in [*DOCS.rglob("*.md"), DOCS.parent / "README.md"]:
        for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name}: {target}"
