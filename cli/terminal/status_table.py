"""The table of models that `status` and every command that changes one show."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxsup.protocol.folders import log_path
from mlxsup.protocol.log_files import last_line

from .model_row import row_of
from .output import Output, width_of
from .table import Row, render

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


def show_models(
    output: Output, value: Mapping[str, Any], models: Sequence[Mapping[str, Any]]
) -> None:
    """Prints these models as rows of the table."""
    for line in table_lines(output, value, models):
        output.data(line)


def table_lines(
    output: Output, value: Mapping[str, Any], models: Sequence[Mapping[str, Any]]
) -> list[str]:
    """The table with these models.

    Args:
        output: how to write output.
        value: the daemon's status.
        models: entries of its `models`.
    """

    def style(text: str, what: str) -> str:
        return output.style(text, sys.stdout, **STATE_COLOURS.get(what, {}))

    return render(table_rows(value, models), width_of(sys.stdout), style)


def table_rows(value: Mapping[str, Any], models: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each model, with the last line of the log of each that has FAILED.

    Args:
        value: the daemon's status.
        models: entries of its `models`.
    """
    log_dir = value.get("log_dir")
    now = time.time()
    return [
        row_of(
            model,
            now,
            last_line(log_path(Path(log_dir), model["name"]))
            if model["state"] == "FAILED" and log_dir
            else "",
        )
        for model in models
    ]
