"""Where the model of an entry is: a folder, or a repository in the Hugging Face cache."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from mlxsup.protocol.download import Repository
from mlxsup.store.hub_cache import find_cache, find_snapshot, repository_folder

from .tables import ModelTable

SOURCES = ("path", "repo", "revision")


def own_source(entry: ModelTable) -> dict[str, Any]:
    """What replaces the defaults' keys about the folder: an entry that says where its model is
    takes none of them."""
    if not {"path", "repo"} & entry.model_fields_set:
        return {}
    return {name: ModelTable.model_fields[name].default for name in SOURCES}


def model_path(path: Path | None, repo: str | None, revision: str) -> str:
    """The model folder, absolute; empty if the entry names none.

    Args:
        path: that of the entry, absolute.
        repo: that of the entry.
        revision: of the repository.

    Returns:
        For a repository, the folder of its snapshot; where the cache would have the repository if
        it does not have that revision, so that the error of a load names the place.
    """
    if repo is None:
        return "" if path is None else str(path)
    cache = find_cache()
    with suppress(OSError):
        snapshot = find_snapshot(repo, revision, cache=cache)
        if snapshot is not None:
            return str(snapshot.path)
    return str(repository_folder(repo, cache))


def missing_repository(repo: str | None, revision: str) -> Repository | None:
    """What must be downloaded before a load; None if the cache has all files that a load needs, or
    the entry names no repository.

    Args:
        repo: that of the entry.
        revision: of the repository.
    """
    if repo is None:
        return None
    with suppress(OSError):
        snapshot = find_snapshot(repo, revision)
        if snapshot is not None and snapshot.is_complete:
            return None
    return Repository(repo, revision)
