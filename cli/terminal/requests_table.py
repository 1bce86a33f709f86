"""The open requests of `mlxsup requests`, as people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .columns import in_a_line
from .notices import PAUSED_WORDS, QUEUED_WORDS
from .quantities import format_duration
from .tables import Column, table

if TYPE_CHECKING:
    from rich.text import Text

COLUMNS = (
    Column("ID"),
    Column("MODEL", given_up=5),
    Column("CLIENT", least=8, given_up=3),
    Column("STATE"),
    Column("TOKENS", is_right=True, given_up=2),
    Column("TOK/S", is_right=True, given_up=4),
    Column("ENGINE", is_right=True, given_up=1),
    Column("DOING", least=22),
)

LEAST_SHOWN_S = 1.0
"""A shorter wait is not worth saying."""


def request_lines(requests: Sequence[Mapping[str, Any]], width: int | None) -> list[Text]:
    """Return the line of the headers, then one for each request.

    Args:
        requests: entries of `requests`.
        width: columns of the terminal; None to cut nothing.
    """
    return table(COLUMNS, [_cells(one) for one in requests], width)


def request_line(one: Mapping[str, Any]) -> str:
    """Return one request as a sentence: `5f0c12ab-1 of smollm2: answering, 12 tokens`."""
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
    """Return `place 3, about 12s`, `prompt 41%, about 5s` or `until mlxsup resume`."""
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
