"""The JSON Schema of the configuration, next to a file that is written, for editors."""

from __future__ import annotations

import os
from pathlib import Path

SCHEMA_NAME = "mlxsup.schema.json"
SCHEMA_LINE = f"#:schema {SCHEMA_NAME}"
"""The first line of a configuration: relative to the file, as editors take it."""


def schema_text() -> str:
    """The schema, without a line break at its end.

    It is generated ahead of time: generating takes longer than a command may take to begin.
    """
    return Path(__file__).with_name(SCHEMA_NAME).read_text(encoding="utf-8").removesuffix("\n")


def write_schema_next_to(config: Path) -> None:
    """Writes the schema that the first line of a configuration names; an older one is replaced.

    Args:
        config: the file, in a folder that exists.

    Raises:
        OSError: it cannot be written.
    """
    path = config.with_name(SCHEMA_NAME)
    partial = path.with_name(f".{SCHEMA_NAME}.{os.getpid()}")
    try:
        partial.write_text(schema_text() + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
