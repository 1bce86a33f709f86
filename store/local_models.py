"""The models on this machine: in the Hugging Face cache, LM Studio's folders, and our own."""

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

from .hub_cache import (
    REFERENCES,
    SNAPSHOTS,
    find_cache,
    find_snapshot,
    repositories,
    repository_folder,
)
from .model_folder import (
    CONFIG,
    GGUF_SUFFIX,
    Description,
    FolderProblem,
    describe,
    folder_problem,
    folders_below,
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
    found: dict[str, FoundModel] = {}
    for model in _in_hub(find_cache(), served):
        found.setdefault(os.path.realpath(model.path), model)
    places = [(folder, Origin.LM_STUDIO) for folder in lm_studio_folders()]
    for folder, origin in (*places, (Path(os.path.expanduser(MODELS_DIR)), Origin.OWN)):
        for path in _models_below(folder):
            if (place := os.path.realpath(path)) not in found:
                title = path.relative_to(folder).as_posix()
                found[place] = look_at(path, title, origin, served)
    return list(found.values())


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
        says = f"mlx-lm does not support models of type {kind}"
        problem = FolderProblem(says if kind else f"{path} has no model_type")
    if problem is None and description.task_problem:
        problem = FolderProblem(description.task_problem)
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
            if snapshot is not None and _may_be_model(snapshot):
                more = {"repo": repo, "revision": revision}
                yield look_at(snapshot, repo, Origin.HUB, served, **more)
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


def _models_below(folder: Path) -> Iterator[Path]:
    """Yield the folders of models at most two levels below a folder, then those of GGUF files."""
    yield from folders_below(folder)
    for path in sorted(folder.glob("*/*")):
        if path.is_dir() and not (path / CONFIG).is_file() and _may_be_model(path):
            yield path


def _may_be_model(folder: Path) -> bool:
    """True if a folder is worth a line: a language model, or a file that could become one."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return CONFIG in names or any(name.lower().endswith(GGUF_SUFFIX) for name in names)


def lm_studio_folders() -> list[Path]:
    """Return the folders of LM Studio with publishers in them that exist, each once."""
    user = Path(os.path.expanduser("~"))
    homes = [user / name for name in LM_STUDIO_HOMES]
    try:
        if pointed := (user / LM_STUDIO_POINTER).read_text(encoding="utf-8").strip():
            homes.insert(0, Path(pointed))
    except (OSError, ValueError):
        pass
    folders: dict[Path, None] = {}
    for home in homes:
        try:  # the user may have chosen another folder for downloads
            settings = json.loads((home / "settings.json").read_bytes())
        except (OSError, ValueError, RecursionError):
            settings = None
        chosen = settings.get("downloadsFolder") if isinstance(settings, dict) else None
        if isinstance(chosen, str) and chosen:
            folders[Path(chosen)] = None
        folders[home / "models"] = None
    return [folder for folder in folders if folder.is_dir()]


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
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(keys=keys)):
                if name == REMAPPING:
                    constants = (key.value for key in keys if isinstance(key, ast.Constant))
                    return {key for key in constants if isinstance(key, str)}
    return set()


# ---------------------------------------------------------------- short names


def short_name(title: str, taken: Collection[str]) -> str:
    """Return a free name that is easy to type: `qwen3-0.6b` for `mlx-community/Qwen3-0.6B-4bit`.

    Args:
        title: OWNER/NAME, or the name of a folder.
        taken: names that other models have, in lower case.
    """
    whole = _usable(title.rstrip("/").rpartition("/")[2])
    first, *others = whole.split("-")
    short = "-".join([first, *(word for word in others if not _DROPPED.fullmatch(word))])
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
