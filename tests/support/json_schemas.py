"""The schemas of docs/schemas, and what of an output they do not allow or do not mention.

Reads the few keywords of JSON Schema that those files use, and refuses a file with any other. A
published schema lets keys be added, as a reader must; here a key that it does not mention is a
problem, because then the schema is incomplete.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs" / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
SHARED = ("model", "error")
"""Schemas of no command: what several of them print."""

KEYWORDS = {
    "$schema", "$ref", "title", "description", "type", "required", "properties",
    "additionalProperties", "items", "enum", "const", "anyOf",
}  # fmt: skip

TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def schema_of(path: Sequence[str]) -> dict[str, Any]:
    """The schema of what a command prints with `--json`; `path` is the command's words."""
    return read("-".join(path))


def read(name: str) -> dict[str, Any]:
    """A file of the folder, without `.json`."""
    schema: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return schema


def problems(line: str, path: Sequence[str], *, is_error: bool = False) -> list[str]:
    """What is wrong with a line of a command's output; `is_error`: the command has failed."""
    schema = read("error") if is_error else schema_of(path)
    return list(_problems(json.loads(line), schema, "$"))


def unknown_keywords(schema: object) -> set[str]:
    """Keywords that this reader would ignore."""
    if isinstance(schema, list):
        return set().union(*map(unknown_keywords, schema))
    if not isinstance(schema, dict):
        return set()
    found = set(schema) - KEYWORDS
    for name in ("additionalProperties", "items", "anyOf"):
        found |= unknown_keywords(schema.get(name))
    for below in schema.get("properties", {}).values():
        found |= unknown_keywords(below)
    return found


def _problems(value: object, schema: Mapping[str, Any], place: str) -> Iterator[str]:
    if "$ref" in schema:
        schema = {**read(schema["$ref"].removesuffix(".json")), **schema}
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
