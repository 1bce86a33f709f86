"""docs/faults.md: every test that it names exists, and none of the folder is left out."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from support.documents import rows_of, section

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "faults.md").read_text()
PROMISED = {name for name, _ in rows_of(section(TEXT, "The promises"))}
FAULTS = rows_of(section(TEXT, "The faults"))
BEHAVIOURS = rows_of(section(TEXT, "What the behaviours say, by test"))


def names_in(source: Path) -> set[str]:
    """The names of a file's tests."""
    return {
        node.name
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("row", [*FAULTS, *BEHAVIOURS], ids=lambda row: row[0])
def test_each_named_test_exists(row: list[str]) -> None:
    path, _, name = row[2].strip("`").partition("::")
    assert name in names_in(ROOT / path)


@pytest.mark.parametrize("row", FAULTS, ids=lambda row: row[0])
def test_each_fault_ends_in_a_promise(row: list[str]) -> None:
    assert row[1].split()
    assert set(row[1].split()) <= PROMISED


def test_each_promise_of_a_name_is_the_one_of_its_row() -> None:
    for _, promises, test in FAULTS:
        if named := {word for word in test.strip("`").split("_") if word in PROMISED}:
            assert named & set(promises.split()), test


def test_each_behaviour_stands_in_the_name_of_its_test() -> None:
    for behaviour, _, test in BEHAVIOURS:
        assert behaviour in test.strip("`").split("_")


def test_no_test_of_the_folder_is_left_out() -> None:
    there = {
        f"{source.relative_to(ROOT)}::{name}"
        for source in (ROOT / "tests" / "faults").glob("test_*.py")
        for name in names_in(source)
    }
    assert there - {row[2].strip("`") for row in FAULTS} == set()
