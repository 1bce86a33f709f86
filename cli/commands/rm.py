"""`mlxsup rm`: removes a model from the configuration, or its files."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import stat
from collections.abc import MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from mlxsup.protocol.close_names import close_names
from mlxsup.protocol.folders import MODELS_DIR
from mlxsup.protocol.states import State
from mlxsup.store.hub_cache import (
    InUseError,
    find_cache,
    lock_of,
    no_download,
    repositories,
    repository_folder,
)

from ..arguments import complete_model_or_repository
from ..configuration import change_configuration, read_configuration
from ..connection import Target, connect, daemon_options, meant, status_of_daemon
from ..downloading import checked_repository
from ..exit_status import CliError
from ..terminal.output import Output, confirm
from ..terminal.text import format_bytes
from .add import file_of

UNUSED = (State.STOPPED, State.FAILED)
"""States in which a model has no use for its files."""


@click.command()
@click.argument("model", shell_complete=complete_model_or_repository)
@click.option("-y", "--yes", "is_sure", is_flag=True, help="Skip the question.")
@daemon_options
def rm(model: str, is_sure: bool, target: Target, output: Output) -> None:
    """Example: mlxsup rm mlx-community/SmolLM2-135M-Instruct

    Removes MODEL. For a configured name, it removes the model from the configuration and from a
    running daemon; its files stay. For OWNER/NAME or a folder in ~/.mlxsup/models, it asks and then
    deletes the files, unless they are in use or being downloaded.
    """
    path = file_of(target)
    if path is not None and os.path.exists(path.expanduser()):
        entries = {str(one.name): one for one in read_configuration(path).models}
        if (entry := entries.get(model)) is not None:
            files = entry.repo or entry.launch.path
            _remove_entry(path, model, files, target, output, is_last=len(entries) == 1)
            return
    _remove_files(model, target, output, is_sure=is_sure)


def _remove_entry(
    path: Path, name: str, files: str, target: Target, output: Output, *, is_last: bool
) -> None:
    """Remove the entry of a model, and have the daemon that runs read its file again."""
    if is_last:
        raise CliError(
            f"{name} is the only model in {path}, which needs at least one",
            code="last_model",
            hint="add another model first with `mlxsup add`, or stop the daemon with `mlxsup stop`",
        )
    try:
        change_configuration(path, partial(_pop, name))
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}", code="output") from None
    if status_of_daemon(target) is not None:
        with connect(target) as client:
            client.reload()
    output.result({"name": name, "path": str(path)}, f"removed {name} from {path}")
    if files:
        output.note(f"its files are still there; `mlxsup rm {shlex.quote(files)}` deletes them")


def _pop(name: str, models: MutableMapping[str, Any]) -> None:
    """Remove a table; comments that follow its last line are about the next one, and stay."""
    from tomlkit.items import Table

    others = list(models)
    place = others.index(name)
    others.remove(name)
    last = models.pop(name)
    after, before = others[place : place + 1], others[-1]
    while isinstance(last, Table) and last.value.body and isinstance(last.value.body[-1][1], Table):
        last = last.value.body[-1][1]
    if not isinstance(last, Table) or not isinstance(models[(after or [before])[0]], Table):
        return
    tail = itertools.takewhile(lambda pair: pair[0] is None, reversed(last.value.body))
    items = [item for _, item in reversed(list(tail))]
    if after:
        trivia = models[after[0]].trivia
        trivia.indent = "".join(item.as_string() for item in items) + trivia.indent
    else:
        for item in items:
            models[before].add(item)


def _remove_files(model: str, target: Target, output: Output, *, is_sure: bool) -> None:
    """Remove a repository from the cache, or a folder that `convert` or `demo` has made."""
    folder = _own_folder(model)
    cache = find_cache() if folder is None else folder.parent
    if folder is None:
        checked_repository(model)
        folder = repository_folder(model, cache)
    if not folder.is_dir():
        close = close_names(model, repositories(cache))
        hint = meant(close) or "`mlxsup models` lists the models on this machine"
        raise CliError(f"{model} is not in {cache}", code="not_found", hint=hint)
    if folder.is_symlink():
        raise CliError(
            f"{folder} is a link to {os.readlink(folder)}",
            code="is_link",
            hint="delete the folder it links to, then the link",
        )
    status = status_of_daemon(target) or {"models": []}
    rows = [
        row
        for row in status["models"]
        if row.get("folder") and Path(row["folder"]).is_relative_to(folder)
    ]
    if using := [str(row["name"]) for row in rows if row["state"] not in UNUSED]:
        raise CliError(
            f"{model} is in use by {', '.join(using)}",
            code="in_use",
            hint=" and ".join(f"`mlxsup unload {name}`" for name in using) + " first",
        )
    size = _size_bytes(folder)
    if not is_sure:
        confirm(f"remove {model} ({format_bytes(size)}) from {cache}?")
    try:
        with no_download(lock_of(folder)):
            shutil.rmtree(folder)
    except InUseError:
        message, hint = (
            f"{model} is being downloaded",
            "wait for the download or stop it, then try again",
        )
        raise CliError(message, code="in_use", hint=hint) from None
    except OSError as error:
        left = "part of it is left" if folder.exists() else "its lock is left"
        raise CliError(
            f"{model} could not be removed, {left}: {error.filename}: {error.strerror}",
            code="not_removed",
            hint=f"fix that, then run `mlxsup rm {model}` again",
        ) from None
    value = {"repo": model, "folder": str(folder), "freed_bytes": size}
    output.result(value, f"removed {model}, which frees {format_bytes(size)}")
    for row in rows:
        output.note(f"{row['name']} is still configured: `mlxsup rm {row['name']}` removes it")


def _own_folder(model: str) -> Path | None:
    """Return the folder in ~/.mlxsup/models that is named, by its name or as a path, if any."""
    own = Path(os.path.realpath(Path(MODELS_DIR).expanduser()))
    named = Path(model).expanduser()
    for folder in (own / model, named.absolute()):
        if folder.is_dir() and Path(os.path.realpath(folder)).parent == own:
            return folder
    return None


def _size_bytes(folder: Path) -> int:
    """Return what its files take on the disk; links take nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            found = os.lstat(os.path.join(parent, name))
            total += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return total
