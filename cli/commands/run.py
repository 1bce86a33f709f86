"""`mlxsup run`: from the name of a model to a conversation, in one command."""

from __future__ import annotations

import shlex
import sys
from typing import Any

import click

from mlxsup.protocol.tasks import Task

from ..arguments import check_makes, complete_writer_or_repository
from ..connection import START_S, Target, connect, daemon_options, status_of_daemon
from ..exit_status import NoDaemonError, interrupt_says
from ..options import answer_options, check_parameters, keep_alive_option, priority_options
from ..pictures import image_option
from ..terminal.output import Output
from .add import add_option, ask_to_add, serve_also, served_name

COMMAND = "mlxsup run"


@click.command()
@click.argument("model", shell_complete=complete_writer_or_repository)
@click.argument("prompt", nargs=-1, metavar="[PROMPT]")
@image_option
@answer_options
@priority_options
@keep_alive_option
@add_option
@click.option("-v", "--verbose", "is_verbose", is_flag=True, help="Show how fast it was.")
@daemon_options
@click.pass_context
def run(
    context: click.Context,
    /,
    model: str,
    prompt: tuple[str, ...],
    is_sure: bool,
    target: Target,
    output: Output,
    **options: Any,
) -> int | None:
    """Example: mlxsup run mlx-community/SmolLM2-135M-Instruct

    Chats with MODEL, or answers PROMPT and what is piped in. MODEL is a name of the configuration
    or anything that `mlxsup add` takes. `run` downloads it, adds it to the configuration and starts
    a daemon if necessary. The daemon keeps running.
    """
    from .generate import generate, read_stdin  # help would wait for it

    check_parameters(options, COMMAND)  # before anything is downloaded
    piped = [] if sys.stdin.isatty() else [read_stdin()]
    text = "\n\n".join(filter(None, [*piped, " ".join(prompt)]))
    where = {
        "endpoint": target.endpoint,
        "config": target.config,
        "is_json": output.is_json,
        "is_plain": output.is_plain,
        **options,
    }
    with interrupt_says(f"Stopped. `mlxsup run {shlex.quote(model)}` continues."):
        name = _serve(model, target, output, is_sure=is_sure)
    if text:
        code: int = context.invoke(generate, model=name, prompt=text, **where)
        return code
    from .chat import chat

    context.invoke(chat, model=name, **where)
    return None


def _serve(model: str, target: Target, output: Output, *, is_sure: bool) -> str:
    """Return what the daemon calls the model, once one runs that serves it."""
    if status_of_daemon(target, START_S) is None:
        return start_with(model, target, output, is_sure=is_sure)
    with connect(target) as client:
        name, preset = served_name(
            model, client, target, output, is_sure=is_sure, makes=Task.GENERATE
        )
    return model if preset else name


def start_with(model: str, target: Target, output: Output, *, is_sure: bool) -> str:
    """Start a daemon whose configuration has the model, which is downloaded if necessary, and
    return what the daemon calls the model.
    """
    from ..catalogue import entry_called, row_of_entry
    from ..configuration import read_configuration
    from ..detach import note_started, start_configured
    from ..downloading import download

    place = target.find()
    if target.endpoint_source:
        raise NoDaemonError(
            f"no daemon runs at {place.endpoint}, which {place.source} names",
            f"start one there, or run this without {place.source} to start one that serves {model}",
        )
    path, entry, name = place.config, None, model
    if path is not None:
        entry = entry_called(model, read_configuration(path))
        if entry is None and not is_sure:
            ask_to_add(model, target, output)
    if entry is None:
        added = serve_also(model, None, target, output, command="run", makes=Task.GENERATE)
        path, name = added.path, added.name
        output.note("; ".join(filter(None, [added.sentence, target.repeat_in(added.way_back)])))
    elif entry.download is not None:
        download(entry.download, output, again=f"mlxsup run {shlex.quote(model)}")
    if entry is not None:
        check_makes(row_of_entry(entry), Task.GENERATE, target)
    assert path is not None
    started = start_configured(path)
    note_started(started, target, output)
    if not started.is_ours:
        with connect(target) as client:
            client.reload()  # it may have read the file before our entry was there
    return name
