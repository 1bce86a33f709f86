"""Text for people: sizes and durations, and lines that fit a terminal."""

from __future__ import annotations

import textwrap
import time

from mlxsup.protocol.text import size_text


def format_bytes(count: float | None) -> str:
    """Return a size as everywhere else (`size_text`); `-` if it is not known."""
    return "-" if count is None else size_text(int(count))


def clock(at: float | None = None) -> str:
    """Return a time of the day in UTC, `12:03:04Z`; now by default."""
    return time.strftime("%H:%M:%SZ", time.gmtime(at))


def format_duration(seconds: float | None) -> str:
    """Return the two largest units: 2m 5s."""
    if seconds is None:
        return "-"
    whole = max(0, int(seconds))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes}m"
    if minutes:
        return f"{minutes}m {whole % 60}s"
    return f"{whole}s"


INDENT = 2

_BREAKS = dict.fromkeys(map(ord, "\n\t"), " ")


def indented(text: str, width: int | None) -> list[str]:
    """Return the lines of a sentence that belongs to the row above it."""
    return wrapped(text, width, INDENT)


def wrapped(text: str, width: int | None, indent: int = 0) -> list[str]:
    """Return a sentence in lines that fit; a path or a name is cut only if it alone is too long."""
    begin = " " * indent
    if width is None:
        return [f"{begin}{text}"]
    return textwrap.wrap(
        text, width, initial_indent=begin, subsequent_indent=begin, break_on_hyphens=False
    )


def in_a_line(text: str) -> str:
    """Return the text without line breaks and tabs, which would make a row of a table two."""
    return text.translate(_BREAKS)


def cut(text: str, width: int | None) -> str:
    """Return the text, with an ellipsis at its end if it is longer than that."""
    if width is None or len(text) <= width:
        return text
    return text[: max(1, width - 1)] + "…"
