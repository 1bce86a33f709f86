"""`mlxsup unload`: ends a model's process."""

from __future__ import annotations

import click

from ..changed_model import show_changed
from ..connection import Target, connect, daemon_options
from ..model_names import model_argument
from ..terminal.output import Output
from ..terminal.waiting import progress_shown


@click.command()
@model_argument
@daemon_options
def unload(model: str, target: Target, output: Output) -> None:
    """Example: mlxsup unload smollm2

    Lets running requests of MODEL finish, ends its process and returns once it is gone.
    """
    with connect(target) as client:
        with progress_shown(client, model, output):
            client.unload(model)
        show_changed(client, model, output)
