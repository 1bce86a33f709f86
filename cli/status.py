"""`mlxsup status`, and the rows that other commands show after a change."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from .connection import Target, connect, daemon_options
from .log_files import last_line, log_path
from .model_row import row_of
from .output import Output, width_of
from .table import render

STATE_COLOURS: dict[str, dict[str, Any]] = {
    "READY": {"fg": "green"},
    "LOADING": {"fg": "yellow"},
    "PENDING": {"fg": "yellow"},
    "DRAINING": {"fg": "yellow"},
    "STOPPING": {"fg": "yellow"},
    "BACKOFF": {"fg": "red"},
    "FAILED": {"fg": "red", "bold": True},
    "STOPPED": {"dim": True},
    "header": {"bold": True},
    "dim": {"dim": True},
}


@click.command(short_help="Show every model.")
@daemon_options
def status(target: Target, output: Output) -> None:
    """Example: mlxsup status --json

    Shows every model: its state, its process, what it does and why it last ended.
    """
    with connect(target) as client:
        value = client.status()
    if output.is_json:
        output.object(value)
        return
    show_models(output, value, value["models"])
    if not value["models"]:
        output.note("no model is configured")


def show_models(
    output: Output, value: Mapping[str, Any], models: Sequence[Mapping[str, Any]]
) -> None:
    """Prints these models as rows of the table.

    Args:
        output: where to.
        value: what the daemon said about itself.
        models: entries of its `models`.
    """
    log_dir = value.get("log_dir")
    now = time.time()
    rows = [
        row_of(
            model,
            now,
            last_line(log_path(Path(log_dir), model["name"]))
            if model["state"] == "FAILED" and log_dir
            else "",
        )
        for model in models
    ]

    def style(text: str, what: str) -> str:
        return output.style(text, sys.stdout, **STATE_COLOURS.get(what, {}))

    for line in render(rows, width_of(sys.stdout), style):
        output.data(line)
