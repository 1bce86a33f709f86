"""The two forms of a line in the daemon's log."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from mlxsup.protocol.text import escaped, log_line, timestamp


def text_line(moment: float, level: str, message: str, facts: Mapping[str, object]) -> bytes:
    """`2026-11-21T09:30:00.123Z INFO message key=value`, and a line break.

    Args:
        moment: seconds since the epoch.
        level: one of `LOG_LEVELS`.
        message: what happened.
        facts: what is said about it.
    """
    stamp = timestamp(moment, has_milliseconds=True)
    return f"{stamp} {level.upper()} {log_line(message, **facts)}\n".encode()


def json_line(moment: float, level: str, message: str, facts: Mapping[str, object]) -> bytes:
    """`{"at": "2026-11-21T09:30:00.123Z", "level": "info", "message": …, "key": …}`, and a line
    break.

    Args:
        moment, level, message, facts: as for `text_line`; without a level, the line has none.
    """
    begin = {"at": timestamp(moment, has_milliseconds=True), "level": level, "message": message}
    if not level:
        del begin["level"]
    values = {name: _plain(value) for name, value in facts.items()}
    return (escaped(json.dumps(begin | values, ensure_ascii=False)) + "\n").encode()


def _plain(value: object) -> object:
    """The value if JSON has it; otherwise as people read it."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else str(value)
    return str(value)
