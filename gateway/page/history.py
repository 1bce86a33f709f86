"""The last hour of a daemon in samples, for the charts: of each status that a page asks for.

While no page is open nothing is asked and nothing is kept; the charts have a gap there.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

INTERVAL_S = 5.0
SPAN_S = 3600.0
MOST_MODELS = 32
"""A sample has at most this many models, those that use the most memory."""


class History:
    """Samples, oldest first, each with its time and as the page gets it."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._samples: deque[tuple[float, bytes]] = deque(maxlen=int(SPAN_S / INTERVAL_S))

    def take(self, status: Mapping[str, Any]) -> None:
        """Add a sample of this status, unless the last one is younger than five seconds."""
        at = round(self._wall(), 1)
        if self._samples and 0 <= at - self._samples[-1][0] < INTERVAL_S:
            return
        sample = {"at": at, **sample_of(status)}
        # Encoded once: an hour of them is asked for by each page that opens.
        self._samples.append((at, json.dumps(sample, separators=(",", ":")).encode()))

    def after(self, at: float) -> bytes:
        """Return the samples since a time, in seconds since the epoch, as JSON."""
        samples = b",".join(data for taken_at, data in self._samples if taken_at > at)
        return b'{"interval_s":%g,"span_s":%g,"now":%.1f,"samples":[%b]}' % (
            INTERVAL_S, SPAN_S, self._wall(), samples,
        )  # fmt: skip


def sample_of(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return `budget` in bytes, `waiting` and `running` requests, and by model the tokens per
    second, the memory in bytes and the requests of each that has a process."""
    living = [row for row in status["models"] if row["footprint_bytes"]]
    living.sort(key=lambda row: -row["footprint_bytes"])
    return {
        "budget": status["memory"]["budget_bytes"],
        "running": sum(len(row["running"]) for row in status["models"]),
        "waiting": sum(row["queued"] for row in status["models"]),
        "models": {
            row["name"]: [round(row["tokens_per_s"], 1), row["footprint_bytes"]]
            for row in living[:MOST_MODELS]
        },
    }
