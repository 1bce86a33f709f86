"""`mlxsup models`: the models on this machine, without a daemon."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ..connection import config_option, output_options
from ..model_catalog import SEARCHED, catalogue, optional_configuration
from ..terminal.columns import columns, indented, wrapped
from ..terminal.output import Output, width_of
from ..terminal.quantities import format_bytes

HEADERS = ("MODEL", "SIZE", "FORMAT", "CONTEXT", "FROM")
RIGHT_ALIGNED = (1, 3)
NONE_HINT = "download one with `mlxsup pull OWNER/NAME`, or see `mlxsup demo`"


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
    width = width_of(sys.stdout)
    lines: list[str] = []
    if configured:
        lines += [*wrapped(f"configured in {path}:", width), *_table(configured, output, width)]
    if found:
        lines += [""] if lines else []
        title = "found on this machine, not configured:" if configured else "found on this machine:"
        lines += [*wrapped(title, width), *_table(found, output, width)]
    output.data("\n".join(lines or wrapped(f"no models in {SEARCHED}", width)))
    if not rows:
        output.note(f"hint: {NONE_HINT}")
    elif configuration is None and any(row["problem"] is None for row in found):
        output.note("hint: write a configuration with these models: `mlxsup init`")


def _table(rows: Sequence[Mapping[str, Any]], output: Output, width: int | None) -> list[str]:
    """A row for each model, and under it why it cannot be served."""
    headers, *blocks = columns(HEADERS, [_cells(row) for row in rows], width, right=RIGHT_ALIGNED)
    lines = [output.style(line, sys.stdout, bold=True) for line in headers]
    for row, block in zip(rows, blocks, strict=True):
        lines += block
        if row["problem"]:
            remark = "; ".join(filter(None, (row["problem"], row["hint"])))
            remarks = indented(remark, width)
            lines += [output.style(line, sys.stdout, dim=True) for line in remarks]
    return lines


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    name = row["name"] or row["title"]
    if row["engine"] == "fake":
        return name, "-", "fake engine", "-", "configuration"
    size = format_bytes(row["size_bytes"]) if row["size_bytes"] else "-"
    context = str(row["context_length"]) if row["context_length"] else "-"
    origin = row["repo"] or row["path"] if row["name"] else row["origin"]
    return name, size, row["quantization"] or "-", context, origin
