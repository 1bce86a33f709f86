"""`mlxsup rm`: removes a model from the configuration, or its files."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
from collections.abc import Mapping
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
from mlxsup.store.references import find_source, is_reference, repository_named

from ..arguments import complete_model_or_repository, row_called
from ..connection import (
    Target,
    connect,
    daemon_options,
    meant,
    status_of_daemon,
    unknown_model,
)
from ..downloading import checked_repository
from ..exit_status import CliError
from ..terminal.output import Output, confirm
from ..terminal.text import format_bytes
from .add import file_of, refusals

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
    status = status_of_daemon(target)
    rows = status or {"models": []}
    try:
        if is_reference(model) and row_called(rows, model) is None:
            raise unknown_model(model, ())
        removed = _remove_entry(model, target, is_running=status is not None)
    except CliError as error:
        if error.code != "unknown_model":
            raise
        _remove_files(model, rows, output, is_sure=is_sure)
        return
    path = removed["path"]
    where = f"from {path}" if path else "from the daemon, which has no file"
    output.result(removed, f"removed {model} {where}")
    if removed["files"]:
        try:
            _place_of(removed["files"])
        except CliError:  # another program's: no command of ours deletes them
            output.note("its files are still there")
        else:
            files = shlex.quote(removed["files"])
            output.note(f"its files are still there; `mlxsup rm {files}` deletes them")


def _remove_entry(name: str, target: Target, *, is_running: bool) -> dict[str, Any]:
    """Remove the entry of a model, by the daemon if one runs.

    Returns:
        `name`, `path`, of the configuration, and `files`, the model's.

    Raises:
        CliError: `unknown_model`: there is no such entry.
    """
    if is_running:
        with connect(target) as client:
            done = client.remove(name)
        return {"name": name, "path": done["config_path"], "files": done["files"]}
    from mlxsup.supervisor.config.entries import change_file, removing

    path = file_of(target)
    if not os.path.exists(path.expanduser()):
        raise unknown_model(name, ())
    with refusals(path):
        edit = change_file(path, lambda config: removing(config, name))
    return {"name": name, "path": str(path), "files": edit.answer["files"]}


def _remove_files(model: str, status: Mapping[str, Any], output: Output, *, is_sure: bool) -> None:
    """Remove a repository from the cache, or a folder that `convert` or `demo` has made."""
    folder, cache = _place_of(model)
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


def _place_of(model: str) -> tuple[Path, Path]:
    """Return the folder of a model's files, and the folder around it.

    Args:
        model: a folder that `convert` or `demo` has made, by its name or as a path; OWNER/NAME; or
            a name that `mlxsup models` lists.

    Raises:
        CliError: its files are another program's.
    """
    own = Path(os.path.realpath(Path(MODELS_DIR).expanduser()))
    for folder in (own / model, Path(model).expanduser().absolute()):
        if folder.is_dir() and Path(os.path.realpath(folder)).parent == own:
            return folder, own
    cache = find_cache()
    with refusals(Path()):
        repo, _ = repository_named(model)
        if repo and (folder := repository_folder(repo, cache)).is_dir():
            return folder, cache
        if is_reference(model) and not os.path.lexists(Path(model).expanduser()):
            checked_repository(repo or model)
        source = find_source(model)
    if source.repo:
        return repository_folder(source.repo, cache), cache
    folder = source.folder or Path()
    if Path(os.path.realpath(folder)).parent != own:
        message = f"{folder} was not made by mlxsup, which removes no other program's files"
        raise CliError(message, code="not_ours", hint="remove it where it came from")
    return folder, own


def _size_bytes(folder: Path) -> int:
    """Return what its files take on the disk; links take nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            found = os.lstat(os.path.join(parent, name))
            total += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return total
