"""Where the model of an entry is: a folder, or a repository in the Hugging Face cache."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxsup.protocol.download import Repository
from mlxsup.store.hub_cache import find_cache, find_snapshot, repository_folder

from ..core.settings import ModelSettings
from .tables import ModelTable

SOURCES = ("path", "repo", "revision")


def own_source(entry: ModelTable) -> dict[str, Any]:
    """What replaces the defaults' keys about the folder: an entry that says where its model is
    takes none of them."""
    if not {"path", "repo"} & entry.model_fields_set:
        return {}
    return {name: ModelTable.model_fields[name].default for name in SOURCES}


def model_path(path: Path | None, repo: str | None) -> str:
    """Return the model folder, absolute; empty if the entry names none. No file is looked at.

    Args:
        path: that of the entry, absolute.
        repo: that of the entry.

    Returns:
        For a repository, where the cache would have it, so that the error of a load names the
        place; `located` finds the snapshot in there.
    """
    if repo is None:
        return "" if path is None else str(path)
    return str(repository_folder(repo, find_cache()))


def located(model: ModelSettings, path: str, *, is_lacking: bool) -> ModelSettings:
    """Return the entry of a repository with what the cache has of it.

    Args:
        model: its entry.
        path: the folder of the snapshot, or where the cache would have the repository.
        is_lacking: whether files of the repository have to be downloaded before a load.
    """
    download = Repository(model.repo, model.revision) if is_lacking else None
    return replace(model, launch=replace(model.launch, path=path), download=download)


def look_up(model: ModelSettings) -> ModelSettings:
    """Return the entry with what the cache has of its repository; for commands, because this reads
    the cache in this process."""
    if not model.repo:
        return model
    with suppress(OSError):
        snapshot = find_snapshot(model.repo, model.revision)
        if snapshot is not None:
            return located(model, str(snapshot.path), is_lacking=not snapshot.is_complete)
    return model
