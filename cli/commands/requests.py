"""`mlxsup requests`: every open request, and how far it is."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from ..answer_options import check_text
from ..connection import Target, connect, daemon_options
from ..terminal.output import Output
from ..terminal.reader_watch import reader_watched
from ..terminal.requests_table import request_line, requests_table
from ..terminal.watch import redraw

if TYPE_CHECKING:
    from mlxsup.client import Client

FOLLOW_INTERVAL_S = 1.0


@click.command(short_help="Show every open request.")
@click.option("-f", "--follow", "is_following", is_flag=True, help="Refresh until interrupted.")
@click.option(
    "--client", "name", metavar="NAME", help="Only those of this client, or of this process."
)
@daemon_options
def requests(is_following: bool, name: str | None, target: Target, output: Output) -> None:
    """Example: mlxsup requests -f

    Shows every open request: what runs, what is paused, and what waits, in order, with its place,
    how much of its prompt has been read, when it should start or answer, and what it has cost.
    """
    if name is not None:
        check_text("--client", name, "mlxsup requests")
    with connect(target) as client:
        if is_following:
            _follow(client, name, output)
            return
        value = client.requests(client=name)
    if output.is_json:
        output.object(value)
    else:
        output.data("\n".join(requests_table(output, value)))


def _follow(client: Client, name: str | None, output: Output) -> None:
    try:
        if output.can_redraw(sys.stdout) and not output.is_json:
            redraw(lambda: requests_table(output, client.requests(client=name)), output)
        else:
            with reader_watched(client.close):
                _follow_lines(client, name, output)
    except KeyboardInterrupt:
        # This is how users end it, so it is no failure.
        output.end_line()


def _follow_lines(client: Client, name: str | None, output: Output) -> None:
    """A line for each request that is new, does something else or has ended since the last look."""
    known: dict[str, Mapping[str, Any]] = {}
    while True:
        listed = client.requests(client=name)["requests"]
        now = {one["number"]: one for one in listed}
        for number, one in known.items():
            if number not in now:
                _write({**one, "state": "ended"}, output)
        for number, one in now.items():
            before = known.get(number)
            if before is None or _doing(before) != _doing(one):
                _write(one, output)
        known = now
        time.sleep(FOLLOW_INTERVAL_S)


def _doing(one: Mapping[str, Any]) -> tuple[object, ...]:
    return one["state"], one["place"], one["paused"]


def _write(one: Mapping[str, Any], output: Output) -> None:
    if output.is_json:
        output.object(one)
    else:
        output.data(request_line(one))
