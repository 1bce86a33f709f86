"""`mlxsup top`: what runs, on the whole screen, until the user leaves."""

from __future__ import annotations

import sys

import click

from ..connection import Target, connect, daemon_options
from ..options import duration
from ..terminal.output import Output

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
    that load, unload and restart a model or pause and cancel a request, and q to quit. In a pipe,
    it prints a line for each change.
    """
    with output.until_interrupted():
        if _is_whole_terminal(output):
            from ..top.app import run

            with connect(target) as client:
                client.ping()  # or else the screen is not taken
            run(client.endpoint, interval_s, output)
        else:
            from ..top.looks import follow

            follow(target, interval_s, output)


def _is_whole_terminal(output: Output) -> bool:
    """True if textual can draw, which it does on standard error, and read keys."""
    streams = (sys.stdin, sys.stdout, sys.stderr)
    return not output.is_json and all(output.can_redraw(stream) for stream in streams)
