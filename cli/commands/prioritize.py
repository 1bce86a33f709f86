"""`mlxsup prioritize`: gives a request another class."""

from __future__ import annotations

import click

from ..connection import Target, connect, daemon_options
from ..priority_options import PRIORITY
from ..request_ids import request_argument
from ..terminal.output import Output


@click.command()
@request_argument
@click.argument("priority", metavar="CLASS", type=PRIORITY)
@daemon_options
def prioritize(request: str, priority: str, target: Target, output: Output) -> None:
    """Example: mlxsup prioritize 3f2a9c01-1 interactive

    Gives the request ID, whoever sent it, the CLASS interactive, normal or batch. Its wait so far
    no longer counts. `mlxsup requests` shows the ids.
    """
    with connect(target) as client:
        changed = client.prioritize(request, priority)
    if output.is_json:
        output.object(changed)
        return
    does = "runs" if changed["is_running"] else "waits"
    name, model = changed["id"], changed["model"]
    output.data(f"{name} {does} for {model} as {priority} (was {changed['before']})")
