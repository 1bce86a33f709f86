"""`mlxsup models`: the models on this machine, without a daemon."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ..configuration import optional_configuration
from ..connection import config_option, output_options
from ..model_catalog import NONE_HINT, SEARCHED, catalogue
from ..terminal.output import Output
from ..terminal.tables import listing
from ..terminal.text import format_bytes

HEADINGS = ("MODEL", "SIZE", "FORMAT", "CONTEXT", "FROM")


@click.command()
@config_option
@output_options
def models(config_path: Path | None, output: Output) -> None:
    """Example: mlxsup models

    Lists the models of the configuration, and those found in the Hugging Face cache, the folders of
    LM Studio and ~/.mlxsup/models, each with its size and why it cannot be served, if so. Needs no
    daemon.
    """
    configuration = optional_configuration(config_path)
    rows = catalogue(configuration)
    path = configuration.config_path if configuration is not None else None
    if output.is_json:
        output.object({"config": str(path) if path else None, "models": rows})
        return
    configured = [row for row in rows if row["name"] is not None]
    found = [row for row in rows if row["name"] is None]
    if configured:
        _show(f"configured in {path}:", configured, output)
    if found:
        title = "found on this machine, not configured:" if configured else "found on this machine:"
        _show(f"\n{title}" if configured else title, found, output)
    if not rows:
        output.data(f"no models in {SEARCHED}")
        output.note(f"hint: {NONE_HINT}")
    elif configuration is None and any(row["problem"] is None for row in found):
        output.note("hint: write a configuration with these models: `mlxsup init`")


def _show(title: str, rows: Sequence[Mapping[str, Any]], output: Output) -> None:
    """Print a row for each model, and then why some cannot be served."""
    output.data(title)
    output.show(listing(HEADINGS, map(_cells, rows), right=("SIZE", "CONTEXT")))
    for row in rows:
        if row["problem"]:
            about = "; ".join(filter(None, (row["problem"], row["hint"])))
            remark = f"  {row['name'] or row['title']}: {about}"
            output.data(output.style(remark, sys.stdout, dim=True))


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    name = row["name"] or row["title"]
    if row["engine"] == "fake":
        return name, "-", "fake engine", "-", "configuration"
    size = format_bytes(row["size_bytes"]) if row["size_bytes"] else "-"
    context = str(row["context_length"]) if row["context_length"] else "-"
    origin = row["repo"] or row["path"] if row["name"] else row["origin"]
    return name, size, row["quantization"] or "-", context, origin
