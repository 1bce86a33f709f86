"""`mlxsup restart`: gives a model a new process."""

from __future__ import annotations

import click

from ..changed_model import show_changed
from ..connection import Target, connect, daemon_options
from ..model_names import model_argument
from ..terminal.output import Output
from ..terminal.waiting import progress_shown


@click.command()
@model_argument
@click.option(
    "--now", is_flag=True, help="Interrupt running answers: they continue in the new process."
)
@click.option("--no-wait", is_flag=True, help="Do not wait until it is READY.")
@daemon_options
def restart(model: str, now: bool, no_wait: bool, target: Target, output: Output) -> None:
    """Example: mlxsup restart smollm2

    Gives MODEL a new process, clears its crash history and returns once it is READY.
    """
    with connect(target) as client:
        with progress_shown(client, model, output):
            client.restart(model, now=now, wait=not no_wait)
        show_changed(client, model, output)
