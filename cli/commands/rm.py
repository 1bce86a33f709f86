"""`mlxsup rm`: removes a model from the configuration, or its files."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from mlxsup.protocol.folders import MODELS_DIR
from mlxsup.protocol.suggestions import close_names, did_you_mean

from ..arguments import complete_model_or_repository, row_called
from ..connection import (
    Target,
    daemon_options,
    status_of_daemon,
    unknown_model,
)
from ..exit_status import CliError
from ..terminal.output import Output, confirm
from ..terminal.text import format_bytes
from .add import file_of

UNUSED = ("STOPPED", "FAILED")
"""States in which a model has no use for its files."""


@click.command()
@click.argument("model", shell_complete=complete_model_or_repository)
@click.option("--files", "has_files", is_flag=True, help="Delete the files of MODEL as well.")
@click.option("-y", "--yes", "is_sure", is_flag=True, help="Skip the question of --files.")
@daemon_options
def rm(model: str, has_files: bool, is_sure: bool, target: Target, output: Output) -> None:
    """Example: mlxsup rm qwen3

    Removes MODEL from the configuration and from a running daemon. Its files stay. If MODEL is an
    alias, only the alias goes.

    With --files it asks, and then deletes the files too, unless they are in use or being
    downloaded. MODEL may then also be OWNER/NAME or a folder in ~/.mlxsup/models.
    """
    status = status_of_daemon(target) or _status_of_file(target)
    if has_files:
        _remove_files(model, status, target, output, is_sure=is_sure)
        return
    if row_called(status, model) is None:
        raise _not_configured(model, status, target)
    removed = _remove_entry(model, target)
    path = removed["path"]
    where = f"from {path}" if path else "from the daemon, which has no file"
    what = model if removed["alias"] is None else f"{model}, another name of {removed['name']},"
    output.result(removed, f"removed {what} {where}")
    if removed["alias"] is None and (files := removed["files"]):
        ours = (
            "" if _is_foreign(files) else f"; `mlxsup rm --files {shlex.quote(files)}` deletes them"
        )
        output.note(target.repeat_in(f"its files stay{ours}"))


def _status_of_file(target: Target) -> dict[str, Any]:
    """Return the models of the configuration as a status has them, none of which is loaded."""
    from ..configuration import read_configuration

    path = file_of(target)
    if not os.path.exists(path.expanduser()):
        return {"models": []}
    rows = [
        {
            "name": str(one.name), "aliases": one.aliases, "state": "STOPPED", "repo": one.repo,
            "folder": one.launch.path,
        }
        for one in read_configuration(path).models
    ]  # fmt: skip
    return {"models": rows}


def _not_configured(model: str, status: Mapping[str, Any], target: Target) -> CliError:
    """Return the error for a model without an entry; the hint is about its files, if any."""
    error = unknown_model(model, [str(row["name"]) for row in status["models"]])
    for row in status["models"]:
        if row.get("repo") == model:
            error.hint = f"it is called {row['name']}: `mlxsup rm {row['name']}` removes it"
            return error
    if not _is_foreign(model) and _place_of(model)[0].is_dir():
        error.message = f"{model} is not configured"
        error.hint = f"`mlxsup rm --files {shlex.quote(model)}` deletes its files"
    return error


def _is_foreign(files: str) -> bool:
    """True if those are another program's: no command of ours deletes them."""
    try:
        _place_of(files)
    except CliError:
        return True
    return False


def _remove_entry(name: str, target: Target) -> dict[str, Any]:
    """Remove the entry of a model, by the daemon if one runs.

    Returns:
        `name`, `alias` if only that was removed, `path`, of the configuration, and `files`, the
        model's.
    """
    from mlxsup.supervisor.config.entries import removing

    from ..configuration import changed

    done = changed(
        target, lambda client: client.remove(name), lambda config: removing(config, name)
    )
    files, path = done["files"], done["config_path"]
    return {"name": done["model"], "alias": done.get("alias"), "path": path, "files": files}


def _remove_files(
    model: str,
    status: Mapping[str, Any],
    target: Target,
    output: Output,
    *,
    is_sure: bool,
) -> None:
    """Remove a repository from the cache, or a folder that `convert` or `demo` has made, and the
    entry of this name, if there is one."""
    import shutil

    from mlxsup.store.hub_cache import InUseError, repositories, sole_user

    row = row_called(status, model)
    entry = None if row is None else str(row["name"])
    folder, cache = _place_of(model if row is None else row["repo"] or row["folder"])
    if not folder.is_dir():
        close = close_names(model, repositories(cache))
        hint = did_you_mean(close) or "`mlxsup models` lists the models on this machine"
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
            f"{model} is loaded"
            if using == [model]
            else f"{model} is in use by {', '.join(using)}",
            code="in_use",
            hint=" and ".join(f"`mlxsup unload {name}`" for name in using) + " first",
        )
    size = _size_bytes(folder)
    if not is_sure:
        confirm(f"delete the files of {model} ({format_bytes(size)}) in {cache}?")
    try:
        with sole_user(folder):
            if entry is not None:
                _remove_entry(entry, target)
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
            hint=f"fix that, then run `mlxsup rm --files {model}` again",
        ) from None
    value = {"repo": model, "folder": str(folder), "freed_bytes": size}
    output.result(value, f"deleted the files of {model}, which frees {format_bytes(size)}")
    for row in rows:
        if row["name"] != entry:
            output.note(f"{row['name']} is still configured: `mlxsup rm {row['name']}` removes it")


def _place_of(model: str) -> tuple[Path, Path]:
    """Return the folder of a model's files, and the folder around it.

    Args:
        model: a folder that `convert` or `demo` has made, by its name or as a path; OWNER/NAME; or
            a name that `mlxsup models` lists.
    """
    from mlxsup.store.hub_cache import find_cache, repository_folder
    from mlxsup.store.sources import find_source, is_reference, repository_named

    from ..configuration import refusals
    from ..downloading import checked_repository

    own = Path(os.path.realpath(Path(MODELS_DIR).expanduser()))
    for folder in (own / model, Path(model).expanduser().absolute()):
        if folder.is_dir() and Path(os.path.realpath(folder)).parent == own:
            return folder, own
    cache = find_cache()
    with refusals():
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
        raise CliError(
            message, code="not_ours", hint="delete it yourself, or with the program that made it"
        )
    return folder, own


def _size_bytes(folder: Path) -> int:
    """Return what its files take on the disk; links take nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            found = os.lstat(os.path.join(parent, name))
            total += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return total
