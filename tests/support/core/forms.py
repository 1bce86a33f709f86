"""Forms of answers for tests, and whether a text is of one."""

from __future__ import annotations

import json
import re
from typing import Any


def of_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "is_member": {"type": "boolean"},
        },
        "required": ["name", "age", "is_member"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {
            "tags": {
                "type": "array",
                "items": {"enum": ["red", "green", "blau🦊"]},
                "minItems": 1,
                "maxItems": 3,
            },
            "at": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 9}},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
        "required": ["tags", "at"],
        "additionalProperties": False,
    },
    "choice": {"enum": ["yes", "no", None, 3]},
}


def check(name: str, text: str) -> None:
    """Whether a text is of a schema, without another library: these three are simple."""
    value = json.loads(text)
    outside = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
    assert not re.search(r"\s", outside), "optional whitespace"
    if name == "flat":
        assert set(value) == {"name", "age", "is_member"}
        assert isinstance(value["name"], str)
        assert len(value["name"]) <= 8
        assert type(value["age"]) is int
        assert 0 <= value["age"] <= 120
        assert isinstance(value["is_member"], bool)
    elif name == "nested":
        assert set(value) == {"tags", "at"}
        assert 1 <= len(value["tags"]) <= 3
        assert set(value["tags"]) <= {"red", "green", "blau🦊"}
        assert -9 <= value["at"]["x"] <= 9
    else:
        assert value in ("yes", "no", None, 3)
