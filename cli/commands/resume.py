"""`mlxsup resume`: lets a paused request continue."""

from __future__ import annotations

import click

from ..connection import Target, connect, daemon_options
from ..request_ids import request_argument, stage_line
from ..terminal.output import Output


@click.command()
@request_argument
@daemon_options
def resume(request: str, target: Target, output: Output) -> None:
    """Example: mlxsup resume 5f0c12ab-1

    Lets the request ID continue where `mlxsup pause` stopped it, as soon as a row is free.
    """
    with connect(target) as client:
        value = client.resume(request)
    if output.is_json:
        output.object(value)
    else:
        output.data(stage_line(value))
