"""`mlxsup run`: from the name of a model to a conversation, in one command."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from mlxsup.store.hub_cache import find_snapshot, is_owned_repository

from ..arguments import complete_model_or_repository, row_called
from ..connection import Target, daemon_options, status_of_daemon, unknown_model
from ..downloading import checked_repository, download
from ..exit_status import CliError, ExitStatus
from ..terminal.output import Output


@click.command()
@click.argument("repo", shell_complete=complete_model_or_repository)
@daemon_options
@click.pass_context
def run(context: click.Context, repo: str, target: Target, output: Output) -> None:
    """Example: mlxsup run mlx-community/SmolLM2-135M-Instruct

    Chats with REPO, a repository or the name of a configured model. If no daemon runs, the model is
    downloaded, unless it is there, and a daemon is started that serves it: that of the
    configuration file if there is one, which must have the model, or else one with REPO alone. It
    keeps running.
    """
    status = status_of_daemon(target)
    model = _start(repo, target, output) if status is None else _name_of(repo, status)
    from .chat import chat

    context.invoke(
        chat,
        model=model,
        endpoint=target.endpoint,
        config=target.config,
        is_json=output.is_json,
        is_plain=output.is_plain,
    )


def _name_of(repo: str, status: Mapping[str, Any]) -> str:
    """Return what the daemon calls the model.

    Raises:
        CliError: it does not serve it.
    """
    rows = status["models"]
    named = row_called(status, repo)
    found = named or next((row for row in rows if row.get("repo") == repo), None)
    if found is None:
        names = ", ".join(str(row["name"]) for row in rows)
        raise CliError(
            f"the daemon that runs does not serve {repo}; it serves {names}",
            code="unknown_model",
            hint=_way_to_serve(repo, status["config_path"]),
        )
    return str(found["name"])


def _way_to_serve(repo: str, config_path: str | None) -> str:
    """Return the hint that makes the running daemon serve one more repository."""
    if not is_owned_repository(repo):
        return "see `mlxsup status`"
    if config_path is None:
        return f"`mlxsup stop`, then `mlxsup run {repo}`; it was started without a file"
    return f'add a table with repo = "{repo}" to {config_path}, then `mlxsup reload`'


def _start(repo: str, target: Target, output: Output) -> str:
    """Start the daemon that every command looks for here, once it has all files of the model.

    Args:
        repo: a repository, or the name of a configured model.
        target: where no daemon runs.

    Returns:
        What the daemon calls the model.

    Raises:
        CliError: no daemon that serves it can be started there; nothing is downloaded then.
    """
    place = target.find()
    if target.endpoint_source:
        checked_repository(repo)
        raise _no_daemon(
            f"no daemon runs at {place.endpoint}, which {place.source} names",
            f"start one there, or leave {place.source} out: then one is started that serves {repo}",
        )
    if place.config is not None:
        return _start_configured(repo, place.config, target, output)
    if not is_owned_repository(repo):
        checked_repository(repo)
        hint = "start a daemon with `mlxsup start`, or name OWNER/NAME"
        raise _no_daemon(f"no daemon runs that serves {repo}", hint)
    return _start_alone(repo, target, output)


def _no_daemon(message: str, hint: str) -> CliError:
    return CliError(message, code="connection_lost", hint=hint, status=ExitStatus.NO_DAEMON)


def _start_configured(repo: str, config: Path, target: Target, output: Output) -> str:
    """Start the daemon of a configuration file that has the model."""
    from ..configuration import read_configuration
    from .models import entry_called

    configuration = read_configuration(config)
    entry = entry_called(repo, configuration)
    if entry is None:
        raise _unconfigured(repo, config, [str(one.name) for one in configuration.models])
    if entry.download is not None:
        download(entry.download, output, again=f"mlxsup run {repo}")
    arguments = ["--config", os.path.abspath(config.expanduser())]
    pid = _detach(configuration.runtime_dir, configuration.log_dir, arguments)
    _tell(repo, pid, target, output)
    return str(entry.name)


def _unconfigured(repo: str, config: Path, names: Sequence[str]) -> CliError:
    """Return the error of a file whose daemon would not serve the model."""
    if is_owned_repository(repo):
        return CliError(
            f"no daemon runs, and {config}, which says what one serves, does not have {repo}",
            code="unknown_model",
            hint=f'add a table with repo = "{repo}" to it, then `mlxsup run {repo}`',
        )
    checked_repository(repo)
    return unknown_model(repo, names)


def _start_alone(repo: str, target: Target, output: Output) -> str:
    """Start a daemon that has no file and serves one repository."""
    from .start import configure

    repository = checked_repository(repo)
    snapshot = find_snapshot(repo)
    if snapshot is None or not snapshot.is_complete:
        download(repository, output, again=f"mlxsup run {repo}")
    configuration = configure([repo], output, is_shown=False)
    pid = _detach(configuration.runtime_dir, configuration.log_dir, ["--model", repo])
    _tell(repo, pid, target, output)
    return str(configuration.models[0].name)


def _detach(runtime_dir: Path, log_dir: Path, arguments: Sequence[str]) -> int:
    """Start a daemon in the background, and return its pid."""
    from mlxsup.protocol.places import endpoint_in

    from ..detach import start_detached

    return start_detached(endpoint_in(runtime_dir), log_dir, arguments).pid


def _tell(repo: str, pid: int, target: Target, output: Output) -> None:
    """Say that a daemon runs now, and how it is ended."""
    end = target.repeat_in("end it with `mlxsup stop`")
    output.note(f"a daemon serves {repo} now (pid {pid}); {end}")
