"""Finds the models on this machine: in the Hugging Face cache, LM Studio's folders, and our own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from mlxsup.protocol.folders import MODELS_DIR

from .contents import CONFIG
from .description import Description, describe
from .folder_problems import GGUF_SUFFIX, FolderProblem, folder_problem, folders_below
from .hub_cache import (
    REFERENCES,
    SNAPSHOTS,
    find_cache,
    find_snapshot,
    repositories,
    repository_folder,
)
from .lm_studio import model_folders
from .repositories import DEFAULT_REVISION
from .served_types import ServedTypes, served_types

MAX_REFERENCES = 100


class Origin(StrEnum):
    """Whose folder a model is in, or who has named it."""

    HUB = "Hugging Face cache"
    LM_STUDIO = "LM Studio"
    OWN = "mlxsup"
    CONFIGURED = "configuration"
    NAMED = "named"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A model on disk.

    Attributes:
        title: OWNER/NAME, or the folder's name.
        origin: whose folder it is in.
        path: the folder, or the file if it is one GGUF file.
        repo: for `repo` of the configuration; empty if `path` is what an entry takes.
        revision: of the repository; empty without one.
        description: what its folder says.
        problem: why it cannot be served; None if it can, as far as its files show.
    """

    title: str
    origin: Origin
    path: Path
    repo: str = ""
    revision: str = ""
    description: Description
    problem: FolderProblem | None


def find_models(*, cache: Path | None = None, home: Path | None = None) -> list[FoundModel]:
    """All models, each folder once; what cannot be read is passed over.

    Args:
        cache: the Hugging Face cache; None: that of this process's environment.
        home: the user's home; None: that of this process.
    """
    served = served_types()
    found = [*_in_hub(find_cache() if cache is None else cache, served)]
    for folder in model_folders(home):
        found += _below(folder, Origin.LM_STUDIO, served)
    own = MODELS_DIR.removeprefix("~/")
    found += _below((Path.home() if home is None else home) / own, Origin.OWN, served)
    by_folder = {os.path.realpath(model.path): model for model in reversed(found)}
    return [model for model in found if by_folder[os.path.realpath(model.path)] is model]


def look_at(
    path: Path, title: str, origin: Origin, served: ServedTypes | None, **more: str
) -> FoundModel:
    """One folder, whatever it is.

    Args:
        path: the folder.
        title: what to call it.
        origin: whose folder it is in.
        served: the model types that can be served; None: not known.
        more: `repo` and `revision`.
    """
    description = describe(path)
    problem = folder_problem(path)
    kind = description.model_type
    if problem is None and served is not None and kind not in served:
        text = f"mlx-lm serves no models of type {kind}" if kind else f"{path} names no model_type"
        problem = FolderProblem(text=text)
    return FoundModel(
        title=title, origin=origin, path=path, description=description, problem=problem, **more
    )


def _in_hub(cache: Path, served: ServedTypes | None) -> Iterator[FoundModel]:
    try:
        repos = list(repositories(cache))
    except OSError:
        return
    for repo in repos:
        for revision in _revisions(repository_folder(repo, cache)):
            try:
                snapshot = find_snapshot(repo, revision, cache=cache)
            except (OSError, ValueError):
                continue
            if snapshot is not None and _may_be_model(snapshot.path):
                more = {"repo": repo, "revision": revision}
                yield look_at(snapshot.path, repo, Origin.HUB, served, **more)
                break


def _revisions(folder: Path) -> Iterator[str]:
    """The usual revision, then the others that have a name, then the commits without one."""
    yield DEFAULT_REVISION
    references = folder / REFERENCES
    try:
        paths = sorted(path for path in references.rglob("*") if path.is_file())
        yield from (path.relative_to(references).as_posix() for path in paths[:MAX_REFERENCES])
        yield from sorted(os.listdir(folder / SNAPSHOTS))[:MAX_REFERENCES]
    except OSError:
        return


def _may_be_model(folder: Path) -> bool:
    """Whether a snapshot is worth a line: a language model, or a file that could become one."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return CONFIG in names or any(name.lower().endswith(GGUF_SUFFIX) for name in names)


def _below(folder: Path, origin: Origin, served: ServedTypes | None) -> Iterator[FoundModel]:
    """The models at most two levels below a folder."""
    for path in folders_below(folder):
        yield look_at(path, path.relative_to(folder).as_posix(), origin, served)
    for path in sorted(folder.glob("*/*")) if folder.is_dir() else ():
        if path.is_dir() and not (path / CONFIG).is_file() and _may_be_model(path):
            yield look_at(path, path.relative_to(folder).as_posix(), origin, served)
