"""Reasons why a path is no model folder, and what to name instead.

By names and the first bytes of files: cheap enough for each model of a configuration, at every
start.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mlxsup.protocol.model_files import is_pointer, is_weight_file, pointer_problem
from mlxsup.protocol.regular_file import kind_of

from .description import CONFIG, INDEX, TOKENIZERS, missing_files, regular_files, shards_of
from .hub_cache import PREFIX, SNAPSHOTS, find_cache, repository_of

GGUF_SUFFIX = ".gguf"
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".npz", ".safetensors")
MAX_NAMED = 3
MAX_LOOKED_AT = 200
"""Folders that are searched for models below one that is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderProblem:
    """The reason why a path cannot be served.

    Attributes:
        text: a sentence without a full stop that names the path.
        hint: what to do; may be empty.
    """

    text: str
    hint: str = ""


def folder_problem(path: Path) -> FolderProblem | None:
    """Return why an absolute path is no model folder; None if all files of one are there, whatever
    they contain."""
    try:
        if not path.exists():
            return _absent(path)
        if not path.is_dir():
            return _file(path)
        names = regular_files(path)
        if CONFIG not in names:
            return _odd_file(path / CONFIG) or _no_model(path, names)
        return _pointer(path, names) or _incomplete(path, names)
    except OSError as error:
        what = error.strerror or str(error)
        return FolderProblem(text=f"{error.filename or path} cannot be read: {what}")


def damage(path: Path) -> FolderProblem | None:
    """Return which file of a model folder was cut off or is no such file; None if none is."""
    from .weights import (
        MAX_HEADERS_BYTES,
        FolderError,
        array_bytes,
        read_header,
    )  # `add` alone does

    hint = "copy or download this file again"
    try:
        for name in filter(is_weight_file, regular_files(path)):
            array_bytes(path / name, *read_header(path / name, MAX_HEADERS_BYTES))
        index = path / INDEX
        if index.is_file() and not shards_of(index):
            return FolderProblem(text=f"{index} is no list of weight files in JSON", hint=hint)
        tokenizer = path / TOKENIZERS[0]
        if tokenizer.is_file() and not _is_tokenizer(tokenizer):
            return FolderProblem(text=f"{tokenizer} is not a tokenizer in JSON", hint=hint)
    except FolderError as error:
        return FolderProblem(text=str(error), hint=hint)
    except OSError as error:
        what = error.strerror or str(error)
        return FolderProblem(text=f"{error.filename or path} cannot be read: {what}")
    return None


def _is_tokenizer(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_bytes())["model"], dict)
    except (ValueError, TypeError, LookupError, RecursionError):
        return False


def _odd_file(path: Path) -> FolderProblem | None:
    """Return what is wrong with a path that is no regular file; None if there is nothing."""
    if not path.exists():
        return None
    kind = kind_of(path.stat().st_mode)
    return FolderProblem(
        text=f"{path} is {kind}, not a regular file", hint="copy the file itself there"
    )


def repository_problem(repo: str, revision: str) -> FolderProblem:
    """Return what to say of a repository that the cache does not have at this revision."""
    at = "" if revision == "main" else f" at {revision}"
    more = "" if revision == "main" else f" --revision {shlex.quote(revision)}"
    return FolderProblem(
        text=f"{repo}{at} is not in the Hugging Face cache {find_cache()}",
        hint=f"download it with `mlxsup pull {repo}{more}`",
    )


def _absent(path: Path) -> FolderProblem:
    text = f"the model folder {path} does not exist"
    repo = repository_of(path)
    if repo is not None:
        return FolderProblem(text=text, hint=f"download it with `mlxsup pull {repo}`")
    return FolderProblem(text=text, hint="`mlxsup models` lists the models on this machine")


def _file(path: Path) -> FolderProblem:
    if path.suffix.lower() == GGUF_SUFFIX:
        return _gguf(path)
    hint = "give the folder of a model"
    if (path.parent / CONFIG).is_file():
        hint = f"give the folder that contains it: {shlex.quote(str(path.parent))}"
    return FolderProblem(text=f"{path} is a file, not a folder with a {CONFIG}", hint=hint)


