"""The models on this machine, as `models`, `show` and `init` list them: configured and found."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxsup.protocol.context_length import limited_context_length
from mlxsup.protocol.suggestions import close_names, did_you_mean
from mlxsup.protocol.tasks import Task, capabilities
from mlxsup.store.local_models import FoundModel, Origin, find_models, look_at, served_types

from .arguments import LATEST
from .exit_status import CliError

if TYPE_CHECKING:
    from mlxsup.supervisor.config.load import DaemonConfig
    from mlxsup.supervisor.core.settings import ModelSettings


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
        path = path.absolute()
        return _row(None, look_at(path, str(path), Origin.NAMED, served_types()))
    hint = did_you_mean(close_names(model, [row["name"] or row["title"] for row in rows]))
    hint = hint or "see `mlxsup models`"
    message = f"there is no model or folder {model!r} on this machine"
    raise CliError(message, code="unknown_model", hint=hint)


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
