"""The commands about requests: `requests`, `attach`, `cancel`, `pause`, `resume`, `prioritize`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from ..arguments import request_argument, request_called
from ..connection import Target, connect, daemon_command, daemon_options
from ..exit_status import interrupt_says
from ..options import PRIORITY, check_text
from ..terminal.answer import AnswerScreen, read_answer, result_map
from ..terminal.output import Line, Output, width_of
from ..terminal.reader_watch import reader_watched
from ..terminal.requests import request_line, request_lines, stage_line

if TYPE_CHECKING:
    from mlxsup.client import Client


@click.command()
@click.option(
    "--client", "name", metavar="NAME", help="Only show requests of this client or process."
)
@daemon_options
def requests(name: str | None, target: Target, output: Output) -> None:
    """Example: mlxsup requests

    Shows every request that runs, is paused or waits, in order: its place in the queue, how much of
    its prompt has been read, when it should start, and the engine time it has used. `mlxsup top`
    refreshes that.
    """
    if name is not None:
        check_text("--client", name, "mlxsup requests")
    with connect(target) as client:
        value = client.requests(client=name)
    output.result(value, _lines(value))


def _lines(value: Mapping[str, Any]) -> list[Line]:
    if not value["requests"]:
        return [[("no open requests", "")]]
    lines = request_lines(value["requests"], width_of(sys.stdout))
    return [*lines, [(f"and {value['more']} more", "")]] if value["more"] else lines


@click.command()
@request_argument
@daemon_command
def cancel(request: str, client: Client, output: Output) -> None:
    """Example: mlxsup cancel 12

    Cancels the request ID of any client. The client keeps the text it has received. ID is an id or
    a number that `mlxsup requests` shows, or `last`.
    """
    value = client.cancel(request)
    output.result(value, stage_line({**value, "stage": "cancelled"}))


@click.command()
@request_argument
@daemon_command
def pause(request: str, client: Client, output: Output) -> None:
    """Example: mlxsup pause 12

    Pauses the request ID of any client until `mlxsup resume ID`. ID is an id or a number that
    `mlxsup requests` shows, or `last`.
    """
    value = client.pause(request)
    output.result(value, stage_line(value))


@click.command()
@request_argument
@daemon_command
def resume(request: str, client: Client, output: Output) -> None:
    """Example: mlxsup resume 12

    Continues the request ID where `mlxsup pause` stopped it, as soon as the model has room. ID is
    an id or a number that `mlxsup requests` shows, or `last`.
    """
    value = client.resume(request)
    output.result(value, stage_line(value))


@click.command()
@request_argument
@click.argument("priority", metavar="CLASS", type=PRIORITY)
@daemon_command
def prioritize(request: str, priority: str, client: Client, output: Output) -> None:
    """Example: mlxsup prioritize 12 interactive

    Changes the priority of the request ID of any client to the CLASS interactive, normal or batch.
    Its wait so far no longer counts. ID is an id or a number that `mlxsup requests` shows, or
    `last`.
    """
    changed = client.prioritize(request, priority)
    does = "runs" if changed["is_running"] else "waits"
    name, model, now = changed["id"], changed["model"], changed["priority"]
    output.result(changed, f"{name} {does} for {model} as {now} (was {changed['before']})")


@click.command()
@request_argument
@daemon_command
def attach(client: Client, request: str, output: Output) -> None:
    """Example: mlxsup attach last

    Prints the answer to the request ID of any client, from its first token on. Ctrl-C does not
    affect the request. ID is an id or a number that `mlxsup requests` shows, or `last`.
    """
    known = request_called(client.requests()["requests"], request)
    if known is not None:
        request = str(known["id"])  # `last` may be another one soon
    model = "" if known is None else str(known["model"])
    screen = AnswerScreen(model, output)
    if known is not None and known["state"] != "answering":
        output.note(request_line(known), "dim")
    with (
        interrupt_says(f"The answer continues. `mlxsup attach {request}` shows it again."),
        screen,
        # Leaving the block only ends the listening.
        reader_watched(client.close),
        client.attach(request) as stream,
    ):
        result = read_answer(stream, screen, output)
    if output.is_json:
        output.object(result_map(model, stream.request_id, result))
