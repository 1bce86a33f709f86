"""`mlxsup run`: from the name of a model to a conversation, in one command."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click

from ..arguments import complete_model_or_repository
from ..configuration import read_configuration
from ..connection import Target, connect, daemon_options, status_of_daemon
from ..downloading import download
from ..exit_status import CliError, ExitStatus
from ..terminal.output import Output
from .add import add_option, ask_to_add, serve_also, served_name
from .models import entry_called


@click.command()
@click.argument("model", shell_complete=complete_model_or_repository)
@add_option
@daemon_options
@click.pass_context
def run(context: click.Context, model: str, is_sure: bool, target: Target, output: Output) -> None:
    """Example: mlxsup run mlx-community/SmolLM2-135M-Instruct

    Chats with MODEL: a name of the configuration, or anything that `mlxsup add` takes. If need be,
    it downloads the model, adds it to the configuration, which it makes if there is none, and
    starts a daemon. The daemon keeps running.
    """
    name = _serve(model, target, output, is_sure=is_sure)
    from .chat import chat

    context.invoke(
        chat,
        model=name,
        endpoint=target.endpoint,
        config=target.config,
        is_json=output.is_json,
        is_plain=output.is_plain,
    )


def _serve(model: str, target: Target, output: Output, *, is_sure: bool) -> str:
    """Return what the daemon calls the model, once one runs that serves it.

    Raises:
        CliError: no daemon can be started there, or it cannot serve the model.
    """
    status = status_of_daemon(target)
    if status is not None:
        with connect(target) as client:
            return served_name(model, client, target, output, is_sure=is_sure)
    place = target.find()
    if target.endpoint_source:
        raise CliError(
            f"no daemon runs at {place.endpoint}, which {place.source} names",
            code="connection_lost",
            hint=f"start one there, or leave {place.source} out: then one is started that serves"
            f" {model}",
            status=ExitStatus.NO_DAEMON,
        )
    path, name = place.config, ""
    if path is not None:
        entry = entry_called(model, read_configuration(path))
        if entry is None:
            if not is_sure:
                ask_to_add(model, target, output)
        else:
            name = str(entry.name)
            if entry.download is not None:
                download(entry.download, output, again=f"mlxsup run {shlex.quote(model)}")
    if not name:
        added = serve_also(model, None, target, output)
        path, name = added.path, added.name
    assert path is not None
    _start(path, name, target, output)
    return name


def _start(path: Path, name: str, target: Target, output: Output) -> None:
    """Start the daemon of a configuration in the background, and say so."""
    from mlxsup.protocol.places import endpoint_in

    from ..detach import start_detached

    configuration = read_configuration(path)
    arguments = ["--config", os.path.abspath(path.expanduser())]
    endpoint = endpoint_in(configuration.runtime_dir)
    pid = start_detached(endpoint, configuration.log_dir, arguments).pid
    end = target.repeat_in("end it with `mlxsup stop`")
    output.note(f"a daemon serves {name} now (pid {pid}); {end}")
