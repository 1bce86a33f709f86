"""The argument ID of a request, which a shell can complete, and what a pause answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from .model_names import ask_status, completions, target_of
from .terminal.columns import in_a_line

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def complete_request(
    context: click.Context, _: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the ids that begin so, of open requests, each with its model."""
    words = (
        (one["id"], f"{row['name']}, {kind}")
        for row in ask_status(target_of(context))
        for key, kind in (("rows", "running"), ("line", "waiting"), ("paused_rows", "paused"))
        for one in row[key]
    )
    return completions(words, incomplete)


request_argument = click.argument("request", metavar="ID", shell_complete=complete_request)


def stage_line(value: Mapping[str, Any]) -> str:
    """Return `5f0c12ab-1 of smollm2: paused after 12 tokens`."""
    sent = value["tokens_sent"]
    tokens = "1 token" if sent == 1 else f"{sent} tokens"
    return in_a_line(f"{value['request']} of {value['model']}: {value['stage']} after {tokens}")
