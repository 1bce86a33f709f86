"""Models that die again and again without being given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .measure import Place

SOON: dict[str, Any] = {"max_restarts": 1_000_000, "backoff_initial_s": 0.05, "backoff_max_s": 0.1}

Entry = Callable[[Place], dict[str, Any]]


def real_entry(place: Place) -> dict[str, Any]:
    """The tiny model on the CPU."""
    return {"path": str(place.tiny), "preload": True, "restart": SOON}
