"""`mlxsup load`: loads a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from mlxsup.protocol.context_length import MAX_CONTEXT_LENGTH

from ..changed_model import show_changed
from ..connection import Target, connect, daemon_options
from ..keep_alive_option import load_keep_alive_option
from ..model_names import model_argument
from ..terminal.output import Output
from ..terminal.waiting import progress_shown


@click.command()
@model_argument
@click.option(
    "--dry-run", "is_dry", is_flag=True, help="Only say which models would make room for it."
)
@click.option(
    "--context-length",
    metavar="N",
    type=click.IntRange(0, MAX_CONTEXT_LENGTH),
    help="Tokens of a prompt and its answer; 0: all. `mlxsup reload` undoes it.",
)
@load_keep_alive_option
@daemon_options
def load(
    model: str,
    is_dry: bool,
    context_length: int | None,
    keep_alive: float | None,
    target: Target,
    output: Output,
) -> None:
    """Example: mlxsup load smollm2 --context-length 8192

    Loads MODEL and returns once it is READY. If the memory budget has no room for it, idle models
    are evicted, and busy ones make room once their turns are over; with --dry-run nothing changes.
    Another context length holds until the configuration is read again, and takes a new process.
    """
    how: dict[str, Any] = {"context_length": context_length, "keep_alive": keep_alive}
    with connect(target) as client:
        if is_dry:
            _show(client.load(model, dry_run=True, **how), output)
            return
        with progress_shown(client, model, output):
            client.load(model, **how)
        show_changed(client, model, output)


def _show(forecast: Mapping[str, Any], output: Output) -> None:
    """What a load would lead to, in one sentence."""
    if output.is_json:
        output.object(forecast)
        return
    name, reason = forecast["model"], forecast["reason"]
    match forecast["outcome"]:
        case "loaded":
            sentence = f"nothing to do: {name} {reason}"
        case "fits":
            sentence = f"{name} would be loaded, and no other model would go: {reason}"
        case "evicts":
            gone = ", ".join(forecast["evicts"])
            sentence = f"{name} would be loaded after evicting {gone}: it {reason}"
        case "downloads":
            sentence = f"{name} would be downloaded first: it {reason}"
        case "swaps":
            busy = ", ".join(forecast["swaps"])
            sentence = f"{name} would be loaded after swapping out {busy}: it {reason}"
        case _:
            sentence = f"{name} would wait: it {reason}"
    output.data(sentence)
