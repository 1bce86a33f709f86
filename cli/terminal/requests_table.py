"""The open requests of `mlxsup requests`, as people read them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .notices import PAUSED_WORDS, QUEUED_WORDS
from .output import Output, width_of
from .quantities import format_duration

HEADERS = ("ID", "MODEL", "CLIENT", "STATE", "TOKENS", "TOK/S", "ENGINE", "DOING")
LEFT_ALIGNED = frozenset({"ID", "MODEL", "CLIENT", "STATE", "DOING"})
CLIENT = HEADERS.index("CLIENT")
MIN_CLIENT_WIDTH = 8
LEAST_SHOWN_S = 1.0
"""A shorter wait is not worth saying."""


def requests_table(output: Output, value: Mapping[str, Any]) -> list[str]:
    """The lines of the table.

    Args:
        output: adds colour.
        value: as `--json` prints it.
    """
    if not value["requests"]:
        return ["no open requests"]
    width = width_of(sys.stdout)
    rows = [HEADERS, *(_cells(one) for one in value["requests"])]
    widths = [max(len(row[place]) for row in rows) for place in range(len(HEADERS))]
    if width is not None:
        over = sum(widths) + 2 * (len(widths) - 1) - width
        widths[CLIENT] = max(MIN_CLIENT_WIDTH, widths[CLIENT] - max(0, over))
    lines = [_line(row, widths, width) for row in rows]
    lines[0] = output.style(lines[0], sys.stdout, bold=True)
    if value["more"]:
        lines.append(f"and {value['more']} more")
    return lines


def request_line(one: Mapping[str, Any]) -> str:
    """One request on a separate line: `5f0c12ab-1 of smollm2: answering, 12 tokens`."""
    sent = one["tokens_sent"]
    tokens = "1 token" if sent == 1 else f"{sent} tokens"
    parts = [str(one["state"]), _doing(one), tokens if sent else "", str(one["client"])]
    return f"{one['id']} of {one['model']}: {', '.join(part for part in parts if part)}"


def _cells(one: Mapping[str, Any]) -> tuple[str, ...]:
    rate = one["tokens_per_s"]
    return (
        str(one["id"]),
        str(one["model"]),
        str(one["client"]),
        str(one["state"]),
        str(one["tokens_sent"]),
        f"{rate:.1f}" if rate else "-",
        f"{one['engine_s']:.1f}s",
        _doing(one),
    )


def _doing(one: Mapping[str, Any]) -> str:
    """`place 3, about 12s` · `prompt 41%, about 5s` · `until mlxsup resume`."""
    parts = []
    if one["state"] == "waiting":
        parts.append(f"place {one['place']}{QUEUED_WORDS.get(str(one['reason']), '')}")
    elif one["state"] == "paused":
        parts.append(PAUSED_WORDS["user"])
    elif one["prefill"] is not None:
        parts.append(f"prompt {one['prefill']:.0%}")
    expected_s = one["expected_s"]
    if expected_s is not None and expected_s >= LEAST_SHOWN_S:
        parts.append(f"about {format_duration(expected_s)}")
    return ", ".join(parts)


def _line(row: Sequence[str], widths: Sequence[int], width: int | None) -> str:
    cells = [
        _cut(cell, room).ljust(room) if header in LEFT_ALIGNED else cell.rjust(room)
        for header, cell, room in zip(HEADERS, row, widths, strict=True)
    ]
    return _cut("  ".join(cells).rstrip(), width)


def _cut(text: str, room: int | None) -> str:
    if room is None or len(text) <= room:
        return text
    return f"{text[: max(room - 1, 1)]}…"
