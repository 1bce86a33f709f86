"""Models in a status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def row_called(status: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return the row of the model with this name or alias; None if there is none."""
    rows: list[dict[str, Any]] = status["models"]
    named = next((row for row in rows if row["name"] == name), None)
    return named or next((row for row in rows if name in row.get("aliases", ())), None)
