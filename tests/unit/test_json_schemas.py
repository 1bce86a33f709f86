"""Every command has a published schema for what it prints with `--json`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.command_tree import leaves
from support.json_schemas import DIALECT, FOLDER, SHARED, problems, read, unknown_keywords

NAMES = sorted(file.stem for file in FOLDER.glob("*.json"))


def test_every_command_has_a_schema_and_every_schema_a_command() -> None:
    commands = {"-".join(path) for path in leaves()}
    assert set(NAMES) - set(SHARED) == commands


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_says_what_it_is_of_and_uses_only_what_the_tests_read(name: str) -> None:
    schema = read(name)
    assert schema["$schema"] == DIALECT
    assert schema["title"].replace(" ", "-") == name
    assert schema["description"].endswith(".")
    assert unknown_keywords(schema) == set()
    if name != "model":
        assert schema["properties"]["schema_version"] == {"const": 1}
    for file in re.findall(r'"\$ref": "([^"]+)"', (FOLDER / f"{name}.json").read_text()):
        assert (FOLDER / file).is_file()


def properties(schema: object) -> Iterator[tuple[str, object]]:
    """Every property that a schema mentions, however deep, with what it says of it."""
    if isinstance(schema, list):
        for one in schema:
            yield from properties(one)
    elif isinstance(schema, dict):
        known = schema.get("properties")
        yield from known.items() if isinstance(known, dict) else ()
        for one in schema.values():
            yield from properties(one)


def test_sizes_are_numbers_of_bytes() -> None:
    sizes = [pair for name in NAMES for pair in properties(read(name)) if "byte" in pair[0]]
    assert len(sizes) > 40
    for key, said in sizes:
        assert key.endswith("bytes"), key
        assert '"string"' not in json.dumps(said), key
    others = {key for name in NAMES for key, _ in properties(read(name))}
    assert [key for key in others if re.search(r"[kmgt]i?b$|(^|_)size$", key)] == []


def test_the_document_names_the_folder() -> None:
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    assert "](schemas/)" in text


KEY = {"schema_version": 1, "name": "a", "left": 1}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"left": None}, "$.left is None, no integer"),
        ({"left": True}, "$.left is True, no integer"),
        ({"more": 1}, "$.more is not mentioned"),
        ({"schema_version": 2}, "$.schema_version is 2, not 1"),
    ],
)
def test_an_output_that_is_not_as_published_is_found(
    changes: dict[str, object], problem: str | None
) -> None:
    found = problems(json.dumps(KEY | changes), ("key", "revoke"))
    assert found == ([] if problem is None else [problem])


def test_what_is_missing_or_wrong_deep_inside_is_found() -> None:
    key = {"name": "a", "account": "b", "is_operator": "no"}
    line = json.dumps({"schema_version": 1, "path": "/p", "is_needed": True, "keys": [key]})
    assert problems(line, ("key", "list")) == [
        "$.keys[0].created is missing",
        "$.keys[0].is_operator is 'no', no boolean",
    ]
    line = json.dumps({"schema_version": 1, "path": 7, "source": None, "looked_at": []})
    assert problems(line, ("config", "path")) == [
        "$.daemon is missing",
        "$.path is 7, no ['string', 'null']",
    ]
