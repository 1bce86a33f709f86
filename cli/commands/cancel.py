"""`mlxsup cancel`: ends a request."""

from __future__ import annotations

import click

from ..connection import Target, connect, daemon_options
from ..request_ids import request_argument
from ..terminal.output import Output


@click.command(short_help="End a request.")
@request_argument
@daemon_options
def cancel(request: str, target: Target, output: Output) -> None:
    """Example: mlxsup cancel 5f0c12ab-1

    Ends the request ID, whoever sent it: its stream ends as `cancelled`, with what it has got so
    far. `mlxsup requests` shows the ids.
    """
    with connect(target) as client:
        value = client.cancel(request)
    if output.is_json:
        output.object(value)
        return
    sent = value["tokens_sent"]
    tokens = "1 token" if sent == 1 else f"{sent} tokens"
    output.data(f"{value['request']} of {value['model']}: cancelled after {tokens}")
