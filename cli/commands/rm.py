"""`mlxsup rm`: removes a downloaded model."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import click

from mlxsup.protocol.close_names import close_names
from mlxsup.protocol.states import State
from mlxsup.store.hub_cache import (
    InUseError,
    find_cache,
    lock_of,
    no_download,
    repositories,
    repository_folder,
)

from ..arguments import repository_argument
from ..connection import Target, daemon_options, meant, status_of_daemon
from ..downloading import checked_repository
from ..exit_status import CliError
from ..terminal.output import Output, confirm
from ..terminal.text import format_bytes

UNUSED = (State.STOPPED, State.FAILED)
"""States in which a model has no use for its files."""


@click.command()
@repository_argument
@click.option("-y", "--yes", "is_sure", is_flag=True, help="Do not ask.")
@daemon_options
def rm(repo: str, is_sure: bool, target: Target, output: Output) -> None:
    """Example: mlxsup rm mlx-community/SmolLM2-135M-Instruct

    Removes REPO, with all its revisions, from the Hugging Face cache, after asking. Refused while
    the daemon uses it, or while it is being downloaded.
    """
    checked_repository(repo)
    cache = find_cache()
    folder = repository_folder(repo, cache)
    if not folder.is_dir():
        hint = meant(close_names(repo, repositories(cache)))
        hint = hint or "`mlxsup models` lists what is there"
        raise CliError(f"{repo} is not in {cache}", code="not_found", hint=hint)
    if folder.is_symlink():
        raise CliError(
            f"{folder} is a link to {os.readlink(folder)}",
            code="is_link",
            hint="remove what it links to, then the link",
        )
    status = status_of_daemon(target) or {"models": []}
    rows = [
        row
        for row in status["models"]
        if row.get("folder") and Path(row["folder"]).is_relative_to(folder)
    ]
    if using := [str(row["name"]) for row in rows if row["state"] not in UNUSED]:
        raise CliError(
            f"{repo} is in use by {', '.join(using)}",
            code="in_use",
            hint=" and ".join(f"`mlxsup unload {name}`" for name in using) + " first",
        )
    size = _size_bytes(folder)
    if not is_sure:
        confirm(f"remove {repo} ({format_bytes(size)}) from {cache}?")
    try:
        with no_download(lock_of(folder)):
            shutil.rmtree(folder)
    except InUseError:
        message, hint = f"{repo} is being downloaded", "wait for that, or end it, and try again"
        raise CliError(message, code="in_use", hint=hint) from None
    except OSError as error:
        left = "part of it is left" if folder.exists() else "its lock is left"
        raise CliError(
            f"{repo} could not be removed, {left}: {error.filename}: {error.strerror}",
            code="not_removed",
            hint=f"make that possible, then `mlxsup rm {repo}` removes the rest",
        ) from None
    output.result(
        {"repo": repo, "folder": str(folder), "freed_bytes": size},
        f"{repo} is removed, {format_bytes(size)} are free",
    )
    for row in rows:
        output.note(f"{row['name']} is still configured: see `mlxsup pull {repo}`")


def _size_bytes(folder: Path) -> int:
    """Return what its files take on the disk; links take nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            found = os.lstat(os.path.join(parent, name))
            total += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return total
