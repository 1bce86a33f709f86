"""Find the models on this machine: in the Hugging Face cache, LM Studio's folders, and our own."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

from mlxsup.protocol.folders import MODELS_DIR
from mlxsup.protocol.ids import DEFAULT_REVISION
from mlxsup.protocol.pooling import ENCODERS

from .description import CONFIG, Description, describe
from .folder_problems import GGUF_SUFFIX, FolderProblem, folder_problem, folders_below
from .hub_cache import (
    REFERENCES,
    SNAPSHOTS,
    find_cache,
    find_snapshot,
    repositories,
    repository_folder,
)

MAX_REFERENCES = 100
MAX_NAME_LENGTH = 64

REMAPPING = "MODEL_REMAPPING"
"""The name that mlx-lm has for its table of types that run the code of another."""

LM_STUDIO_POINTER = ".lmstudio-home-pointer"
"""In the user's home: the folder that LM Studio uses, if it is another than the usual one."""

LM_STUDIO_HOMES = (".lmstudio", ".cache/lm-studio")

_DROPPED = re.compile(
    r"instruct|it|chat|mlx|hf|gguf|dwq|qat|\d+bits?|(bf|fp|f|q|mxfp|nvfp|int)\d+|model"
)
"""Words of a repository's name that are the same for most models."""

_UNUSABLE = re.compile(r"[^a-z0-9._-]+")


class Origin(StrEnum):
    """The owner of the folder that a model is in, or where it is named."""

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


def find_models() -> list[FoundModel]:
    """Return all models, each folder once; what cannot be read is passed over."""
    served = served_types()
    found = [*_in_hub(find_cache(), served)]
    for folder in model_folders():
        found += _below(folder, Origin.LM_STUDIO, served)
    found += _below(Path(MODELS_DIR).expanduser(), Origin.OWN, served)
    by_folder = {os.path.realpath(model.path): model for model in reversed(found)}
    return [model for model in found if by_folder[os.path.realpath(model.path)] is model]


def look_at(
    path: Path, title: str, origin: Origin, served: ServedTypes | None, **more: str
) -> FoundModel:
    """Return what one folder is, whatever it holds.

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
        text = (
            f"mlx-lm does not support models of type {kind}"
            if kind
            else f"{path} has no model_type"
        )
        problem = FolderProblem(text=text)
    if problem is None and description.task_problem:
        problem = FolderProblem(text=description.task_problem)
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
    """Yield the usual revision, then the others that have a name, then the commits without one."""
    yield DEFAULT_REVISION
    references = folder / REFERENCES
    try:
        paths = sorted(path for path in references.rglob("*") if path.is_file())
        yield from (path.relative_to(references).as_posix() for path in paths[:MAX_REFERENCES])
        yield from sorted(os.listdir(folder / SNAPSHOTS))[:MAX_REFERENCES]
    except OSError:
        return


def _may_be_model(folder: Path) -> bool:
    """True if a snapshot is worth a line: a language model, or a file that could become one."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return CONFIG in names or any(name.lower().endswith(GGUF_SUFFIX) for name in names)


def _below(folder: Path, origin: Origin, served: ServedTypes | None) -> Iterator[FoundModel]:
    """Yield the models at most two levels below a folder."""
    for path in folders_below(folder):
        yield look_at(path, path.relative_to(folder).as_posix(), origin, served)
    for path in sorted(folder.glob("*/*")) if folder.is_dir() else ():
        if path.is_dir() and not (path / CONFIG).is_file() and _may_be_model(path):
            yield look_at(path, path.relative_to(folder).as_posix(), origin, served)


# ---------------------------------------------------------------- LM Studio


def model_folders() -> list[Path]:
    """Return the folders of LM Studio with publishers in them that exist."""
    user = Path.home()
    homes = [_pointed_to(user / LM_STUDIO_POINTER), *(user / name for name in LM_STUDIO_HOMES)]
    folders: list[Path] = []
    for one in homes:
        if one is None:
            continue
        for folder in (_chosen(one / "settings.json"), one / "models"):
            if folder is not None and folder.is_dir() and folder not in folders:
                folders.append(folder)
    return folders


def _pointed_to(pointer: Path) -> Path | None:
    try:
        text = pointer.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return Path(text) if text else None


def _chosen(settings: Path) -> Path | None:
    """Return the folder that a user has chosen for downloads."""
    try:
        value = json.loads(settings.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    folder = value.get("downloadsFolder") if isinstance(value, dict) else None
    return Path(folder) if isinstance(folder, str) and folder else None


# ---------------------------------------------------------------- types that mlx-lm serves


class ServedTypes:
    """The model types that the installed mlx-lm has code for, found without importing it."""

    def __init__(self, package: Path) -> None:
        self._package = package
        names = os.listdir(package / "models")
        self._modules = {name.removesuffix(".py") for name in names if name.endswith(".py")}
        self._remapped: set[str] | None = None

    def __contains__(self, kind: str) -> bool:
        """True if models of a type can be served; most types have a module of their name."""
        if kind in ENCODERS or kind in self._modules:
            return True
        if self._remapped is None:
            self._remapped = _remapped(self._package / "utils.py")
        return kind in self._remapped


def served_types() -> ServedTypes | None:
    """Return the model types that can be served; None if mlx-lm is not installed."""
    spec = find_spec("mlx_lm")
    if spec is None or not spec.submodule_search_locations:
        return None
    return ServedTypes(Path(spec.submodule_search_locations[0]))


def _remapped(source: Path) -> set[str]:
    """Return the keys of the table, read from its source; none if it has moved."""
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return set()
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Dict):
            continue
        if any(isinstance(target, ast.Name) and target.id == REMAPPING for target in node.targets):
            keys = (key.value for key in node.value.keys if isinstance(key, ast.Constant))
            return {key for key in keys if isinstance(key, str)}
    return set()


# ---------------------------------------------------------------- short names


def short_name(title: str, taken: Collection[str]) -> str:
    """Return a free name that is easy to type: `qwen3-0.6b` for `mlx-community/Qwen3-0.6B-4bit`.

    Args:
        title: OWNER/NAME, or the name of a folder.
        taken: names that other models have, in lower case.
    """
    whole = _usable(title.rstrip("/").rpartition("/")[2])
    words = whole.split("-")
    short = "-".join([words[0], *(word for word in words[1:] if not _DROPPED.fullmatch(word))])
    for name in (short, whole, _usable(title.replace("/", "-"))):
        if name not in taken:
            return name
    number = 2
    while (name := f"{whole[: MAX_NAME_LENGTH - 6]}-{number}") in taken:
        number += 1
    return name


def _usable(text: str) -> str:
    """Return the text in lower case, with the characters that a model's name may have."""
    usable = _UNUSABLE.sub("-", text.lower()).strip("._-")[:MAX_NAME_LENGTH].rstrip("._-")
    return usable or "model"
