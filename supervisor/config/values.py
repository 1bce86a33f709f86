"""The kinds of values that keys take: how people write them, and what an error says of them.

Each kind has a JSON schema, which editors get as well, so that no limit is written twice. It is
checked here, by the few words of JSON Schema that kinds use: commands that read the file would
wait longer for pydantic than for everything else.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from mlxsup.protocol.launch import MOST_DECODE_SHARE
from mlxsup.protocol.text import DURATION_PATTERN, parse_duration
from mlxsup.store.hub_cache import (
    REPOSITORY_EXPECTED,
    REVISION_EXPECTED,
    check_repository,
    check_revision,
)

MAX_DURATION_S = 1e9
MAX_WARM_WORKERS = 16

_DURATION = 'seconds as a number, or text such as "90s", "5m" or "1h"'
_SIZE = 'bytes as an integer, or text such as "256MiB"'

_SIZE_PATTERN = r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB)"
_HOST = r"([A-Za-z0-9_][A-Za-z0-9._-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\])"
_BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_seconds(text: str) -> float:
    """Return the seconds of a text such as `90s`, at most `MAX_DURATION_S`.

    Raises:
        ValueError: it is no duration.
    """
    return min(parse_duration(text), MAX_DURATION_S)


def parse_size(text: str) -> int:
    """Return the bytes of a text such as `256MiB`.

    Raises:
        ValueError: it is no size, or 64 bits do not hold it.
    """
    match = re.fullmatch(_SIZE_PATTERN, text.strip())
    if match and (size_bytes := float(match.group(1)) * _BYTES[match.group(2)]) < 2**63:
        return int(size_bytes)
    raise ValueError(text)


class Kind:
    """A kind of value; nothing but text is converted.

    Args:
        takes: what an error says was expected.
        schema: what the value must be once text is converted.
        parse: converts text, or raises ValueError.
        pattern: of the text that `parse` makes a number of.
        words: stand for values that need not fit the schema.
    """

    def __init__(
        self,
        takes: str,
        schema: Mapping[str, Any],
        parse: Callable[[str], Any] | None = None,
        *,
        pattern: str = "",
        words: Mapping[str, int | None] | None = None,
    ) -> None:
        self.takes = takes
        self.schema = schema
        self._parse = parse
        self.pattern = pattern
        self.words = words or {}

    def read(self, value: Any) -> Any:
        """Return what a value of the file means.

        Raises:
            ValueError: it is of another kind.
        """
        if isinstance(value, str):
            if value in self.words:
                return self.words[value]
            if self._parse is not None:
                value = self._parse(value)
        if not _fits(value, self.schema):
            raise ValueError(value)
        return float(value) if self.schema["type"] == "number" else value

    def takes_value(self, value: object) -> bool:
        """True if `read` takes it."""
        try:
            self.read(value)
        except ValueError:
            return False
        return True

    def or_word(self, word: str, meant: int | None, takes: str) -> Kind:
        """Return the kind that takes a word as well."""
        words = {word: meant, **self.words}
        return Kind(takes, self.schema, self._parse, pattern=self.pattern, words=words)


_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "object": (dict,),
}


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """True if a value is what a schema says."""
    if type(value) not in _TYPES[schema["type"]]:  # a bool is an int, but not for people
        return False
    if isinstance(value, str):
        is_long = len(value) >= schema.get("minLength", 0)
        is_word = value in schema.get("enum", (value,))
        return is_long and is_word and bool(re.fullmatch(schema.get("pattern", "(?s:.*)"), value))
    if isinstance(value, dict):
        return _is_json(value)
    low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    return bool(schema.get("exclusiveMinimum", -math.inf) < value and low <= value <= high)


def _is_json(table: dict[str, Any]) -> bool:
    """True if a table fits into JSON, which the launch contract uses: TOML also has dates."""
    try:
        json.dumps(table)
    except TypeError:
        return False
    return True


def number(kind: type[float], takes: str, **limits: float | None) -> Kind:
    """Return the kind of numbers within limits, which are called as a schema calls them."""
    name = "integer" if kind is int else "number"
    return Kind(takes, {"type": name} | {k: v for k, v in limits.items() if v is not None})


def text(takes: str, pattern: str | None = None) -> Kind:
    """Return the kind of texts that fit a pattern."""
    return Kind(takes, {"type": "string"} | ({} if pattern is None else {"pattern": pattern}))


def choice(*words: str) -> Kind:
    """Return the kind of a few words; an error does not name the empty one."""
    *others, last = (f'"{word}"' for word in words if word)
    return Kind(f"{', '.join(others)} or {last}", {"type": "string", "enum": [*words]})


def _duration(takes: str, **limit: float) -> Kind:
    schema = {"type": "number", **limit, "maximum": MAX_DURATION_S}
    return Kind(takes, schema, parse_seconds, pattern=DURATION_PATTERN)


def _size(least: int) -> Kind:
    schema = {"type": "integer", "minimum": least}
    return Kind(_SIZE, schema, parse_size, pattern=_SIZE_PATTERN)


DURATION = _duration(_DURATION, minimum=0)
DURATION_ABOVE_ZERO = _duration(f"{_DURATION}, above 0", exclusiveMinimum=0)
SIZE_ABOVE_ZERO = _size(1)
SIZE_OR_AUTO = _size(0).or_word("auto", None, f'"auto", or {_SIZE}')
SIZE_ABOVE_ZERO_OR_AUTO = _size(1).or_word("auto", None, f'"auto", or {_SIZE}, above 0')
SIZE_AUTO_OR_OFF = SIZE_OR_AUTO.or_word("off", 0, f'"off", "auto", or {_SIZE}')
COUNT = number(int, "an integer of 0 or more", minimum=0)
COUNT_FROM_ONE = number(int, "an integer of 1 or more", minimum=1)
COUNT_OR_AUTO = COUNT_FROM_ONE.or_word("auto", None, '"auto", or an integer of 1 or more')
WARM_WORKERS = number(int, "", minimum=0, maximum=MAX_WARM_WORKERS).or_word(
    "auto", None, f'"auto", or an integer from 0 to {MAX_WARM_WORKERS}'
)
DECODE_SHARE = number(
    float, f"a number from 0 to {MOST_DECODE_SHARE}", minimum=0, maximum=MOST_DECODE_SHARE
)
FLAG = Kind("true or false", {"type": "boolean"})
FOLDER = Kind("a folder", {"type": "string", "minLength": 1, "pattern": r"^[^\x00]*$"})
"""No system call takes a path with a NUL in it."""
DRAFTS = text(
    '"off", "ngram" or the folder of a draft model, with a slash such as "./draft"',
    r"^(off|ngram|[^\x00]*/[^\x00]*)$",
)
REPOSITORY = Kind(REPOSITORY_EXPECTED, {"type": "string"}, check_repository)
REVISION = Kind(REVISION_EXPECTED, {"type": "string"}, check_revision)
JSON_TABLE = Kind(
    "a table of texts, numbers, truth values and tables, without dates",
    {"type": "object", "additionalProperties": True},
)
ALIAS = text("a name", r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")
HOST = text("a name", f"^{_HOST}$")
ORIGIN = text("a scheme and a name", rf"^[A-Za-z][A-Za-z0-9+.-]{{0,31}}://{_HOST}(:[0-9]{{1,5}})?$")
CLASS = choice("interactive", "normal", "batch")
