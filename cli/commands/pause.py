"""`mlxsup pause`: makes a request wait."""

from __future__ import annotations

import click

from ..connection import Target, connect, daemon_options
from ..request_ids import request_argument, stage_line
from ..terminal.output import Output


@click.command()
@request_argument
@daemon_options
def pause(request: str, target: Target, output: Output) -> None:
    """Example: mlxsup pause 5f0c12ab-1

    Takes the request ID, whoever sent it, out of its batch until `mlxsup resume ID`. `mlxsup
    requests` shows the ids.
    """
    with connect(target) as client:
        value = client.pause(request)
    if output.is_json:
        output.object(value)
    else:
        output.data(stage_line(value))