def _gguf(path: Path) -> FolderProblem:
    return FolderProblem(
        text=f"{path} is a GGUF file, which MLX cannot serve",
        hint=f"convert it with `mlxsup convert {shlex.quote(str(path))}`",
    )


def _no_model(path: Path, names: list[str]) -> FolderProblem:
    """Return what a folder without a config.json is instead."""
    if (path / SNAPSHOTS).is_dir() and path.name.startswith(PREFIX):
        repo = repository_of(path) or path.name
        return FolderProblem(
            text=f"{path} is the cache folder of {repo}, not one of its snapshots",
            hint=f'write repo = "{repo}" instead of path, or start with `--model {repo}`',
        )
    ggufs = [name for name in names if name.lower().endswith(GGUF_SUFFIX)]
    if ggufs:
        return FolderProblem(
            text=f"{path} has GGUF files, which MLX cannot serve",
            hint=f"convert one with `mlxsup convert {shlex.quote(str(path / ggufs[0]))}`",
        )
    if any(name.endswith(OTHER_WEIGHTS) for name in names):
        return FolderProblem(
            text=f"{path / CONFIG} does not exist",
            hint="copy all files of the model, not only its weights",
        )
    if any(name.startswith(PREFIX) for name in os.listdir(path)):
        return FolderProblem(
            text=f"{path} is a Hugging Face cache, not a model folder",
            hint="`mlxsup models` lists the models in it",
        )
    return _parent(path)


def _parent(path: Path) -> FolderProblem:
    """Return which models are below a folder that is none itself."""
    found = list(folders_below(path))
    if not found:
        return FolderProblem(
            text=f"{path} is not a model folder, because it has no {CONFIG}",
            hint="`mlxsup models` lists the models on this machine",
        )
    named = ", ".join(str(folder.relative_to(path)) for folder in found[:MAX_NAMED])
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return FolderProblem(
        text=f"{path} is not a model folder, but contains some: {named}{more}",
        hint=f"choose one of them: {shlex.quote(str(found[0]))}",
    )


def folders_below(path: Path) -> Iterable[Path]:
    """Yield the folders with a config.json at most two levels below a folder, in order.

    Looks at a limited number of folders; what cannot be read is passed over.
    """
    level, left = [path], MAX_LOOKED_AT
    for _ in range(2):
        below: list[Path] = []
        for folder in level:
            for inner in _subfolders(folder)[:left]:
                left -= 1
                if (inner / CONFIG).is_file():
                    yield inner
                else:
                    below.append(inner)
        level = below


def _subfolders(folder: Path) -> list[Path]:
    try:
        names = [name for name in sorted(os.listdir(folder)) if not name.startswith(".")]
        return [folder / name for name in names if os.path.isdir(folder / name)]
    except OSError:
        return []


def _pointer(path: Path, names: list[str]) -> FolderProblem | None:
    for name in names:
        is_needed = is_weight_file(name) or name in (CONFIG, "tokenizer.json", "tokenizer.model")
        if is_needed and is_pointer(path / name):
            text, hint = pointer_problem(path / name)
            return FolderProblem(text=text, hint=hint)
    return None


def _incomplete(path: Path, names: list[str]) -> FolderProblem | None:
    missing = missing_files(path)
    if not missing:
        return None
    weights = [name for name in missing if is_weight_file(name)]
    if (first := path / missing[0]).exists():
        text = f"{first} is {kind_of(first.stat().st_mode)}, not a regular file"
        return FolderProblem(text=text, hint="put the file itself there")
    text = f"{path / missing[0]} does not exist"
    if len(missing) > 1:
        text += f", nor {len(missing) - 1} more of the model's files"
    repo = repository_of(path.parent.parent) if path.parent.name == SNAPSHOTS else None
    if repo is not None:
        return FolderProblem(text=text, hint=f"finish the download: `mlxsup pull {repo}`")
    others = [name for name in names if name.endswith(OTHER_WEIGHTS)]
    if weights and others and not any(map(is_weight_file, names)):
        text = f"{path} has weights for another program ({others[0]}), but no {missing[0]}"
        return FolderProblem(text=text, hint="get the model in the safetensors format")
    return FolderProblem(text=text, hint="copy or download the rest of the model")
