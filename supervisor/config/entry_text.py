"""The text of a model's entry: its heading, and the line that says where the model is."""

from __future__ import annotations

import json
import re
from pathlib import Path

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MODEL_NAME_EXPECTED = "1 to 64 of the characters A-Z a-z 0-9 . _ -, the first a letter or digit"


def source_line(source: Path | str) -> str:
    """The line of an entry that says where the model is: a folder, or a repository."""
    if isinstance(source, Path):
        return f"path = {quoted(str(source))}"
    return f"repo = {quoted(source)}"


def table_key(name: str) -> str:
    """A model's name as the heading of its table takes it."""
    return name if MODEL_NAME.fullmatch(name) and "." not in name else quoted(name)


def quoted(text: str) -> str:
    """Return a basic string of TOML, in which only ASCII is left unescaped.

    TOML has the escapes of JSON, but none of pairs of surrogates.
    """
    signs = (json.dumps(c)[1:-1] if ord(c) < 0x10000 else f"\\U{ord(c):08X}" for c in text)
    return f'"{"".join(signs)}"'
