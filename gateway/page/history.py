"""The last hour of a daemon in samples, for the charts: kept here, because only the page asks.

A daemon without HTTP pays nothing for it, and an idle one a status every five seconds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ..failure import Failure

INTERVAL_S = 5.0
SPAN_S = 3600.0
MOST_MODELS = 32
"""A sample has at most this many models, those that use the most memory."""

logger = logging.getLogger(__name__)


class History:
    """Samples, oldest first, each with its time and as the page gets it.

    Args:
        status: asks the daemon for its status; raises `Failure`.
        wall: seconds since the epoch.
    """

    def __init__(
        self,
        status: Callable[[], Awaitable[Mapping[str, Any]]],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._status = status
        self._wall = wall
        self._samples: deque[tuple[float, bytes]] = deque(maxlen=int(SPAN_S / INTERVAL_S))

    async def watch(self) -> None:
        """Take a sample every five seconds; a daemon that does not answer leaves a gap."""
        while True:
            try:
                self.take(await self._status())
            except Failure as failure:
                logger.info("no sample of the daemon: %s", failure.message)
            await asyncio.sleep(INTERVAL_S)

    def take(self, status: Mapping[str, Any]) -> None:
        """Add a sample of this status."""
        at = round(self._wall(), 1)
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
        "budget": status["memory"]["effective_budget_bytes"],
        "running": sum(len(row["running"]) for row in status["models"]),
        "waiting": sum(row["queued"] for row in status["models"]),
        "models": {
            row["name"]: [round(row["tokens_per_s"], 1), row["footprint_bytes"]]
            for row in living[:MOST_MODELS]
        },
    }
