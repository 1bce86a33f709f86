"""The HTTP gateway, below the table of models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .columns import wrapped
from .quantities import format_duration


def gateway_lines(value: Mapping[str, Any], width: int | None) -> list[str]:
    """`http: http://127.0.0.1:8484 (pid 4711)`, or why it is not there.

    Args:
        value: the daemon's status; without a gateway there is nothing to say.
        width: columns of the terminal; None: lines are never wrapped.
    """
    gateway = value.get("gateway")
    if not gateway:
        return []
    if gateway["state"] == "listening":
        line = f"http: {gateway['url']} (pid {gateway['pid']})"
        if gateway["restarts"]:
            line += f", started {gateway['restarts'] + 1} times; last, {gateway['cause']}"
        return wrapped(line, width)
    line = f"http: {gateway['state']}"
    if gateway["ends_in_a_row"] > 1:
        line += f", {gateway['ends_in_a_row']} times in a row"
    if gateway["cause"]:
        line += f": {gateway['cause']}"
    if gateway["retry_in_s"] is not None:
        line += f"; next attempt in {format_duration(gateway['retry_in_s'])}"
    return wrapped(line, width)
