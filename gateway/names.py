"""Which model a name means: a model's own, an alias, a preset or an adapter (`x:high`), or one of
another API.

Ollama's clients write `x:latest` for `x`.

A model's own names come first, so that `gpt-*` does not take away a model called `gpt-oss`.
Presets are known here only, because the core reads no parameters; `x:ADAPTER` it knows itself.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from .ask import Ask

LATEST = "latest"
"""The tag that Ollama adds to a name without one."""

FRESH_S = 1.0
"""How old the list of models may be; a changed configuration is in effect after this long."""

AnyAsk = TypeVar("AnyAsk", bound=Ask)


@dataclass(frozen=True, slots=True)
class Meant:
    """What a name means.

    Attributes:
        model: the name that the daemon knows, which may end in that of an adapter.
        preset: parameters for what the request leaves out.
        row: of the model, in the status; None if nobody has looked, or there is none.
    """

    model: str
    preset: Mapping[str, Any] = field(default_factory=dict)
    row: Mapping[str, Any] | None = None


class Names:
    """The names that requests may use.

    Args:
        foreign: names of another API, in which `*` stands for anything, and the models they mean;
            the first that fits counts, after the models' own names.
        status: asks the daemon for its status.
    """

    def __init__(
        self,
        foreign: Sequence[tuple[str, str]],
        status: Callable[[], Awaitable[Mapping[str, Any]]],
    ) -> None:
        self._foreign = [(_pattern_of(name), model) for name, model in foreign]
        self._status = status
        self._known: Mapping[str, Any] = {}
        self._known_at = -FRESH_S

    async def resolved(self, ask: AnyAsk) -> AnyAsk:
        """Return the same request, which knows what its model's name means.

        Raises:
            Failure: the daemon was asked, and does not answer.
        """
        meant = await self.meant(ask.model)
        return replace(ask, target=meant.model, preset=meant.preset)

    async def meant(self, name: str) -> Meant:
        """Return what a name means; itself if that is not known.

        Raises:
            Failure: as above.
        """
        others = [model for pattern, model in self._foreign if pattern.fullmatch(name)]
        if ":" not in name and not others:
            return Meant(name)  # the daemon finds it, or refuses it
        now = time.monotonic()
        if now - self._known_at >= FRESH_S:
            self._known = await self._status()
            self._known_at = now
        for one in (name, *others[:1]):
            if (meant := look_up(self._known, one)) is not None:
                return meant
        return Meant(others[0] if others else name)


def look_up(status: Mapping[str, Any], name: str) -> Meant | None:
    """Return what a name means among the models of a status."""
    row = row_of(status, name)
    base, _, variant = name.rpartition(":")
    if row is not None:
        is_adapter = row is row_of(status, base)
        return Meant(f"{row['name']}:{variant}" if is_adapter else row["name"], row=row)
    row = row_of(status, base)
    if row is None or variant not in (LATEST, *row["presets"]):
        return None
    return Meant(row["name"], row["presets"].get(variant, {}), row)


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


def _pattern_of(name: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, name.split("*"))))
