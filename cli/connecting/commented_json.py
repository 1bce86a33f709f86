"""Changes single values in a JSON file that people write: with comments, trailing commas and an
indentation that stay as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_BLANK = re.compile(r"(?:[\s\ufeff]|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_PLAIN = re.compile(r"[^\s,\]}/]+")

DEFAULT_INDENT = 2


@dataclass(frozen=True, slots=True)
class Named:
    """The object of a list that has this under `name`."""

    name: str


Step = str | Named
"""From a value to one within it: a key, or an object of a list."""


class NotJson(ValueError):
    """The text is not JSON, even with comments; the message says where."""


class NotThere(ValueError):
    """A value on the way is of another type; the message names it."""


@dataclass(slots=True, kw_only=True)
class _Node:
    """A value in the text, from `start` to `end`.

    Attributes:
        value: what it means.
        parts: of an object its members by key, the last of equal ones; of a list its items.
        last_end: where its last part ends; None if it has none.
        has_comma: whether a comma follows that part.
    """

    start: int
    end: int = 0
    value: Any = None
    parts: dict[Any, _Node] = field(default_factory=dict)
    last_end: int | None = None
    has_comma: bool = False


def value_of(text: str) -> Any:
    """What the text means.

    Raises:
        NotJson: it means nothing.
    """
    return _parse(text).value


def with_value(text: str, path: Sequence[Step], value: Any) -> str:
    """The text with this value at the path; objects on the way are made if they are missing.

    Args:
        text: of the file; empty if there is none.
        path: from the outermost value.
        value: as JSON has it.

    Raises:
        NotJson: the text is no JSON.
        NotThere: the path leads through a value that is neither an object nor a list.
    """
    if not _BLANK.sub("", text):
        text += "[]\n" if isinstance(path[0], Named) else "{}\n"
    node = _parse(text)
    for depth, step in enumerate(path):
        wanted = list if isinstance(step, Named) else dict
        if not isinstance(node.value, wanted):
            where = ".".join(str(one) for one in path[:depth]) or "the whole file"
            kind = "a list" if wanted is list else "an object"
            raise NotThere(f"{where} is not {kind}")
        inner = _find(node, step)
        if inner is None:
            return _insert(text, node, step, _within(path[depth + 1 :], value))
        node = inner
    rendered = _render(value, _indent_at(text, node.start), _unit(text))
    return text[: node.start] + rendered + text[node.end :]


def _find(node: _Node, step: Step) -> _Node | None:
    if isinstance(step, str):
        return node.parts.get(step)
    found = [
        part
        for part in node.parts.values()
        if isinstance(part.value, dict) and part.value.get("name") == step.name
    ]
    return found[0] if found else None


def _within(path: Sequence[Step], value: Any) -> Any:
    """The value, in the objects that the rest of a path names."""
    for step in reversed(path):
        value = [value] if isinstance(step, Named) else {step: value}
    return value


def _insert(text: str, node: _Node, step: Step, value: Any) -> str:
    """The text with a new part at the end of an object or a list."""
    unit = _unit(text)
    outer = _indent_at(text, node.start)
    indent = outer + unit
    if node.parts:
        indent = _indent_at(text, next(iter(node.parts.values())).start)
    key = f"{json.dumps(step, ensure_ascii=False)}: " if isinstance(step, str) else ""
    new = f"\n{indent}{key}{_render(value, indent, unit)}"
    close = node.end - 1
    body = text[:close].rstrip()
    if node.last_end is None:
        return f"{body}{new}\n{outer}{text[close:]}"
    comma = "" if node.has_comma else ","
    head = text[: node.last_end] + comma + body[node.last_end :]
    return f"{head}{new}\n{outer}{text[close:]}"


def _render(value: Any, indent: str, unit: str) -> str:
    lines = json.dumps(value, indent=unit, ensure_ascii=False).split("\n")
    return f"\n{indent}".join(lines)


def _indent_at(text: str, place: int) -> str:
    """The white space that begins the line of a place."""
    line = text[text.rfind("\n", 0, place) + 1 : place]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _unit(text: str) -> str:
    """The indentation of one level: that of the first line that has any."""
    found = re.search(r"^([ \t]+)\S", text, re.MULTILINE)
    return found.group(1) if found else " " * DEFAULT_INDENT


# ---------------------------------------------------------------- reading


def _parse(text: str) -> _Node:
    try:
        node = _value(text, _skip(text, 0))
    except RecursionError:
        raise NotJson("it is nested too deeply") from None
    end = _skip(text, node.end)
    if end != len(text):
        raise _error(text, end, "nothing should follow")
    return node


def _skip(text: str, place: int) -> int:
    """The next place that is neither blank nor a comment."""
    found = _BLANK.match(text, place)
    assert found is not None, "it matches nothing, too"
    return found.end()


def _value(text: str, place: int) -> _Node:
    match text[place : place + 1]:
        case "{":
            return _object(text, place)
        case "[":
            return _list(text, place)
        case '"':
            return _scalar(text, place, _STRING)
    return _scalar(text, place, _PLAIN)


def _scalar(text: str, place: int, pattern: re.Pattern[str]) -> _Node:
    found = pattern.match(text, place)
    if found is None:
        raise _error(text, place, "a value is missing or not closed")
    try:
        value = json.loads(found.group())
    except ValueError:
        raise _error(text, place, f"{found.group()[:40]} is no value") from None
    return _Node(start=place, end=found.end(), value=value)


def _object(text: str, place: int) -> _Node:
    node = _Node(start=place, value={})
    place = _skip(text, place + 1)
    while text[place : place + 1] != "}":
        key = _scalar(text, place, _STRING)
        place = _skip(text, key.end)
        if text[place : place + 1] != ":":
            raise _error(text, place, "a colon is missing")
        part = _value(text, _skip(text, place + 1))
        node.value[key.value] = part.value
        node.parts[key.value] = part
        place = _after(text, node, part, "}")
    node.end = place + 1
    return node


def _list(text: str, place: int) -> _Node:
    node = _Node(start=place, value=[])
    place = _skip(text, place + 1)
    while text[place : place + 1] != "]":
        part = _value(text, place)
        node.parts[len(node.value)] = part
        node.value.append(part.value)
        place = _after(text, node, part, "]")
    node.end = place + 1
    return node


def _after(text: str, node: _Node, part: _Node, close: str) -> int:
    """Where the next part begins, or the closing bracket is."""
    node.last_end = part.end
    place = _skip(text, part.end)
    node.has_comma = text[place : place + 1] == ","
    if node.has_comma:
        return _skip(text, place + 1)
    if text[place : place + 1] != close:
        raise _error(text, place, f"a comma or {close} is missing")
    return place


def _error(text: str, place: int, what: str) -> NotJson:
    line = text.count("\n", 0, place) + 1
    column = place - (text.rfind("\n", 0, place) + 1) + 1
    return NotJson(f"{what} (line {line}, column {column})")
