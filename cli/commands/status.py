"""The commands that look at a daemon: `status` and `events`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import click

from mlxsup.protocol.text import rank_name

from ..arguments import check_known, optional_model_argument
from ..changes import change_line, state_changes
from ..connection import Target, connect, daemon_options
from ..exit_status import ExitStatus, misuse
from ..terminal.output import ESCAPE, Line, Output, terminal_size, width_of
from ..terminal.reader_watch import reader_watched
from ..terminal.status import broken_parts, lines_below, models_lines
from ..terminal.tables import text_lines
from ..terminal.text import INDENT, counted, format_bytes, format_duration
from ..terminal.writer import own

if TYPE_CHECKING:
    from mlxsup.client import Client


@click.command()
@optional_model_argument
@click.option("--watch", "is_watching", is_flag=True, help="Refresh until interrupted.")
@click.option("--check", "is_checking", is_flag=True, help="Exit with 1 if anything is broken.")
@click.option(
    "--debug", "is_debug", is_flag=True, help="Also show what loading each model found out."
)
@daemon_options
def status(
    model: str | None,
    is_watching: bool,
    is_checking: bool,
    is_debug: bool,
    target: Target,
    output: Output,
) -> int:
    """Example: mlxsup status --watch

    Shows every model, or MODEL alone: its state, its process, what it is doing and why it last
    ended. With --check, the exit code is 1 if a model is FAILED or in BACKOFF, or if the HTTP
    gateway is down.
    """
    if is_watching and is_checking:
        raise misuse("use either --watch or --check", "mlxsup status")
    with connect(target) as client:

        def ask() -> dict[str, Any]:
            value = client.status(debug=is_debug)
            if model is not None:
                value["models"] = [check_known(value, model)]
            return value

        if is_watching:
            watch(client, ask, output)
            return ExitStatus.OK
        value = ask()
    output.result(value, _lines(value, output))
    broken = broken_parts(value) if is_checking else []
    if broken:
        output.note(f"broken: {', '.join(broken)}")
    return ExitStatus.FAILED if broken else ExitStatus.OK


def watch(client: Client, ask: Callable[[], dict[str, Any]], output: Output) -> None:
    """Show the table until interrupted: every second, or in a pipe with each change."""
    with output.until_interrupted():
        if output.can_redraw(sys.stdout) and not output.is_json:
            _redraw(lambda: _lines(ask(), output), output)
            return
        with reader_watched(client.close):
            changes = state_changes(client)
            value = ask()
            output.result(value, _lines(value, output))
            for _ in changes:
                value = ask()
                output.result(value, chain([[]], _lines(value, output)))


REDRAW_INTERVAL_S = 1.0
CLEAR_REST, CLEAR_BELOW = own(f"{ESCAPE}K"), own(f"{ESCAPE}J")


def _redraw(draw: Callable[[], Iterable[Line]], output: Output) -> None:
    """Show what `draw` returns every second, over what it returned before; ends by an interrupt.

    Not by `rich.live`, which hides the cursor: a signal that ends the command would leave it so.
    """
    up = own("\r")
    while True:
        # Lines that scrolled off the terminal could not be overwritten.
        lines = list(draw())[: terminal_size().lines - 1]
        drawn = "".join(f"{output.drawn(line)}{CLEAR_REST}\n" for line in lines)
        output.data(f"{up}{drawn}{CLEAR_BELOW}", newline=False)
        up = own(f"{ESCAPE}{len(lines)}A\r" if lines else "\r")
        time.sleep(REDRAW_INTERVAL_S)


def _lines(value: Mapping[str, Any], output: Output) -> Iterator[Line]:
    if not value["models"]:
        output.note("no models configured")
    width = width_of(sys.stdout)
    yield from models_lines(value["models"])
    for line in lines_below(value):
        yield from text_lines(line, width, style="dim")
    if "flight" in value:
        for title, found in (*_findings(value), *traffic(value)):
            yield []
            yield from text_lines(title, width, style="bold")
            for line in found:
                yield from text_lines(line, width, indent=INDENT)
        yield []
        yield from text_lines("`mlxsup why MODEL` shows what happened before", width)


def _findings(value: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield what loading each model found out, and how long it took, below a title."""
    for model in value["models"]:
        found = [f"warning: {text}" for text in model.get("warnings") or []]
        if (batching := model.get("batching")) and batching["reason"]:
            found.insert(0, f"batching: {batching['mode']}, {batching['reason']}")
        for one in model.get("ranks") or []:
            held = format_bytes(one["active_bytes"])
            name = rank_name(one["rank"], one["host"], one["address"])
            found.append(f"{name}: {one['state']}, {held}")
        if phases := model.get("load_phases_s"):
            took = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in phases.items())
            found.append(f"load times: {took}")
        if found:
            yield f"found while loading {model['name']}:", found


def traffic(value: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield what requests cost each other in each model, below a title."""
    for model in value["models"]:
        found = []
        if (kept := model.get("decode_kept")) is not None:
            beside = format_duration(model["interleaved_s"])
            found.append(
                f"answers kept {kept:.0%} of their speed while prompts were read, {beside}"
            )
        if count := model.get("shapes_seen"):
            steps = counted(count, "step")
            found.append(f"{steps} of a new shape took {model['shapes_s']:.2f} s")
        if found:
            yield f"traffic of {model['name']} since its load:", found


@click.command()
@daemon_options
def events(target: Target, output: Output) -> None:
    """Example: mlxsup events --json

    Prints a line for each state change of a model, until Ctrl-C.
    """
    with output.until_interrupted(), connect(target) as client, reader_watched(client.close):
        changes = state_changes(client)
        output.note(f"following {client.endpoint}; press Ctrl-C to stop")
        for change in changes:
            output.result(change, change_line(change))
