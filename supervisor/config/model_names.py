"""The names that models have besides their own: what is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from .tables import ModelTable

ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
ALIAS_EXPECTED = "1 to 128 of the characters A-Z a-z 0-9 . _ / -, the first a letter or digit"
PRESET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
PRESET_EXPECTED = "1 to 64 of the characters A-Z a-z 0-9 . _ -, the first a letter or digit"
FOREIGN = re.compile(r"[!-~]{1,128}")
FOREIGN_EXPECTED = "1 to 128 printable characters without spaces"

MAX_FOREIGN = 64
"""They travel with the command that starts the gateway."""

Problem = tuple[tuple[str, ...], str]
"""Where it is in the file, and a phrase that follows the key."""


def name_problems(entries: Mapping[str, ModelTable]) -> Iterator[Problem]:
    """What is wrong with aliases and presets."""
    owners = {name: name for name in entries}
    for name, entry in entries.items():
        where = ("models", name, "aliases")
        for alias in entry.aliases:
            if not ALIAS.fullmatch(alias):
                yield where, f"takes names of {ALIAS_EXPECTED}, not {alias[:60]!r}"
            elif alias in owners:
                yield where, f"has {alias}, which already means models.{owners[alias]}"
            owners.setdefault(alias, name)
        for preset in entry.presets:
            if not PRESET.fullmatch(preset):
                place = ("models", name, "presets", preset)
                yield place, f"is no name for a preset, which takes {PRESET_EXPECTED}"


def foreign_problems(
    names: Mapping[str, str], entries: Mapping[str, ModelTable]
) -> Iterator[Problem]:
    """What is wrong with the names of other APIs."""
    known = {one: name for name, entry in entries.items() for one in (name, *entry.aliases)}
    if len(names) > MAX_FOREIGN:
        yield ("gateway", "names"), f"takes at most {MAX_FOREIGN} names, not {len(names)}"
    for foreign, model in names.items():
        where = ("gateway", "names", foreign)
        base, _, preset = model.rpartition(":")
        if not FOREIGN.fullmatch(foreign):
            yield where, f"is no name: it takes {FOREIGN_EXPECTED}"
        elif foreign in known:
            yield where, f"has no effect: it is a name of models.{known[foreign]}"
        elif model not in known and not (base in known and preset in entries[known[base]].presets):
            yield where, f"takes the name of a model, or NAME:PRESET, not {model[:60]!r}"
