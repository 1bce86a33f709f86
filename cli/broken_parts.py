"""What of a daemon is broken, for monitoring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BROKEN_MODELS = {"FAILED": "has FAILED", "BACKOFF": "is in BACKOFF"}
BROKEN_GATEWAYS = ("frozen", "backoff", "crash loop")


def broken_parts(status: Mapping[str, Any]) -> list[str]:
    """Return `qwen has FAILED`, one for each part; loading is no fault."""
    parts = [
        f"{row['name']} {BROKEN_MODELS[row['state']]}"
        for row in status["models"]
        if row["state"] in BROKEN_MODELS
    ]
    gateway = status.get("gateway")
    if gateway and gateway["state"] in BROKEN_GATEWAYS:
        parts.append("the HTTP gateway is down")
    return parts
