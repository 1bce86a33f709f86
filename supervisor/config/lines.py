"""The lines of a configuration file: where each key stands, and how an entry is written.

`tomllib` reads values and forgets lines.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

Place = tuple[str, ...]
"""The keys that lead to a value."""

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MODEL_NAME_EXPECTED = "1 to 64 of the characters A-Z a-z 0-9 . _ -, the first a letter or digit"

_TOKEN = re.compile(
    r'"{3}(?:\\.|[^\\])*?"{3,5}|'
    r"'{3}.*?'{3,5}|"  # over several lines
    r'"(?:\\.|[^"\\\n])*"|'
    r"'[^'\n]*'|"
    r"#[^\n]*|[A-Za-z0-9_-]+|[\[\]{}=,.\n]",
    re.DOTALL,
)
"""Texts, comments, words and signs."""


class LineIndex:
    """The lines of the tables and keys of a file that `tomllib` has accepted.

    Tables in an array share their places; those of the last one, or the array itself, are found.

    Attributes:
        tables: of each heading the table, its line, and the last line of what is in it; comments
            below that are about what follows.
    """

    def __init__(self, text: str) -> None:
        self._lines: dict[Place, int] = {}
        self.tables: list[tuple[Place, int, int]] = []
        table: Place = ()  # that of the latest heading
        place: Place = ()  # that of the value that is read
        around: list[tuple[str, Place]] = []  # the open brackets of that value
        parts: list[str] = []  # of the key or heading that is read
        is_key = True  # whether the next word is one of them
        line = 1
        is_filled = False  # whether something but a comment stands in this line
        for token in _TOKEN.findall(f"{text}\n"):
            if token == "\n" and is_filled and self.tables:
                self.tables[-1] = (*self.tables[-1][:2], line)
            is_filled = token != "\n" and (is_filled or token[0] != "#")
            if token == "\n" and not around:
                parts, is_key = [], True
            elif token in "[{" and (around or not is_key):
                around.append((token, place))
                parts, is_key = [], token == "{"
            elif token in "]}" and around:
                _, place = around.pop()
                is_key = False
            elif token == "]" and parts:
                table = tuple(parts)
                self._note(table, line)
                self.tables.append((table, line, line))
                parts, is_key = [], False
            elif token == "," and around:
                parts, is_key = [], around[-1][0] == "{"
            elif token == "=" and is_key:
                place = (*(around[-1][1] if around else table), *parts)
                self._note(place, line)
                is_key = False
            elif is_key and token[0] not in "[].#\n":
                parts.append(_unquoted(token))
            line += token.count("\n")

    def __contains__(self, path: Place) -> bool:
        """True if the file has this table or key."""
        return path in self._lines

    def find(self, path: Place) -> int:
        """Return the line of the key, or of the nearest table around it; 1 if there is neither."""
        while path:
            if path in self._lines:
                return self._lines[path]
            path = path[:-1]
        return 1

    def _note(self, path: Place, line: int) -> None:
        for length in range(1, len(path)):
            self._lines.setdefault(path[:length], line)
        self._lines[path] = line


def _unquoted(part: str) -> str:
    """Return a part of a key without its quotes and escapes."""
    if part[0] == '"' and "\\" in part:
        return next(iter(tomllib.loads(f"{part} = 0")))
    return part[1:-1] if part[0] in "\"'" else part


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
