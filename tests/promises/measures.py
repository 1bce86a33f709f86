"""All measures, in the order of a round."""

from __future__ import annotations

from . import (
    beside,
    clients,
    crash_cycles,
    crashes,
    doors,
    ends,
    false_kills,
    flood,
    http_door,
    kills,
    large_bodies,
    loads,
    lost_work,
    neighbours,
    orphans,
    passing_faults,
    reloads,
    stalls,
    stuck,
    unloads,
    wall_clock,
)
from .measure import Measure

MEASURES: tuple[Measure, ...] = (
    *ends.MEASURES,
    *orphans.MEASURES,
    *crashes.MEASURES,
    *neighbours.MEASURES,
    *crash_cycles.MEASURES,
    *stalls.MEASURES,
    *false_kills.MEASURES,
    *wall_clock.MEASURES,
    *stuck.MEASURES,
    *lost_work.MEASURES,
    *loads.MEASURES,
    *unloads.MEASURES,
    *reloads.MEASURES,
    *passing_faults.MEASURES,
    *clients.MEASURES,
    *flood.MEASURES,
    *doors.MEASURES,
    *http_door.MEASURES,
    *kills.MEASURES,
    *large_bodies.MEASURES,
    *beside.MEASURES,
)
