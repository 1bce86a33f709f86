"""Configuration files that commands write, each with its JSON Schema next to it, for editors."""

from __future__ import annotations

import os
from pathlib import Path

SCHEMA_NAME = "mlxsup.schema.json"
SCHEMA_LINE = f"#:schema {SCHEMA_NAME}"
"""The first line of a configuration: relative to the file, as editors take it."""


def schema_text() -> str:
    """Return the schema, without a line break at its end.

    It is generated ahead of time: generating takes longer than a command may take to begin.
    """
    return Path(__file__).with_name(SCHEMA_NAME).read_text(encoding="utf-8").removesuffix("\n")


def write_configuration(path: Path, text: str) -> None:
    """Write a new configuration, and the schema that its first line names; an older schema is
    replaced.

    Args:
        path: the file, in a folder that exists.
        text: what it says.

    Raises:
        FileExistsError: it exists.
        OSError: it or the schema cannot be written; no part of it is left.
    """
    schema = path.with_name(SCHEMA_NAME)
    partial = schema.with_name(f".{SCHEMA_NAME}.{os.getpid()}")
    file = path.open("x", encoding="utf-8")
    try:
        with file:
            file.write(text)
        partial.write_text(schema_text() + "\n", encoding="utf-8")
        partial.replace(schema)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        partial.unlink(missing_ok=True)
