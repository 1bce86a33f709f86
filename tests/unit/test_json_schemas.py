"""Every command has a schema of what it prints with `--json`."""

from __future__ import annotations

import json

import pytest

from support.cli.command_tree import leaves
from support.gateway.json_schemas import SCHEMAS, problems

KEY = {"schema_version": 1, "name": "a", "left": 1}


def test_every_command_has_a_schema_and_every_schema_a_command() -> None:
    assert set(SCHEMAS) - {"model", "error"} == {"-".join(path) for path in leaves()}


@pytest.mark.parametrize("name", sorted(set(SCHEMAS) - {"model"}))
def test_every_output_names_its_version(name: str) -> None:
    assert SCHEMAS[name]["properties"]["schema_version"] == {"const": 1}


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
def test_an_output_unlike_its_schema_is_found(
    changes: dict[str, object], problem: str | None
) -> None:
    found = problems(json.dumps(KEY | changes), ("key", "revoke"))
    assert found == ([] if problem is None else [problem])


def test_a_problem_deep_inside_is_found() -> None:
    key = {"name": "a", "account": "b", "is_operator": "no"}
    line = json.dumps({"schema_version": 1, "path": "/p", "is_needed": True, "keys": [key]})
    assert problems(line, ("key", "list")) == [
        "$.keys[0].created is missing",
        "$.keys[0].is_operator is 'no', no boolean",
    ]
