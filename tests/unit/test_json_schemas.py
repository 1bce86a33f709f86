"""Every command has a shape of what it prints with `--json`, and outputs unlike it are found."""

from __future__ import annotations

import json

import pytest

from support.cli.command_tree import leaves
from support.gateway.json_schemas import SHAPES, problems

COMMANDS = sorted(name for name in SHAPES if not name.startswith("@"))


def test_every_command_has_a_shape_and_every_shape_a_command() -> None:
    assert set(COMMANDS) - {"error"} == {"-".join(path) for path in leaves()}


def test_every_output_names_its_version() -> None:
    for name in COMMANDS:
        shape = SHAPES[name]
        shapes = [SHAPES[one] for one in shape.split("|")] if isinstance(shape, str) else [shape]
        assert {one.get("schema_version") for one in shapes} == {1}, name


KEY = {"schema_version": 1, "name": "a", "left": 1}
LISTED = {"name": "a", "account": "b", "created": "c", "is_operator": True}


def keys(**changes: object) -> dict[str, object]:
    return {"schema_version": 1, "path": "/p", "is_needed": True, "keys": [LISTED | changes]}


@pytest.mark.parametrize(
    ("path", "output", "found"),
    [
        ("key revoke", KEY, []),
        ("key revoke", KEY | {"left": None}, ["$.left is None, no integer"]),
        ("key revoke", KEY | {"left": True}, ["$.left is True, no integer"]),
        ("key revoke", KEY | {"more": 1}, ["$.more is not mentioned"]),
        ("key revoke", KEY | {"schema_version": 2}, ["$.schema_version is 2, not 1"]),
        ("key revoke", {"schema_version": 1, "name": "a"}, ["$.left is missing"]),
        ("key list", keys(), []),
        ("key list", keys(is_operator="no"), ["$.keys[0].is_operator is 'no', no boolean"]),
        ("key list", keys() | {"keys": {}}, ["$.keys is {}, no array"]),
    ],
)
def test_an_output_unlike_its_shape_is_found(
    path: str, output: dict[str, object], found: list[str]
) -> None:
    assert problems(json.dumps(output), path.split()) == found
