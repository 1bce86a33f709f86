"""`mlxsup models` and `mlxsup show`: the models on this machine, without a daemon."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxsup.protocol.context_length import limited_context_length
from mlxsup.protocol.pooling import Task, capabilities
from mlxsup.protocol.suggestions import close_names, did_you_mean
from mlxsup.store.search import FoundModel, Origin, find_models, look_at, served_types

from ..arguments import LATEST, complete_model_or_repository
from ..configuration import optional_configuration
from ..connection import config_option, output_options
from ..exit_status import CliError, ExitStatus
from ..terminal.output import Output
from ..terminal.tables import listing
from ..terminal.text import format_bytes

if TYPE_CHECKING:
    from mlxsup.supervisor.config.load import DaemonConfig
    from mlxsup.supervisor.core.settings import ModelSettings


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
    configuration = optional_configuration(config_path)
    row = find_row(model, configuration)
    needs = _needs(row, configuration, output)
    output.result(row | {"needs": needs}, listing((), _facts(row, needs)))
    if row["hint"]:
        output.note(f"hint: {row['hint']}")
    return ExitStatus.FAILED if row["problem"] else ExitStatus.OK


def find_row(model: str, configuration: DaemonConfig | None) -> dict[str, Any]:
    """Return the row of a model, by its name, alias, repository or folder."""
    rows = catalogue(configuration)
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
    hint = did_you_mean(close_names(model, [row["name"] or row["title"] for row in rows]))
    hint = hint or "see `mlxsup models`"
    message = f"there is no model or folder {model!r} on this machine"
    raise CliError(message, code="unknown_model", hint=hint)


def _needs(
    row: Mapping[str, Any], configuration: DaemonConfig | None, output: Output
) -> dict[str, Any] | None:
    """Return what the model needs in memory, as the plan has it for this one alone; None if it
    cannot be loaded."""
    from .plan import plan_of_row

    if row["engine"] != "mlx" or row["problem"]:
        return None
    plan = plan_of_row(row, configuration, output)
    [planned] = plan["models"]
    if planned["problem"]:
        return None
    return {
        "bytes": planned["needed"]["bytes"],
        "source": planned["needed"]["source"],
        "memory_bytes": planned["memory_bytes"],
        "budget_bytes": plan["budget"]["bytes"],
        "fits": not planned["missing_bytes"],
    }


def _facts(row: Mapping[str, Any], needs: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    """Yield the lines for people, as name and text."""
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


FACTS = (
    "origin", "repo", "revision", "path", "size_bytes", "architecture", "model_type",
    "quantization", "context_length", "task", "capabilities", "adapters", "drafts", "has_template",
    "licence", "sampling", "problem", "hint",
)  # fmt: skip
"""Facts from the files of a model, and from its entry."""

SEARCHED = "the Hugging Face cache, LM Studio's folders and ~/.mlxsup/models"
NONE_HINT = "`mlxsup add OWNER/NAME` downloads one and configures it; see also `mlxsup demo`"


def catalogue(configuration: DaemonConfig | None) -> list[dict[str, Any]]:
    """Return a row for each model: those of the configuration in its order, then others on disk."""
    found = find_models()
    by_folder = {os.path.realpath(model.path): model for model in found}
    rows = []
    used = set()
    for entry in configuration.models if configuration is not None else ():
        folder = os.path.realpath(entry.launch.path) if entry.launch.path else ""
        used.add(folder)
        rows.append(row_of_entry(entry, by_folder.get(folder)))
    return rows + [_row(None, m) for m in found if os.path.realpath(m.path) not in used]


def entry_called(name: str, configuration: DaemonConfig) -> ModelSettings | None:
    """Return the first entry with this name, or else alias, repository, or name and preset or
    adapter."""
    entries = configuration.models
    base, _, variant = name.rpartition(":")
    matches = (
        *(one for one in entries if one.name == name),
        *(one for one in entries if name in one.aliases),
        *(one for one in entries if one.repo == name),
        *(
            one
            for one in entries
            if base in (one.name, *one.aliases)
            and variant in (LATEST, *one.presets, *one.launch.adapters)
        ),
    )
    return next(iter(matches), None)


def row_of_entry(entry: ModelSettings, found: FoundModel | None = None) -> dict[str, Any]:
    """Return the row of a configured model, whose folder may have been looked at already."""
    if entry.launch.engine != "mlx":
        return _row(entry, None)
    path = Path(entry.launch.path)
    found = found or look_at(path, entry.repo or str(path), Origin.CONFIGURED, served_types())
    return _row(entry, replace(found, repo=entry.repo, revision=entry.revision))


def row_of_path(path: Path) -> dict[str, Any]:
    """Return the row of a folder that is named by its path."""
    return _row(None, look_at(path, str(path), Origin.NAMED, served_types()))


def _row(entry: ModelSettings | None, model: FoundModel | None) -> dict[str, Any]:
    """Return a row as `--json` prints it; the fake engine has no model and no files."""
    name = str(entry.name) if entry else None
    aliases = list(entry.aliases) if entry else []
    row: dict[str, Any] = {"name": name, "aliases": aliases, "title": name, "engine": "fake"}
    if model is None:
        return row | dict.fromkeys(FACTS)
    said, problem = model.description, model.problem
    context, task, adapters = said.context_length, said.task, list[str]()
    sampling = said.sampling
    if entry is not None:
        context = limited_context_length(context, entry.launch.context_length)
        task = Task.EMBED if entry.launch.pooling and task is Task.GENERATE else task
        adapters = list(entry.launch.adapters)
        sampling = {**sampling, **entry.launch.sampling}
    return row | {
        "title": model.title,
        "engine": "mlx",
        "origin": str(model.origin),
        "repo": model.repo or None,
        "revision": model.revision or None,
        "path": str(model.path),
        "size_bytes": said.size_bytes,
        "architecture": said.architecture or None,
        "model_type": said.model_type or None,
        "quantization": said.quantization or None,
        "context_length": context,
        "task": task.value,
        "capabilities": capabilities(task, takes_pictures=said.takes_pictures and not adapters),
        "adapters": adapters,
        "drafts": entry.launch.drafts if entry is not None else "off",
        "has_template": bool(said.template),
        "licence": said.licence or None,
        "sampling": sampling,
        "problem": problem.text if problem else None,
        "hint": (problem.hint or None) if problem else None,
    }
