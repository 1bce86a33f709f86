"""Tests that another test names, as `FILE::NAME` below tests/."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]


def source_of(named: str) -> str:
    """The text of a test, its decorators included.

    Raises:
        AssertionError: there is no such test.
    """
    file, _, name = named.partition("::")
    text = (TESTS / file).read_text()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    raise AssertionError(f"there is no test {named}")
