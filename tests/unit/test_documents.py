"""What the documents promise about themselves."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_every_published_number_says_where_it_ran_J5() -> None:
    text = (DOCS / "benchmarks.md").read_text()
    sections = re.split(r"^## ", text, flags=re.M)[1:]
    assert sections
    for section in sections:
        title = section.splitlines()[0]
        if re.search(r"\d", section):
            assert re.search(r"\b(CPU|CUDA|Metal|fake)\b", section), f"{title}: where did it run?"


def test_links_between_documents_lead_somewhere() -> None:
    for document in [*DOCS.rglob("*.md"), DOCS.parent / "README.md"]:
        for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name}: {target}"
