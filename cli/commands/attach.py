"""`mlxsup attach`: joins the stream of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from ..arguments import request_argument
from ..connection import daemon_command
from ..terminal.answer import read_answer, result_map
from ..terminal.output import LiveLine, Output
from ..terminal.reader_watch import reader_watched
from ..terminal.requests import request_line

if TYPE_CHECKING:
    from mlxsup.client import Client


@click.command(short_help="Join the stream of a request.")
@request_argument
@daemon_command
def attach(client: Client, request: str, output: Output) -> None:
    """Example: mlxsup attach 5f0c12ab-1

    Prints the answer of the request ID, whoever sent it, from its first token, and then as it
    comes. Ctrl-C leaves the request alone. `mlxsup requests` shows the ids.
    """
    known = _find(client, request)
    with LiveLine(output) as line:
        if known is not None and known["state"] != "answering":
            if line.is_possible:
                line.show(request_line(known))
            else:
                output.note(request_line(known))
        # Leaving the block only ends the listening.
        with reader_watched(client.close), client.attach(request) as stream:
            result = read_answer(stream, line, output)
    if output.is_json:
        model = "" if known is None else str(known["model"])
        output.object(result_map(model, stream.request_id, result))


def _find(client: Client, request: str) -> Mapping[str, Any] | None:
    """Return the request as `mlxsup requests` lists it."""
    listed = client.requests()["requests"]
    return next((one for one in listed if request in (one["id"], one["number"])), None)
