"""The models that `init`, `models` and `show` speak of: configured ones, and those on disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxsup.store.search import FoundModel, Origin, find_models, look_at, served_types

if TYPE_CHECKING:
    from mlxsup.supervisor.config.load import DaemonConfig
    from mlxsup.supervisor.core.settings import ModelSettings

FACTS = (
    "origin", "repo", "revision", "path", "size_bytes", "architecture", "model_type",
    "quantization", "context_length", "has_template", "licence", "problem", "hint",
)  # fmt: skip
"""What the files of a model say."""

SEARCHED = "the Hugging Face cache, LM Studio's folders and ~/.mlxsup/models"
NONE_HINT = "download one with `mlxsup pull OWNER/NAME`, or see `mlxsup demo`"


def catalogue(configuration: DaemonConfig | None) -> list[dict[str, Any]]:
    """Return a row for each model: those of the configuration in its order, then others on disk."""
    found = find_models()
    by_folder = {os.path.realpath(model.path): model for model in found}
    rows = []
    used = set()
    for entry in configuration.models if configuration is not None else ():
        if entry.launch.engine != "mlx":
            rows.append(_row(str(entry.name), entry.aliases, None))
            continue
        path = Path(entry.launch.path)
        folder = os.path.realpath(path)
        used.add(folder)
        model = by_folder.get(folder)
        if model is None:
            title = entry.repo or str(path)
            model = look_at(path, title, Origin.CONFIGURED, served_types())
        model = replace(model, repo=entry.repo, revision=entry.revision)
        rows.append(_row(str(entry.name), entry.aliases, model))
    return rows + [_row(None, (), m) for m in found if os.path.realpath(m.path) not in used]


def entry_called(name: str, configuration: DaemonConfig) -> ModelSettings | None:
    """Return the first entry with this name, or else with this alias, or else this repository."""
    entries = configuration.models
    matches = (
        *(one for one in entries if one.name == name),
        *(one for one in entries if name in one.aliases),
        *(one for one in entries if one.repo == name),
    )
    return next(iter(matches), None)


def row_of_path(path: Path) -> dict[str, Any]:
    """Return the row of a folder that is named by its path."""
    return _row(None, (), look_at(path, str(path), Origin.NAMED, served_types()))


def _row(name: str | None, aliases: Sequence[str], model: FoundModel | None) -> dict[str, Any]:
    """Return a row as `--json` prints it; the fake engine has no model and no files."""
    row: dict[str, Any] = {"name": name, "aliases": list(aliases), "title": name, "engine": "fake"}
    if model is None:
        return row | dict.fromkeys(FACTS)
    said, problem = model.description, model.problem
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
        "context_length": said.context_length,
        "has_template": said.has_template,
        "licence": said.licence or None,
        "problem": problem.text if problem else None,
        "hint": (problem.hint or None) if problem else None,
    }
