"""`mlxsup load`: loads a model."""

from __future__ import annotations

import click

from ..changed_model import show_changed
from ..connection import Target, connect, daemon_options
from ..model_names import model_argument
from ..terminal.output import Output
from ..terminal.waiting import progress_shown


@click.command(short_help="Load a model.")
@model_argument
@daemon_options
def load(model: str, target: Target, output: Output) -> None:
    """Example: mlxsup load smollm2

    Loads MODEL and returns once it is READY.
    """
    with connect(target) as client:
        with progress_shown(client, model, output):
            client.load(model)
        show_changed(client, model, output)
