"""Documents and what users see are written as an engineer would say it: CONTRIBUTING.md's rules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("protocol", "store", "supervisor", "worker", "client", "gateway", "downloader", "cli")
PAGES = (
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "config.example.toml", "Makefile",
    "tests/README.md",
)  # fmt: skip
NOT_OURS = ("mutants.md", "soak.md")
"""Written by a run; what they say comes out of the tests' own texts."""

WRONG = {
    "go on": r"\bgo(?:es)? on\b",
    "of its own": r"\bof (?:its|their|his|her|your|our) own\b",
    "not any more": r"\bany more\b(?! \w+s\b)",
    "is told": r"\b(?:is|are|was|were|be) told\b",
    "so many": r"\bso many\b",
    "mend": r"\bmend(?:s|ed|ing)?\b",
    "shall": r"\bshall\b",
    "exclude each other": r"\bexclude each other\b",
}


def pages() -> Iterator[Path]:
    yield from (ROOT / page for page in PAGES)
    for page in sorted((ROOT / "docs").rglob("*.md")):
        if page.name not in NOT_OURS:
            yield page


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Every text of a module that is no docstring, with its line: any of them may be shown."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in docstrings:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def found_in(modules: Iterable[Path], rule: str) -> list[str]:
    """The texts of these modules that break a rule, each with its place."""
    return [
        f"{path.relative_to(ROOT)}:{number}: {text}"
        for path in modules
        for number, text in texts(path)
        if re.search(WRONG[rule], text, re.IGNORECASE)
    ]


@pytest.mark.parametrize("rule", WRONG)
def test_no_page_has_it(rule: str) -> None:
    found = [
        f"{page.relative_to(ROOT)}:{number}: {line.strip()}"
        for page in pages()
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if re.search(WRONG[rule], line, re.IGNORECASE)
    ]
    assert found == []


@pytest.mark.parametrize("rule", WRONG)
def test_no_text_of_the_product_has_it(rule: str) -> None:
    modules = [path for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))]
    assert found_in(modules, rule) == []


@pytest.mark.parametrize("rule", WRONG)
def test_no_text_of_the_promises_has_it(rule: str) -> None:
    """Some of these become rows of docs/reliability.md."""
    assert found_in(sorted((ROOT / "tests" / "promises").glob("*.py")), rule) == []


@pytest.mark.parametrize("rule", WRONG)
def test_no_help_of_a_command_has_it(rule: str) -> None:
    """Docstrings of commands are their help."""
    found = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "cli" / "commands").glob("*.py"))
        if re.search(WRONG[rule], path.read_text(), re.IGNORECASE)
    ]
    assert found == []
