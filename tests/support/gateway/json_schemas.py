"""The output of each command with `--json`, as JSON Schemas: json_schemas.json beside this file.

Reads the few keywords of JSON Schema that the file uses. A key that a schema does not mention is a
problem.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SCHEMAS: Mapping[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("json_schemas.json").read_text()
)
"""One for each command, and `model` and `error`, which several commands print."""

TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def problems(line: str, path: Sequence[str], *, is_error: bool = False) -> list[str]:
    """Return the problems of a line of a command's output; `is_error`: the command has failed."""
    schema = SCHEMAS["error" if is_error else "-".join(path)]
    return list(_problems(json.loads(line), schema, "$"))


def _problems(value: object, schema: Mapping[str, Any], place: str) -> Iterator[str]:
    if "$ref" in schema:
        schema = {**SCHEMAS[schema["$ref"]], **schema}
    if "anyOf" in schema:
        found = [list(_problems(value, one, place)) for one in schema["anyOf"]]
        if all(found):
            yield from min(found, key=lambda one: min(len(text) for text in one))
        return
    if "const" in schema and value != schema["const"]:
        yield f"{place} is {value!r}, not {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place} is {value!r}, none of {schema['enum']}"
    if "type" in schema and not _is_a(value, schema["type"]):
        yield f"{place} is {value!r}, no {schema['type']}"
    elif isinstance(value, dict):
        yield from _problems_of_object(value, schema, place)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _problems(item, schema.get("items", {}), f"{place}[{number}]")


def _problems_of_object(
    value: Mapping[str, Any], schema: Mapping[str, Any], place: str
) -> Iterator[str]:
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{place}.{name} is missing"
    properties = schema.get("properties")
    others = schema.get("additionalProperties", properties is None)
    for name, item in value.items():
        if properties is not None and name in properties:
            yield from _problems(item, properties[name], f"{place}.{name}")
        elif isinstance(others, dict):
            yield from _problems(item, others, f"{place}.{name}")
        elif not others:
            yield f"{place}.{name} is not mentioned"


def _is_a(value: object, names: str | list[str]) -> bool:
    allowed = [names] if isinstance(names, str) else names
    if isinstance(value, bool):
        return "boolean" in allowed
    return any(isinstance(value, TYPES[name]) for name in allowed)
