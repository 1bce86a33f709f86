"""Sizes and durations, as people read them."""

from __future__ import annotations

GIB = 2**30


def format_bytes(count: float | None) -> str:
    """Sizes are in GiB, with two digits below 1; what would read as none is in smaller units."""
    if count is None:
        return "-"
    size = count / GIB
    if 0 < size < 0.005:
        small = max(int(count), 1)
        return f"{small} B" if small < 2**10 else f"{small / 2**20:.3f} MiB"
    return f"{size:.2f} GiB" if size < 1 else f"{size:.1f} GiB"


def format_duration(seconds: float | None) -> str:
    """The two largest units: 2m 5s."""
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
