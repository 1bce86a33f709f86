"""The lines of a configuration file: where each key stands, and how an entry is written.

`tomllib` reads values and forgets lines.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

Place = tuple[str, ...]
"""The keys that lead to a value."""

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MODEL_NAME_EXPECTED = "1 to 64 of the characters A-Z a-z 0-9 . _ -, the first a letter or digit"

_TABLE = re.compile(r"^\s*\[\[?([^\[\]]+)\]\]?\s*(?:#.*)?$")
_KEY_PART = re.compile(r"""\s*(?:"((?:[^"\\]|\\.)*)"|'([^']*)'|([A-Za-z0-9_-]+))\s*""")
_INLINE_KEY = re.compile(r"""[{,]\s*((?:"[^"]*"|'[^']*'|[A-Za-z0-9_.-]+)(?:\s*\.[^={,]*)?)\s*=""")

_QUOTES = ('"', "'")
_DEEPER = {"[": 1, "{": 1, "]": -1, "}": -1}


class LineIndex:
    """The lines of the tables and keys of a file that `tomllib` has accepted.

    A value that spans lines (an array, a string in triple quotes) is skipped, so that nothing
    inside it is mistaken for a key.
    """

    def __init__(self, text: str) -> None:
        self._lines: dict[Place, int] = {}
        self._table: Place = ()
        self._open_quotes = ""
        self._depth = 0
        for number, line in enumerate(text.splitlines(), start=1):
            self._read(line, number)

    def find(self, path: Place) -> int:
        """Return the line of the key, or of the nearest table around it; 1 if there is neither."""
        while path:
            if path in self._lines:
                return self._lines[path]
            path = path[:-1]
        return 1

    def _read(self, line: str, number: int) -> None:
        if self._open_quotes or self._depth:
            self._pass_over(line)
            return
        table = _TABLE.match(line)
        parts, rest = _split_key(table.group(1) if table else line)
        if not parts:
            return
        if table:
            self._table = parts
            self._note(parts, number)
            return
        if not rest.startswith("="):
            return
        path = self._table + parts
        self._note(path, number)
        value = rest[1:]
        if value.lstrip().startswith("{"):
            for match in _INLINE_KEY.finditer(value):
                inner, _ = _split_key(match.group(1))
                self._note(path + inner, number)
        self._pass_over(value)

    def _note(self, path: Place, number: int) -> None:
        for length in range(1, len(path)):
            self._lines.setdefault(path[:length], number)
        self._lines[path] = number

    def _pass_over(self, text: str) -> None:
        """Follow quotes, brackets and comments to the end of the line."""
        position = 0
        while position < len(text):
            if self._open_quotes:
                end = _closing(text, position, self._open_quotes)
                if end is None:
                    break
                self._open_quotes = ""
                position = end
                continue
            character = text[position]
            if character == "#":
                break
            if character in _QUOTES:
                triple = character * 3
                self._open_quotes = triple if text.startswith(triple, position) else character
                position += len(self._open_quotes)
                continue
            self._depth += _DEEPER.get(character, 0)
            position += 1


def _closing(text: str, position: int, quotes: str) -> int | None:
    """Return the position after the closing quotes; None if the text does not have them."""
    while position < len(text):
        if text[position] == "\\" and quotes[0] == '"':
            position += 2
        elif text.startswith(quotes, position):
            return position + len(quotes)
        else:
            position += 1
    return None


def _split_key(text: str) -> tuple[Place, str]:
    """Return the parts of a dotted key at the start of the text, and what follows it."""
    parts: list[str] = []
    position = 0
    while match := _KEY_PART.match(text, position):
        parts.append(next(group for group in match.groups() if group is not None))
        position = match.end()
        if not text.startswith(".", position):
            break
        position += 1
    return tuple(parts), text[position:]


def source_line(source: Path | str) -> str:
    """Return the line of an entry that says where the model is: a folder, or a repository."""
    if isinstance(source, Path):
        return f"path = {quoted(str(source))}"
    return f"repo = {quoted(source)}"


def table_key(name: str) -> str:
    """Return a model's name as the heading of its table takes it."""
    return name if MODEL_NAME.fullmatch(name) and "." not in name else quoted(name)


def quoted(text: str) -> str:
    """Return a basic string of TOML, in which only ASCII is left unescaped.

    TOML has the escapes of JSON, but none of pairs of surrogates.
    """
    signs = (json.dumps(c)[1:-1] if ord(c) < 0x10000 else f"\\U{ord(c):08X}" for c in text)
    return f'"{"".join(signs)}"'
