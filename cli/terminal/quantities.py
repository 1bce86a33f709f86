"""Sizes and durations, as people read them."""

from __future__ import annotations

from mlxsup.protocol.text import size_text


def format_bytes(count: float | None) -> str:
    """Return a size as everywhere else (`size_text`); `-` if it is not known."""
    return "-" if count is None else size_text(int(count))


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
