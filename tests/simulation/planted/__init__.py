"""The bugs that the simulation has to see, by theme: at least one for each module of the core."""

from __future__ import annotations

from . import (
    doors,
    downloads,
    endings,
    estimates,
    files,
    fleet,
    flight,
    gateway,
    giving_way,
    health,
    joining,
    leases,
    lifecycle,
    load_options,
    making_room,
    memory,
    pausing,
    pressure,
    requests,
    rows,
    serving,
    sharing,
    spares,
    status,
    swaps,
    words,
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
    giving_way,
    requests,
    health,
    lifecycle,
    memory,
    estimates,
    fleet,
    sharing,
    leases,
    yielding,
    swaps,
    files,
    spares,
    gateway,
    rows,
    making_room,
    downloads,
    joining,
    load_options,
    words,
    flight,
)

MUTANTS: tuple[Mutant, ...] = tuple(bug for theme in _THEMES for bug in theme.MUTANTS)
