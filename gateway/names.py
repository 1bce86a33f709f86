"""Which model a name means: a model's own, an alias, a preset or an adapter (`x:high`), or one of
another API.

Ollama's clients write `x:latest` for `x`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    return _look_up(status, name) or _look_up(status, name.removesuffix(f":{LATEST}"))


def _look_up(status: Mapping[str, Any], name: str) -> Meant | None:
    base, _, variant = name.rpartition(":")
    owner = _named(status["models"], base)
    row = row_of(status, name)
    if row is not None:
        return Meant(f"{row['name']}:{variant}" if row is owner else row["name"])
    if owner is None or variant not in owner["presets"]:
        return None
    return Meant(owner["name"], owner["presets"][variant])


def names_of(row: Mapping[str, Any]) -> list[str]:
    """Return the name of a model, and those of it with each of its presets and adapters."""
    name = row["name"]
    return [name, *(f"{name}:{variant}" for variant in (*row["presets"], *row["adapters"]))]


def row_of(status: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Return the model with this name or alias, behind which one of its adapters may stand."""
    rows: list[Mapping[str, Any]] = status["models"]
    base, _, adapter = name.rpartition(":")
    found = _named(rows, name)
    if found is not None:
        return found
    found = _named(rows, base)
    return found if found is not None and adapter in found["adapters"] else None


def _named(rows: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any] | None:
    return next((row for row in rows if name == row["name"] or name in row["aliases"]), None)
