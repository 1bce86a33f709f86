"""Mutants that no test can tell from the right code, each with the reason."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from .campaign import Mutant
from .operators import mutations_of
from .trial import diff_of

LISTED = Path(__file__).with_name("equivalent.toml")
MOST_SHARE = 0.05
"""Of a part's mutants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalent:
    """One of them.

    Attributes:
        path: of the file.
        diff: the changed lines, as the document shows them.
        reason: why nothing that anybody can see differs.
    """

    path: str
    diff: str
    reason: str

    def is_of(self, mutant: Mutant) -> bool:
        """Whether this is that mutant."""
        return (mutant.mutation.path, mutant.diff) == (self.path, self.diff)


def read_equivalents(place: Path = LISTED) -> list[Equivalent]:
    """The list."""
    entries = tomllib.loads(place.read_text()).get("equivalent", [])
    return [
        Equivalent(path=one["path"], diff=one["diff"].strip("\n"), reason=one["reason"].strip())
        for one in entries
    ]


def stale_ones(root: Path, listed: list[Equivalent]) -> list[Equivalent]:
    """Those that can no longer be planted, because the code has changed."""
    stale = []
    for one in listed:
        place = root / one.path
        source = place.read_bytes() if place.exists() else b""
        if all(
            diff_of(mutation, source) != one.diff for mutation in mutations_of(one.path, source)
        ):
            stale.append(one)
    return stale
