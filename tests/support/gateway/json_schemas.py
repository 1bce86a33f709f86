"""The shapes of what commands print with `--json`: json_schemas.json next to this file.

A shape is `"string"`, `"integer|null"`, `"'ok'|'problem'"` (these words), a number or a boolean
(exactly that), a list with the shape of its items, `"@model"` (the shape of that name), or a map
from keys to shapes. A key with `?` may be missing, `*` stands for all other keys, and `...` takes
over the keys of another shape. A key that a map does not mention is a problem.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Shape = Any

SHAPES: Mapping[str, Shape] = json.loads(Path(__file__).with_suffix(".json").read_text())
"""One for each command, `error` for any that failed, and those with `@` that several share."""

TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "any": (object,),
}


def problems(line: str, path: Sequence[str], *, is_error: bool = False) -> list[str]:
    """Return what is wrong with a line of output of a command, or with the error it prints."""
    shape = SHAPES["error" if is_error else "-".join(path)]
    return list(_problems(json.loads(line), shape, "$"))


def _problems(value: object, shape: Shape, place: str) -> Iterator[str]:
    if isinstance(shape, str):
        yield from _of_words(value, shape, place)
    elif isinstance(shape, int):
        if value != shape or type(value) is not type(shape):
            yield f"{place} is {value!r}, not {shape!r}"
    elif not isinstance(value, type(shape)):
        yield f"{place} is {value!r}, no {'array' if isinstance(shape, list) else 'object'}"
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _problems(item, shape[0], f"{place}[{number}]")
    elif isinstance(value, dict):
        yield from _of_keys(value, shape, place)


def _of_words(value: object, words: str, place: str) -> Iterator[str]:
    found = []
    for word in words.split("|"):
        if word.startswith("@"):
            found.append(list(_problems(value, SHAPES[word], place)))
        elif (value != word[1:-1]) if word.startswith("'") else not _is_a(value, TYPES[word]):
            found.append([f"{place} is {value!r}, no {words}"])
        else:
            return
    if all(found):
        yield from min(found, key=lambda one: min(len(text) for text in one))


def _of_keys(value: Mapping[str, Any], shape: Mapping[str, Shape], place: str) -> Iterator[str]:
    keys = {**SHAPES[shape["..."]], **shape} if "..." in shape else dict(shape)
    others = keys.pop("*", None)
    keys.pop("...", None)
    for name, one in keys.items():
        if name.removesuffix("?") in value:
            yield from _problems(value[name.removesuffix("?")], one, f"{place}.{name}")
        elif not name.endswith("?"):
            yield f"{place}.{name} is missing"
    for name in value.keys() - {name.removesuffix("?") for name in keys}:
        if others is None:
            yield f"{place}.{name} is not mentioned"
        else:
            yield from _problems(value[name], others, f"{place}.{name}")


def _is_a(value: object, types: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in types or object in types
    return isinstance(value, types)
