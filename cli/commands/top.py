"""`mlxsup top`: what runs, on the whole screen, until the user leaves."""

from __future__ import annotations

import sys

import click

from ..connection import Target, connect, daemon_options
from ..terminal.output import Output
from .status import watch


@click.command()
@daemon_options
def top(target: Target, output: Output) -> None:
    """Example: mlxsup top

    Shows models, memory, requests and the latest events on the whole screen. Press ? for the keys
    that load, unload and restart a model or pause and cancel a request, and q to quit. In a pipe
    and with --json it prints what `mlxsup status --watch` does.
    """
    with output.until_interrupted(), connect(target) as client:
        client.ping()  # or else the screen is not taken
        streams = (sys.stdin, sys.stdout)
        # It draws on standard output, and reads keys.
        if output.is_json or not all(output.can_redraw(stream) for stream in streams):
            watch(client, client.status, output)
            return
    from ..top import run

    with output.until_interrupted():
        run(client.endpoint, output)
