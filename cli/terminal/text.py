"""Text for people: sizes and durations, and lines that fit a terminal."""

from __future__ import annotations

import time

from mlxsup.protocol.text import size_text


def format_bytes(count: float | None) -> str:
    """Return a size as everywhere else (`size_text`); `-` if it is not known."""
    return "-" if count is None else size_text(int(count))


def clock(at: float | None = None) -> str:
    """Return a time of the day in UTC, `12:03:04Z`; now by default."""
    return time.strftime("%H:%M:%SZ", time.gmtime(at))


def counted(count: int, noun: str) -> str:
    """Return `1 token`, `2 tokens`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


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


BAR_COLUMNS = 12
"""Inside its brackets: with a few words it fits into a terminal of 40 columns."""


def bar(share: float) -> str:
    """Return `[====>       ]` for a share of a whole, from 0 to 1."""
    done = int(max(0.0, min(share, 1.0)) * BAR_COLUMNS)
    drawn = "=" * done + ">" * (done < BAR_COLUMNS)
    return f"[{drawn:{BAR_COLUMNS}}]"


INDENT = 2
"""Of a sentence that belongs to the row above it."""

_NOTHING = "\0"

_BREAKS = dict.fromkeys(map(ord, "\n\t"), " ")


def wrapped(text: str, width: int | None, indent: int = 0) -> list[str]:
    """Return a sentence in lines that fit; a path or a name is cut only if it alone is too long."""
    begin = " " * indent
    if width is None:
        return [f"{begin}{text}"]
    import textwrap  # the shorter help of a command would wait for it

    # A sign that takes two columns counts as two.
    counted = text if text.isascii() else "".join(_NOTHING * (cell_len(c) - 1) + c for c in text)
    lines = textwrap.wrap(
        counted, width, initial_indent=begin, subsequent_indent=begin, break_on_hyphens=False
    )
    return [line.replace(_NOTHING, "") for line in lines]


def in_a_line(text: str) -> str:
    """Return the text without line breaks and tabs, which would make a row of a table two."""
    return text.translate(_BREAKS)


def cell_len(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # most texts need no table of widths

    return cell_len(text)


def cut(text: str, width: int | None) -> str:
    """Return the text, with an ellipsis at its end if it takes more columns than that."""
    if width is None or cell_len(text) <= width:
        return text
    if text.isascii():
        return text[: max(0, width - 1)] + "…"
    from rich.cells import set_cell_size

    return set_cell_size(text, max(0, width - 1)) + "…"
