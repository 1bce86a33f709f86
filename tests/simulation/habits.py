"""What people do, and how often, by the kind of run."""

from __future__ import annotations

from .plan import Kind

COMMON = {"ask": 60, "cancel": 7, "ping": 1, "status": 2, "quiet": 0.7, "again": 3,
          "pause": 5, "resume": 5}  # fmt: skip
OPERATE = {"load": 1.2, "unload": 1.8, "restart": 1.6, "reload": 1.2, "edit": 0.8, "leave": 1.0,
           "slow": 0.6, "subscribe": 0.8, "twin": 1.0, "unknown": 0.6, "nonsense": 0.6,
           "signal": 0.15, "stop": 0.15}  # fmt: skip
LIFT = {"load": 0.8, "quiet": 2.0}
CROWDED = {"load": 1.5, "dry_load": 1.5, "quiet": 3.0}
FORGIVE = {"again": 6, "copy": 5, "restart": 0.5, "load": 0.4, "reload": 0.4,
           "forgive": 2}  # fmt: skip
"""Requests come again; some of the others lift what is held against them, and some must not."""


def habits(kind: Kind, *, is_limited: bool) -> dict[str, float]:
    """How often each act happens, relative to the others.

    Args:
        kind: of the run.
        is_limited: whether there is a memory budget.
    """
    weights: dict[str, float] = dict(COMMON)
    if kind in (Kind.PEOPLE, Kind.STORM):
        weights |= OPERATE
    if kind is Kind.LOADS:
        weights |= LIFT
    if is_limited:
        weights |= CROWDED
    if kind is Kind.POISON:
        weights |= FORGIVE
    return weights
