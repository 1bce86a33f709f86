"""Text for people that several parts share: durations, sizes, times, log lines."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Sequence

LOG_LEVELS = ("debug", "info", "warning", "error")
"""From the least to the most important."""

DURATION_PATTERN = r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|d)"

KIB = 2**10
MIB = 2**20
GIB = 2**30
TIB = 2**40

_NOT_ASCII = re.compile(r"[^ -~]")
_DURATION = re.compile(DURATION_PATTERN + "?")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str, *, default_unit: str | None = None) -> float:
    """Return seconds, from a number and a unit: `90s`, `1.5h`.

    Args:
        text: as a person writes it.
        default_unit: the unit of a number without one; None: it must have one.

    Raises:
        ValueError: the text is something else.
    """
    match = _DURATION.fullmatch(text.strip())
    unit = (match.group(2) or default_unit) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a duration")
    return float(match.group(1)) * _SECONDS[unit]


def size_text(count: int) -> str:
    """Return at least that many bytes as people and the configuration write it: `512.0 MiB`.

    The one form of sizes in all that is shown: tables, sentences, errors and logs.
    """
    if 0 < count < KIB:
        return f"{count} B"
    if 0 < count < MIB // 10:
        return f"{math.ceil(count * 10 / KIB) / 10:.1f} KiB"
    if count < GIB:
        return f"{math.ceil(count * 10 / MIB) / 10:.1f} MiB"
    if count < TIB:
        return f"{math.ceil(count * 100 / GIB) / 100:.2f} GiB"
    return f"{math.ceil(count * 100 / TIB) / 100:.2f} TiB"


def listed(names: Iterable[str]) -> str:
    """Return `a`, `a and b`, `a, b and c`."""
    *front, last = names
    return f"{', '.join(front)} and {last}" if front else last


def rank_name(rank: int, host: str | None, address: str) -> str:
    """Return `rank 1 (studio-2)`: what ssh calls a host of a group, or else its address."""
    return f"rank {rank} ({host or address})"


def timestamp(moment: float, *, has_milliseconds: bool = False) -> str:
    """Return seconds since the epoch as UTC: `2026-11-21T09:30:00Z`, or `…00.123Z`."""
    second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment))
    return f"{second}.{int(moment % 1 * 1000):03d}Z" if has_milliseconds else f"{second}Z"


def escaped(text: str) -> str:
    """Return the text with what is not printable as JSON escapes it: `\\u001b`, `\\n`.

    A line of JSON stays JSON with the same meaning, because such characters are only in its texts.
    """
    return text if text.isprintable() else _NOT_ASCII.sub(_escape_of, text)


def _escape_of(found: re.Match[str]) -> str:
    import json  # help would wait for it

    sign = found[0]
    return sign if sign.isprintable() else json.dumps(sign).strip('"')


def log_line(message: str, **facts: object) -> str:
    """Return the message followed by its facts as `key=value`, all of it printable.

    Values are quoted if they have spaces, quotation marks or anything that is not printable.
    """
    shown = (f"{escaped(name)}={_shown(value)}" for name, value in facts.items())
    return " ".join([escaped(message), *shown])


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    if not text or not text.isprintable() or any(sign in ' "=' for sign in text):
        import json

        return escaped(json.dumps(text, ensure_ascii=False))
    return text


# ---------------------------------------------------------------- the last words of a process

MAX_LAST_WORDS = 200


ROUTINE = re.compile(
    r"\S+Z (DEBUG|INFO|WARNING) |Extension modules:|(Current t|T)hread 0x|Stack \(most recent"
    r"|\s*(File|Binary file) \".*\",? |\s*<"
)
"""Lines that say nothing about a death: logs below an error, and what a fault handler lists."""


def last_words(lines: Sequence[str]) -> str:
    """Return the line of a process's output that may be a cause: a fault handler's name for it, or
    the last line that is neither a routine log nor the end of such a report."""
    for line in reversed(lines):
        if line.startswith("Fatal Python error:"):
            return line.strip()[:MAX_LAST_WORDS]
    for line in reversed(lines):
        if line.strip() and not ROUTINE.match(line):
            return line.strip()[:MAX_LAST_WORDS]
    return ""
