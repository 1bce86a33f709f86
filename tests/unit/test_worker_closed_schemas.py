"""Schemas whose objects take the properties that they name, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsup.worker.text.grammar import closed

X: dict[str, Any] = {"properties": {"x": {"type": "integer"}}}
CLOSED = X | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "meant"),
    [
        (X, CLOSED),
        ({"properties": {"a": X}, "$defs": {"D": X}},
         {"properties": {"a": CLOSED}, "$defs": {"D": CLOSED}, "additionalProperties": False}),
        ({"type": "array", "items": X}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [X, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"properties": {"properties": X}},
         {"properties": {"properties": CLOSED}, "additionalProperties": False}),
    ],
)  # fmt: skip
def test_object_is_closed_wherever_it_is(schema: Any, meant: Any) -> None:
    assert closed(schema) == meant


@pytest.mark.parametrize(
    "schema",
    [
        X | {"additionalProperties": True},
        X | {"additionalProperties": {"type": "string"}},
        X | {"patternProperties": {"^y": {}}},
        {"allOf": [X, {"properties": {"y": {}}}]},
        {"type": "object"},
        {"enum": [X]},
        {"const": X},
        True,
    ],
)
def test_what_says_more_or_is_no_object_stays(schema: Any) -> None:
    assert closed(schema) == schema
