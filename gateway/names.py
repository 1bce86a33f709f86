"""Which model a name means: a model's own, an alias, a preset or an adapter (`x:high`), or one of
another API.

Ollama's clients write `x:latest` for `x`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

LATEST = "latest"
"""The tag that Ollama adds to a name without one."""


class Meant(NamedTuple):
    """What a name means.

    Attributes:
        model: the name that the daemon knows, which may end in that of an adapter.
        preset: parameters for what the request leaves out.
    """

    model: str
    preset: Mapping[str, Any] = {}


def look_up(status: Mapping[str, Any], name: str) -> Meant | None:
    """Return what a name means among the models of a status."""
    row = row_of(status, name)
    base, _, variant = name.rpartition(":")
    if row is not None:
        is_adapter = row is row_of(status, base)
        return Meant(f"{row['name']}:{variant}" if is_adapter else row["name"])
    row = row_of(status, base)
    if row is None or variant not in (LATEST, *row["presets"]):
        return None
    return Meant(row["name"], row["presets"].get(variant, {}))


def names_of(row: Mapping[str, Any]) -> list[str]:
    """Return the name of a model, and those of it with each of its presets and adapters."""
    name = row["name"]
    return [name, *(f"{name}:{variant}" for variant in (*row["presets"], *row["adapters"]))]


def row_of(status: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Return the model with this name or alias, behind which one of its adapters may stand."""
    rows: list[Mapping[str, Any]] = status["models"]
    named = next((row for row in rows if row["name"] == name), None)
    found = named or next((row for row in rows if name in row["aliases"]), None)
    if found is not None or ":" not in name:
        return found
    base, _, adapter = name.rpartition(":")
    found = row_of(status, base)
    return found if found is not None and adapter in found["adapters"] else None
