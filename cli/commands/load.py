"""`mlxsup load`, `unload` and `restart`: what changes one model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..connection import Target, connect, daemon_options
from ..model_names import model_argument
from ..terminal.model_row import warning_lines
from ..terminal.output import Output
from ..terminal.waiting import progress_shown
from .status import show_models

if TYPE_CHECKING:
    from mlxsup.client import Client


@click.command(short_help="Load a model.")
@model_argument
@daemon_options
def load(model: str, target: Target, output: Output) -> None:
    """Example: mlxsup load smollm2

    Loads MODEL, and returns once it is READY.
    """
    with connect(target) as client:
        with progress_shown(client, model, output):
            client.load(model)
        _show_changed(client, model, output)


@click.command(short_help="End a model's process.")
@model_argument
@daemon_options
def unload(model: str, target: Target, output: Output) -> None:
    """Example: mlxsup unload smollm2

    Lets the running requests of MODEL finish, ends its process, and returns once it is gone.
    """
    with connect(target) as client:
        with progress_shown(client, model, output):
            client.unload(model)
        _show_changed(client, model, output)


@click.command(short_help="Give a model a new process.")
@model_argument
@click.option("--now", is_flag=True, help="Do not let running requests finish first.")
@click.option("--no-wait", is_flag=True, help="Do not wait until it is READY.")
@daemon_options
def restart(model: str, now: bool, no_wait: bool, target: Target, output: Output) -> None:
    """Example: mlxsup restart smollm2

    Gives MODEL a new process, clears its crash history, and returns once it is READY.
    """
    with connect(target) as client:
        with progress_shown(client, model, output):
            client.restart(model, now=now, wait=not no_wait)
        _show_changed(client, model, output)


def _show_changed(client: Client, name: str, output: Output) -> None:
    from mlxsup.client import ConnectionLost

    try:
        value = client.status()
    except ConnectionLost:  # the command came true, and the daemon has ended since
        value = {"models": []}
    changed: list[dict[str, Any]] = [row for row in value["models"] if row["name"] == name]
    if output.is_json:
        output.object({"models": changed})
    else:
        show_models(output, value, changed)
        for row in changed:
            for line in warning_lines(name, row.get("warnings")):
                output.note(line)
