"""`mlxsup show`: what one model on this machine is, without a daemon."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from mlxsup.protocol.close_names import close_names

from ..arguments import complete_model_or_repository
from ..configuration import optional_configuration
from ..connection import config_option, output_options
from ..exit_status import CliError, ExitStatus
from ..model_catalog import catalogue, row_of_path
from ..terminal.output import Output
from ..terminal.tables import listing
from ..terminal.text import format_bytes


@click.command()
@click.argument("model", shell_complete=complete_model_or_repository)
@config_option
@output_options
def show(model: str, config_path: Path | None, output: Output) -> int:
    """Example: mlxsup show mlx-community/SmolLM2-135M-Instruct

    Shows the architecture, quantisation, chat template, context, licence and size of MODEL, and
    whether it fits into memory. MODEL is a name of the configuration, OWNER/NAME, or a folder. The
    exit code is 1 if it cannot be served as it is.
    """
    row = _find(model, config_path)
    needs = _needs(row, output)
    if output.is_json:
        output.object(row | {"needs": needs})
    else:
        output.show(listing((), _facts(row, needs)))
        if row["hint"]:
            output.note(f"hint: {row['hint']}")
    return ExitStatus.FAILED if row["problem"] else ExitStatus.OK


def _find(model: str, config_path: Path | None) -> dict[str, Any]:
    """Return the row of a model, by its name, alias, repository or folder.

    Raises:
        CliError: nothing is called so.
    """
    rows = catalogue(optional_configuration(config_path))
    for is_it in (
        lambda row: row["name"] == model,
        lambda row: model in row["aliases"],
        lambda row: row["title"] == model,
        lambda row: row["title"].rpartition("/")[2] == model,
    ):
        for row in rows:
            if is_it(row):
                return row
    path = Path(model).expanduser()
    if model and os.path.exists(path):
        return row_of_path(path.absolute())
    close = close_names(model, [row["name"] or row["title"] for row in rows])
    hint = f"did you mean {' or '.join(close)}?" if close else "see `mlxsup models`"
    message = f"no model on this machine is called {model!r}, and there is no such folder"
    raise CliError(message, code="unknown_model", hint=hint)


def _needs(row: Mapping[str, Any], output: Output) -> dict[str, Any] | None:
    """What the model needs in memory, as the plan has it; None if it cannot be loaded."""
    from .plan import plan_of_folders

    if row["engine"] != "mlx" or row["problem"]:
        return None
    plan = plan_of_folders({"model": Path(row["path"])}, output)
    [planned] = plan["models"]
    if planned["problem"]:
        return None
    return {
        "bytes": planned["needed"]["bytes"],
        "source": planned["needed"]["source"],
        "budget_bytes": plan["budget"]["bytes"],
        "fits": not planned["missing_bytes"],
    }


def _facts(row: Mapping[str, Any], needs: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    """Yield the lines for people, as name and text."""
    unknown = "not said"
    yield "model", row["name"] or row["title"]
    if row["engine"] != "mlx":
        yield "engine", "fake: answers without a model"
        return
    if row["repo"]:
        yield "repository", f"{row['repo']} at {row['revision']}"
    yield "folder", row["path"]
    kind = row["model_type"] or unknown
    yield "architecture", f"{row['architecture']} ({kind})" if row["architecture"] else kind
    yield "numbers", row["quantization"] or unknown
    tokens = row["context_length"]
    yield "context", f"{tokens} tokens" if tokens else unknown
    yield "chat template", "yes" if row["has_template"] else "none"
    yield "licence", row["licence"] or unknown
    yield "size", format_bytes(row["size_bytes"]) if row["size_bytes"] else "-"
    if needs is not None:
        about = "about " if needs["source"] == "estimated" else ""
        budget = format_bytes(needs["budget_bytes"])
        verdict = "fits" if needs["fits"] else "does not fit"
        yield "memory", f"needs {about}{format_bytes(needs['bytes'])} of {budget}: {verdict}"
    if row["problem"]:
        yield "problem", row["problem"]
