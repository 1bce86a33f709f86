"""`mlxsup logs`: what the workers wrote."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import click

from .connection import (
    DEFAULT_LOG_DIR,
    Target,
    connect,
    daemon_options,
    read_toml,
    resolve,
    unknown_model,
)
from .exit_status import CliError, ExitStatus
from .log_files import FollowedFile, log_path, tail
from .output import Output

FOLLOW_INTERVAL_S = 0.15
"""A file has no event that every system tells of, so a follower looks this often."""

DEFAULT_LINES = 100

DAEMON_LOG = "mlxsup"
"""No model has this name; the daemon's own log is shown under it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFolder:
    """Where the logs are and whose they may be."""

    path: Path
    models: list[str]


@click.command(short_help="Show what the workers wrote.")
@click.argument("model", required=False)
@click.option("-f", "--follow", "is_following", is_flag=True, help="Go on as lines come.")
@click.option(
    "-n",
    "--lines",
    "count",
    metavar="N",
    type=click.IntRange(min=0),
    default=DEFAULT_LINES,
    show_default=True,
    help="How many of the last lines, of each model.",
)
@daemon_options
def logs(model: str | None, is_following: bool, count: int, target: Target, output: Output) -> None:
    """Example: mlxsup logs smollm2 -f

    Shows what the process of MODEL wrote, or all models' output, each line with its model's name.
    """
    folder = _find_folder(target)
    if model is not None and model not in [*folder.models, DAEMON_LOG]:
        raise unknown_model(model, folder.models)
    names = folder.models if model is None else [model]
    width = max(map(len, names), default=0) if model is None else 0

    def show(name: str, lines: Iterable[str]) -> None:
        for line in lines:
            if output.is_json:
                output.object({"model": name, "line": line})
            else:
                output.data(f"{name.ljust(width)} | {line}" if model is None else line)

    if not is_following:
        for name in names:
            show(name, tail(log_path(folder.path, name), count))
        return
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(closing(FollowedFile(log_path(folder.path, name))))
            for name in names
        }
        for name, file in files.items():
            show(name, tail(log_path(folder.path, name), count, end=file.start))
        while True:
            for name, file in files.items():
                show(name, file.read_lines())
            time.sleep(FOLLOW_INTERVAL_S)


def _find_folder(target: Target) -> LogFolder:
    """From the daemon, or, where none answers, from the configuration or the default place."""
    try:
        with connect(target) as client:
            value = client.status()
        path = Path(value["log_dir"])
        return LogFolder(path=path, models=[model["name"] for model in value["models"]])
    except CliError as error:
        if error.status is not ExitStatus.NO_DAEMON:
            raise
        folder = _folder_without_daemon(target)
        if folder is None:
            raise
        return folder


def _folder_without_daemon(target: Target) -> LogFolder | None:
    path = Path(DEFAULT_LOG_DIR).expanduser()
    names: list[str] = []
    if target.config is not None:
        tables = read_toml(target.config)
        supervisor, models = tables.get("supervisor", {}), tables.get("models", {})
        if isinstance(supervisor, dict) and "log_dir" in supervisor:
            path = resolve(supervisor["log_dir"], target.config)
        names = list(models) if isinstance(models, dict) else []
    elif target.endpoint is not None or "MLXSUP_ENDPOINT" in os.environ:
        # Another daemon than the default one was meant: its logs are not known.
        return None
    elif not path.is_dir():
        return None
    found = [file.name.removesuffix(".log") for file in sorted(path.glob("*.log"))]
    known = dict.fromkeys([*names, *found])
    known.pop(DAEMON_LOG, None)
    return LogFolder(path=path, models=list(known))
