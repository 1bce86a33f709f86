"""`mlxsup models` and `mlxsup show`: the models on this machine, without a daemon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxsup.protocol.tasks import Task

from ..arguments import complete_model_or_repository
from ..connection import config_option, output_options
from ..exit_status import ExitStatus
from ..terminal.output import Output
from ..terminal.tables import listing
from ..terminal.text import format_bytes

if TYPE_CHECKING:
    from mlxsup.store.model_folder import FolderProblem
    from mlxsup.supervisor.config.load import DaemonConfig


HEADINGS = ("MODEL", "SIZE", "FORMAT", "CONTEXT", "FROM")


@click.command()
@config_option
@output_options
def models(config_path: Path | None, output: Output) -> None:
    """Example: mlxsup models

    Lists the configured models and those found in the Hugging Face cache, the folders of LM Studio
    and ~/.mlxsup/models, with their sizes. If a model cannot be served, it says why. No daemon is
    needed.
    """
    from ..catalogue import NONE_HINT, SEARCHED, catalogue
    from ..configuration import optional_configuration

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
        output.data(f"no models found in {SEARCHED}")
        output.note(f"hint: {NONE_HINT}")
    elif configuration is None and any(row["problem"] is None for row in found):
        output.note("hint: write a configuration with these models: `mlxsup init`")
    elif any(row["problem"] is None for row in found):
        output.note("hint: `mlxsup add MODEL` adds one of these to the configuration")


def _show(title: str, rows: Sequence[Mapping[str, Any]], output: Output) -> None:
    """Print a row for each model, and then why some cannot be served."""
    output.data(title)
    headings, cells = with_capabilities(HEADINGS, [_cells(row) for row in rows], rows)
    output.show(listing(headings, cells, right=("SIZE", "CONTEXT")))
    for row in rows:
        if row["problem"]:
            about = "; ".join(filter(None, (row["problem"], row["hint"])))
            remark = f"  {row['name'] or row['title']}: {about}"
            output.data(remark, "dim")


def with_capabilities(
    headings: Sequence[str], cells: Sequence[Sequence[str]], rows: Sequence[Mapping[str, Any]]
) -> tuple[list[str], list[list[str]]]:
    """Return a table with what the models can do as its second column, unless all only make text.

    Args:
        headings, cells: of the table; one list of cells for each of `rows`.
        rows: of the catalogue.
    """
    can_do = [", ".join(row["capabilities"] or ()) for row in rows]
    if all(can in ("", "text") for can in can_do):
        return list(headings), [list(own) for own in cells]
    name, *rest = headings
    pairs = zip(can_do, cells, strict=True)
    return [name, "CAPABILITIES", *rest], [[own[0], can or "-", *own[1:]] for can, own in pairs]


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    name = row["name"] or row["title"]
    if row["engine"] == "fake":
        return name, "-", "fake engine", "-", "configuration"
    size = format_bytes(row["size_bytes"]) if row["size_bytes"] else "-"
    context = str(row["context_length"]) if row["context_length"] else "-"
    origin = row["repo"] or row["path"] if row["name"] else row["origin"]
    return name, size, row["quantization"] or "-", context, origin


@click.command()
@click.argument("model", shell_complete=complete_model_or_repository)
@config_option
@output_options
def show(model: str, config_path: Path | None, output: Output) -> int:
    """Example: mlxsup show mlx-community/SmolLM2-135M-Instruct

    Shows what MODEL can do, its architecture, format, context, chat template, licence, adapters and
    size, and whether it fits into memory. MODEL is a configured name, OWNER/NAME or a folder. The
    exit code is 1 if the model cannot be served.
    """
    from ..catalogue import find_row
    from ..configuration import optional_configuration

    configuration = optional_configuration(config_path)
    row = find_row(model, configuration)
    needs, problem = _needs(row, configuration, output)
    if problem is not None:
        row |= {"problem": problem.text, "hint": problem.hint or None}
    output.result(row | {"needs": needs}, listing((), _facts(row, needs)))
    if row["hint"]:
        output.note(f"hint: {row['hint']}")
    return ExitStatus.FAILED if row["problem"] else ExitStatus.OK


def _needs(
    row: Mapping[str, Any], configuration: DaemonConfig | None, output: Output
) -> tuple[dict[str, Any] | None, FolderProblem | None]:
    """Return what the model needs in memory, as the plan has it for this one alone; None if it
    cannot be loaded, and why it cannot, if that shows only here or in the content of its files."""
    from mlxsup.store.model_folder import FolderProblem, damage

    from .plan import plan_of_row

    if row["engine"] != "mlx" or row["problem"]:
        return None, None
    if (problem := damage(Path(row["path"]))) is not None:
        return None, problem
    plan = plan_of_row(row, configuration, output)
    [planned] = plan["models"]
    if planned["problem"]:
        return None, FolderProblem(text=planned["problem"])
    return {
        "bytes": planned["needed"]["bytes"],
        "source": planned["needed"]["source"],
        "memory_bytes": planned["memory_bytes"],
        "budget_bytes": plan["budget"]["bytes"],
        "fits": not planned["missing_bytes"],
    }, None


def _facts(row: Mapping[str, Any], needs: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    """Yield the lines for people, as name and text."""
    from importlib.util import find_spec

    unknown = "unknown"
    yield "model", row["name"] or row["title"]
    if row["engine"] != "mlx":
        yield "engine", "fake engine, for tests"
        return
    if row["repo"]:
        yield "repository", f"{row['repo']} at {row['revision']}"
    yield "folder", row["path"]
    kind = row["model_type"] or unknown
    yield "architecture", f"{row['architecture']} ({kind})" if row["architecture"] else kind
    missing = "; for images `pip install 'mlxsup[vision]'`"
    needs_extra = "images" in row["capabilities"] and find_spec("mlx_vlm") is None
    yield "capabilities", ", ".join(row["capabilities"]) + (missing if needs_extra else "")
    yield "format", row["quantization"] or unknown
    tokens = row["context_length"]
    yield "context", f"{tokens} tokens" if tokens else unknown
    if row["task"] == Task.GENERATE:
        yield "chat template", "yes" if row["has_template"] else "none"
    yield "licence", row["licence"] or unknown
    if row["adapters"]:
        yield "adapters", ", ".join(f"{row['name']}:{name}" for name in row["adapters"])
    if row["drafts"] not in (None, "off"):
        yield "drafts", row["drafts"]
    chosen = ", ".join(f"{name} {value:g}" for name, value in row["sampling"].items())
    if row["task"] == Task.GENERATE:
        is_random = row["sampling"].get("temperature")
        yield "sampling", chosen if is_random else "always the likeliest token"
    yield "size", format_bytes(row["size_bytes"]) if row["size_bytes"] else "-"
    if needs is not None:
        about = "about " if needs["source"] == "estimated" else ""
        needed, grown, budget = (
            format_bytes(needs[key]) for key in ("bytes", "memory_bytes", "budget_bytes")
        )
        verdict = f"fits, may grow to {grown}" if needs["fits"] else "does not fit"
        yield "memory", f"needs at least {about}{needed} of {budget}: {verdict}"
    if row["problem"]:
        yield "problem", row["problem"]
