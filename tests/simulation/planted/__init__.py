"""The bugs that the simulation has to see, by theme: at least one for each module of the core."""

from __future__ import annotations

from . import (
    doors,
    endings,
    fleet,
    health,
    leases,
    lifecycle,
    memory,
    pausing,
    pressure,
    requests,
    serving,
    sharing,
    spares,
    status,
    swaps,
    yielding,
)
from .mutant import Mutant

__all__ = ["MUTANTS", "Mutant"]

_THEMES = (
    doors,
    status,
    endings,
    serving,
    pausing,
    pressure,
    requests,
    health,
    lifecycle,
    memory,
    fleet,
    sharing,
    leases,
    yielding,
    swaps,
    spares,
)

MUTANTS: tuple[Mutant, ...] = tuple(bug for theme in _THEMES for bug in theme.MUTANTS)
