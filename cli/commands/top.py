"""`mlxsup top`: what runs, on the whole screen, until the user leaves."""

from __future__ import annotations

import sys

import click

from ..connection import Target, connect, daemon_options
from ..options import duration
from ..terminal.output import Output
from .status import watch

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 3600.0


def _interval(context: click.Context, parameter: click.Parameter, text: str) -> float:
    seconds = duration(text)
    if not MIN_INTERVAL_S <= seconds <= MAX_INTERVAL_S:
        raise click.BadParameter(f"{text!r} is not between 0.1s and 1h")
    return seconds


@click.command()
@click.option(
    "--interval",
    "interval_s",
    metavar="TIME",
    default="1s",
    show_default=True,
    callback=_interval,
    help="The time between two updates.",
)
@daemon_options
def top(interval_s: float, target: Target, output: Output) -> None:
    """Example: mlxsup top

    Shows models, memory, requests and the latest events on the whole screen. Press ? for the keys
    that load, unload and restart a model or pause and cancel a request, and q to quit. In a pipe
    and with --json it prints what `mlxsup status --watch` does.
    """
    with output.until_interrupted(), connect(target) as client:
        client.ping()  # or else the screen is not taken
        streams = (sys.stdin, sys.stdout, sys.stderr)
        # textual draws on standard error, and reads keys.
        if output.is_json or not all(output.can_redraw(stream) for stream in streams):
            watch(client, client.status, output)
            return
    from ..top import run

    with output.until_interrupted():
        run(client.endpoint, interval_s, output)
