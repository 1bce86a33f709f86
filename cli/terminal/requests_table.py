"""The open requests of `mlxsup requests`, as people read them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .columns import in_a_line, kept_columns
from .notices import PAUSED_WORDS, QUEUED_WORDS
from .output import Output, width_of
from .quantities import format_duration

HEADERS = ("ID", "MODEL", "CLIENT", "STATE", "TOKENS", "TOK/S", "ENGINE", "DOING")
LEFT_ALIGNED = frozenset({"ID", "MODEL", "CLIENT", "STATE", "DOING"})
DROPPED_FIRST = ("ENGINE", "TOKENS", "CLIENT", "TOK/S", "MODEL")
"""What a terminal that is too narrow for all columns does without, in this order."""

CLIENT = HEADERS.index("CLIENT")
GAP = 2
LEAST_WIDTHS = {"CLIENT": 8, "DOING": 22}
"""How much of these is always shown, if they are shown at all; others are never cut."""

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
    lines = request_rows(value["requests"], width_of(sys.stdout))
    lines[0] = output.style(lines[0], sys.stdout, bold=True)
    if value["more"]:
        lines.append(f"and {value['more']} more")
    return lines


def request_rows(requests: Sequence[Mapping[str, Any]], width: int | None) -> list[str]:
    """The line of the headers, then one for each request.

    Args:
        requests: entries of `requests`, at least one.
        width: columns of the terminal; None to cut nothing.
    """
    rows = [HEADERS, *(_cells(one) for one in requests)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(HEADERS))]
    least = [
        min(room, LEAST_WIDTHS.get(header, room))
        for header, room in zip(HEADERS, widths, strict=True)
    ]
    places = kept_columns(least, width, GAP, [HEADERS.index(header) for header in DROPPED_FIRST])
    if width is not None:
        over = sum(widths[place] for place in places) + GAP * (len(places) - 1) - width
        widths[CLIENT] = max(least[CLIENT], widths[CLIENT] - max(0, over))
    return [_line(row, places, widths, width) for row in rows]


def request_line(one: Mapping[str, Any]) -> str:
    """One request on a separate line: `5f0c12ab-1 of smollm2: answering, 12 tokens`."""
    sent = one["tokens_sent"]
    tokens = "1 token" if sent == 1 else f"{sent} tokens"
    parts = [str(one["state"]), _doing(one), tokens if sent else "", str(one["client"])]
    said = ", ".join(part for part in parts if part)
    return in_a_line(f"{one['id']} of {one['model']}: {said}")


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


def _line(
    row: Sequence[str], places: Sequence[int], widths: Sequence[int], width: int | None
) -> str:
    cells = [
        _cut(row[place], widths[place]).ljust(widths[place])
        if HEADERS[place] in LEFT_ALIGNED
        else row[place].rjust(widths[place])
        for place in places
    ]
    return _cut(in_a_line((" " * GAP).join(cells)).rstrip(), width)


def _cut(text: str, room: int | None) -> str:
    if room is None or len(text) <= room:
        return text
    return f"{text[: max(room - 1, 1)]}…"
