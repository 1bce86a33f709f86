"""docs/behaviours.md against the tests that name its ids, both ways."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LISTED = re.findall(r"^- \*\*([A-J]\d+)\*\* \S", (ROOT / "docs/behaviours.md").read_text(), re.M)
ID_IN_NAME = re.compile(r"_([A-J]\d+)(?=_|$)")


def ids_of(source: str) -> set[str]:
    """The ids in the names of a file's test functions."""
    return {
        behaviour
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")
        for behaviour in ID_IN_NAME.findall(node.name)
    }


def ids_by_file() -> dict[str, set[str]]:
    """The ids that each file of tests names, by its path."""
    files = (ROOT / "tests").rglob("test_*.py")
    found = {str(file.relative_to(ROOT)): ids_of(file.read_text()) for file in files}
    return {file: ids for file, ids in found.items() if ids}


def limits() -> set[str]:
    """The ids of which docs/known-limits.md says that they are not there."""
    text = (ROOT / "docs/known-limits.md").read_text()
    return set(re.findall(r"\(([A-J]\d+)\)", text))


def test_the_reader_of_names_sees_ids_and_nothing_else() -> None:
    source = (
        "def test_a_H200_at_16_C2_F10(): ...\nasync def test_P23_D5(): ...\ndef help_C9(): ...\n"
    )
    assert ids_of(source) == {"H200", "C2", "F10", "D5"}


def test_the_list_names_each_behaviour_once_and_in_order() -> None:
    assert sorted(set(LISTED), key=lambda name: (name[0], int(name[1:]))) == LISTED
    assert {name[0] for name in LISTED} == set("ABCDEFGHIJ")


def test_every_id_in_the_name_of_a_test_is_in_the_list() -> None:
    unknown = {file: ids - set(LISTED) for file, ids in ids_by_file().items()}
    assert {file: ids for file, ids in unknown.items() if ids} == {}


def test_every_behaviour_is_named_by_a_test_or_by_the_known_limits() -> None:
    named = set().union(*ids_by_file().values())
    assert [name for name in LISTED if name not in named | limits()] == []


def test_the_known_limits_name_no_behaviour_that_the_list_does_not_have() -> None:
    assert limits() - set(LISTED) == set()
