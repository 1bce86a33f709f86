"""`mlxsup log-level`: how much the daemon and its workers log."""

from __future__ import annotations

import click

from mlxsup.protocol.text import LOG_LEVELS

from ..connection import Target, connect, daemon_options
from ..terminal.output import Output


@click.command(short_help="Change how much is logged.")
@click.argument("level", type=click.Choice(LOG_LEVELS))
@daemon_options
def log_level(level: str, target: Target, output: Output) -> None:
    """Example: mlxsup log-level debug

    Makes the daemon and its workers log from LEVEL on, at once and until it ends: debug, info,
    warning or error. `mlxsup logs -f` follows what they write.
    """
    with connect(target) as client:
        value = client.log_level(level)
    if output.is_json:
        output.object(value)
    else:
        output.data(f"logging from {value['level']} on, until the daemon ends")
