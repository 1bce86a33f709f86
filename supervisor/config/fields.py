"""How a key of a table is declared: its default, its limits, what is said about it."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from pydantic import Field

from .values import DURATION_EXPECTED


def default_of(settings: type, name: str) -> Any:
    """The default of a field in the core's settings, so that no number is written twice."""
    value = next(f.default for f in fields(settings) if f.name == name)
    assert value is not MISSING
    return value


def documented(text: str = "", unit: str = "") -> dict[str, Any]:
    """What a document adds: behind the sentence, and as the unit if neither the name nor the type
    of the key gives it."""
    return {"more": text, "unit": unit}


def duration(
    settings: type, name: str, title: str, *, is_zero_allowed: bool = True, more: str = ""
) -> Any:
    """A key that takes a duration, as the core's settings have it."""
    limit: dict[str, Any] = {"ge": 0} if is_zero_allowed else {"gt": 0}
    least = "" if is_zero_allowed else ", above 0"
    description = DURATION_EXPECTED + least
    limit["json_schema_extra"] = documented(more)
    return Field(default_of(settings, name), title=title, description=description, **limit)


def integer(
    settings: type,
    name: str,
    title: str,
    low: int,
    high: int | None = None,
    *,
    unit: str,
    more: str = "",
) -> Any:
    """A key that takes an integer, as the core's settings have it."""
    top = "" if high is None else f" to {high}"
    return Field(
        default_of(settings, name),
        ge=low,
        le=high,
        title=title,
        description=f"an integer from {low}{top}",
        json_schema_extra=documented(more, unit),
    )
