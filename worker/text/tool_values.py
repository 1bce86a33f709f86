"""The value of an argument that a model wrote as plain text, by the function's schema."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from typing import Any

DEPTH = 16
"""References and unions are followed this deep."""

_TYPES = {
    bool: "boolean", int: "integer", float: "number", str: "string",
    list: "array", dict: "object", type(None): "null",
}  # fmt: skip
_STRINGS = ("str", "text", "varchar", "char", "enum", "date", "datetime")
"""Types that are no types of JSON Schema, as some servers of tools write them."""

_INTEGER = re.compile(r"[+-]?\d+")
MOST_DIGITS = 400
"""An integer of more is text: no reader takes it, and Python takes long to read it."""


def _real(text: str) -> float | str:
    number = float(text)
    return number if math.isfinite(number) else text


def _integer(text: str) -> int | str:
    return int(text) if len(text) <= MOST_DIGITS else text


JSON_VALUES = json.JSONDecoder(strict=False, parse_float=_real, parse_int=_integer)
"""Reads JSON as models write it: with line breaks in strings. A number that is too large to be
passed on stays text, so that a call with it remains a call."""


def value_of(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the value that the text stands for.

    A string stays as it is written if the schema allows one. Text that is of none of the allowed
    types stays text, so that the tool can say what is wrong with it.

    Args:
        text: between the tags.
        schema: of the argument; anything but a map means that there is none.
        root: the function's parameters, in which references are looked up.
    """
    types = types_of(schema, root)
    if "string" in types:
        return text
    word = text.strip()
    if not types:
        value = _from_json(word)
        is_text = isinstance(value, str) or (value is None and word != "null")
        return text if is_text else value
    if "null" in types and word in ("null", "None"):
        return None
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower() == "true"
    if types & {"integer", "number"} and (number := _number(word, "number" in types)) is not None:
        return number
    for name, kind in (("object", dict), ("array", list)):
        if name in types and isinstance(value := _from_text(word), kind):
            return value
    return text


def types_of(schema: Any, root: Mapping[str, Any], depth: int = DEPTH) -> frozenset[str]:
    """Return the JSON types that a schema allows; none if it does not say."""
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    found: set[str] = set()
    declared = schema.get("type")
    for name in declared if isinstance(declared, list) else [declared]:
        if isinstance(name, str):
            found.add("string" if name.lower() in _STRINGS else _json_type(name.lower()))
    if not found:
        allowed = [*_listed(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
        found |= {_TYPES[type(value)] for value in allowed if type(value) in _TYPES}
    if not found:
        inner = [one for key in ("anyOf", "oneOf", "allOf") for one in _listed(schema.get(key))]
        if isinstance(reference := schema.get("$ref"), str):
            inner.append(_referred(reference, root))
        for one in inner:
            found |= types_of(one, root, depth - 1)
    return frozenset(found)


def in_order(value: Any, schema: Any, root: Any = None) -> Any:
    """Return a value with the keys of its maps in the order in which the schema has them, those
    that it does not name behind them: to JSON Schema all orders are the same, to grammars not.

    Args:
        value: of JSON.
        schema: of the value.
        root: the schema in which references are looked up; None: the value's own.
    """
    root = schema if root is None else root
    parts = _parts_of(schema, root)
    if isinstance(value, list):
        inner = {"allOf": [part["items"] for part in parts if "items" in part]}
        return [in_order(one, inner, root) for one in value]
    if not isinstance(value, dict):
        return value
    known: dict[str, list[Any]] = {}
    for part in parts:
        if isinstance(properties := part.get("properties"), Mapping):
            for key, one in properties.items():
                known.setdefault(key, []).append(one)
    keys = [*(key for key in known if key in value), *(key for key in value if key not in known)]
    return {key: in_order(value[key], {"allOf": known.get(key, [])}, root) for key in keys}


def _parts_of(schema: Any, root: Any) -> list[Mapping[str, Any]]:
    """Return a schema with those that it refers to, and of which it is put together."""
    parts: dict[int, Mapping[str, Any]] = {}
    left = [schema]
    while left:
        part = left.pop(0)
        if not isinstance(part, Mapping) or id(part) in parts:
            continue
        parts[id(part)] = part
        left += [one for key in ("anyOf", "oneOf", "allOf") for one in _listed(part.get(key))]
        if isinstance(reference := part.get("$ref"), str):
            left.append(_referred(reference, root))
    return list(parts.values())


def _json_type(name: str) -> str:
    """Return JSON's name for a type as other languages call it."""
    for prefix, known in (
        ("int", "integer"), ("uint", "integer"), ("long", "integer"), ("float", "number"),
        ("double", "number"), ("num", "number"), ("bool", "boolean"), ("dict", "object"),
        ("list", "array"), ("arr", "array"), ("obj", "object"), ("none", "null"),
    ):  # fmt: skip
        if name.startswith(prefix):
            return known
    return name


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the part of the schema that `#/$defs/NAME` names; None if there is none."""
    value: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(word: str, may_be_broken: bool) -> int | float | None:
    if _INTEGER.fullmatch(word):
        return int(word) if len(word) <= MOST_DIGITS else None
    try:
        number = float(word)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    if number == int(number) and not may_be_broken:
        return int(number)
    return number if may_be_broken else None


def _from_json(word: str) -> Any:
    try:
        return JSON_VALUES.decode(word)
    except (ValueError, RecursionError):
        return None


def _from_text(word: str) -> Any:
    """Return a map or a list from JSON or from Python's form of it; None if it is neither."""
    value = _from_json(word)
    if value is not None:
        return value
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
