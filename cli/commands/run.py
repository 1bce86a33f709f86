"""`mlxsup run`: from the name of a repository to a conversation, in one command."""

from __future__ import annotations

from typing import Any

import click

from mlxsup.store.hub_cache import find_snapshot
from mlxsup.store.repositories import is_owned_repository

from ..connection import Target, daemon_options
from ..daemon_models import models_of_daemon
from ..downloading import checked_repository, download
from ..exit_status import CliError, ExitStatus
from ..model_rows import row_called
from ..repository_names import complete_model_or_repository
from ..terminal.output import Output


@click.command()
@click.argument("repo", shell_complete=complete_model_or_repository)
@daemon_options
@click.pass_context
def run(context: click.Context, repo: str, target: Target, output: Output) -> None:
    """Example: mlxsup run mlx-community/SmolLM2-135M-Instruct

    Chats with REPO, a repository or the name of a configured model. If no daemon runs, the model is
    downloaded, unless it is there, and a daemon is started that serves it; it keeps running.
    """
    rows = models_of_daemon(target)
    if rows is None:
        if not is_owned_repository(repo) or target.endpoint is not None:
            _refuse_to_start(repo, target)
        _serve(repo, output)
        model = repo.rpartition("/")[2]
    else:
        model = _name_of(repo, rows)
    from .chat import chat

    context.invoke(
        chat,
        model=model,
        endpoint=target.endpoint,
        config=target.config,
        is_json=output.is_json,
        is_plain=output.is_plain,
    )


def _name_of(repo: str, rows: list[dict[str, Any]]) -> str:
    """What the daemon calls the repository.

    Raises:
        CliError: it does not serve it.
    """
    named = row_called({"models": rows}, repo)
    found = named or next((row for row in rows if row.get("repo") == repo), None)
    if found is None:
        names = ", ".join(str(row["name"]) for row in rows)
        raise CliError(
            f"the daemon that runs does not serve {repo}; it serves {names}",
            code="unknown_model",
            hint=f'add a table with repo = "{repo}" to its file, then `mlxsup reload`'
            if is_owned_repository(repo)
            else "see `mlxsup status`",
        )
    return str(found["name"])


def _refuse_to_start(repo: str, target: Target) -> None:
    """No daemon runs, and none can be started that serves this.

    Raises:
        CliError: always.
    """
    checked_repository(repo)
    hint = "" if target.endpoint else "start a daemon with `mlxsup start`, or name OWNER/NAME"
    raise CliError(
        f"no daemon runs that serves {repo}",
        code="connection_lost",
        hint=hint,
        status=ExitStatus.NO_DAEMON,
    )


def _serve(repo: str, output: Output) -> None:
    """Starts a daemon that serves the repository, once all of it is there."""
    from mlxsup.protocol.places import endpoint_in

    from ..detach import start_detached
    from .start import configure

    repository = checked_repository(repo)
    snapshot = find_snapshot(repo)
    if snapshot is None or not snapshot.is_complete:
        download(repository, output, again=f"mlxsup run {repo}")
    configuration = configure([repo], output, is_shown=False)
    endpoint = endpoint_in(configuration.runtime_dir)
    started = start_detached(endpoint, configuration.log_dir, ["--model", repo])
    output.note(f"a daemon serves {repo} now (pid {started.pid}); end it with `mlxsup stop`")
