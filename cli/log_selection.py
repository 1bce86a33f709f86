"""Which lines of a log to show: those since a time, or those of the previous generation."""

from __future__ import annotations

import calendar
import re
import time
from collections.abc import Sequence

from mlxsup.protocol.folders import GENERATION_HEADER

_STAMP = re.compile(r"(?:\{\"at\": \")?(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?Z")


def since(lines: Sequence[str], cutoff: float, written_at: float) -> list[str]:
    """The lines from a time on.

    A line without a time was written between its neighbours; if in doubt it is shown, because what
    a process prints as it dies has no time.

    Args:
        lines: oldest first.
        cutoff: seconds since the epoch.
        written_at: when the last line was written, at the latest.
    """
    for place in range(len(lines) - 1, -1, -1):
        stamp = _stamp_of(lines[place])
        if stamp is not None and stamp < cutoff:
            rest = list(lines[place + 1 :])
            break
    else:
        rest = list(lines)
    is_any_young = written_at >= cutoff or any(_stamp_of(line) is not None for line in rest)
    return rest if is_any_young else []


def previous_generation(lines: Sequence[str]) -> list[str] | None:
    """The previous process's output, with its rule line; None if there was none."""
    rules = [place for place, line in enumerate(lines) if GENERATION_HEADER.match(line)]
    if not rules:
        return None
    if len(rules) == 1:
        # The previous one's rule line may have gone with the oldest file.
        return list(lines[: rules[0]]) or None
    return list(lines[rules[-2] : rules[-1]])


def _stamp_of(line: str) -> float | None:
    header = GENERATION_HEADER.match(line)
    match = _STAMP.match(line, header.end() if header else 0)
    if match is None:
        return None
    try:
        whole = calendar.timegm(time.strptime(match.group(1), "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None
    return whole + float(match.group(2) or 0)
