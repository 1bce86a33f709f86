"""`mlxsup status`: every model, once or until interrupted."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

import click

from ..broken_parts import broken_parts
from ..connection import Target, connect, daemon_options
from ..exit_status import CliError, ExitStatus
from ..terminal.gateway_lines import gateway_lines
from ..terminal.memory_lines import memory_lines
from ..terminal.output import Output, width_of
from ..terminal.sharing_lines import sharing_lines
from ..terminal.spare_lines import spare_lines
from ..terminal.status_table import table_lines
from ..terminal.watch import watch


@click.command()
@click.option("--watch", "is_watching", is_flag=True, help="Refresh until interrupted.")
@click.option("--check", "is_checking", is_flag=True, help="Exit with 1 if anything is broken.")
@click.option("--debug", "is_debug", is_flag=True, help="Add each model's latest events.")
@daemon_options
def status(
    is_watching: bool, is_checking: bool, is_debug: bool, target: Target, output: Output
) -> int:
    """Example: mlxsup status --watch

    Shows every model: its state, its process, what it is doing and why it last ended. With --check
    it exits with 1 if a model is FAILED or in BACKOFF, or if the HTTP gateway is down.
    """
    if is_watching and is_checking:
        raise CliError(
            "use either --watch or --check",
            code="usage",
            hint="see `mlxsup status -h`",
            status=ExitStatus.USAGE,
        )
    with connect(target) as client:
        if is_watching:
            watch(client, lambda: _lines(client.status(debug=is_debug), output), output)
            return ExitStatus.OK
        value = client.status(debug=is_debug)
    output.data("\n".join(_lines(value, output)))
    broken = broken_parts(value) if is_checking else []
    if broken:
        output.note(f"broken: {', '.join(broken)}")
    return ExitStatus.FAILED if broken else ExitStatus.OK


def _lines(value: Mapping[str, Any], output: Output) -> list[str]:
    if output.is_json:
        return [output.object_line(value)]
    if not value["models"]:
        output.note("no models configured")
    table = table_lines(output, value, value["models"])
    width = width_of(sys.stdout)
    for line in (
        *memory_lines(value, width),
        *sharing_lines(value, width),
        *spare_lines(value, width),
        *gateway_lines(value, width),
    ):
        table.append(output.style(line, sys.stdout, dim=True))
    if "flight" not in value:
        return table
    return [*table, *_finding_lines(output, value), *_event_lines(output, value)]


def _finding_lines(output: Output, value: Mapping[str, Any]) -> list[str]:
    """What loading each model found out, and how long it took."""
    lines: list[str] = []
    for model in value["models"]:
        found = [f"warning: {text}" for text in model.get("warnings") or []]
        if (batching := model.get("batching")) and batching["reason"]:
            found.insert(0, f"batching: {batching['mode']}, {batching['reason']}")
        if phases := model.get("load_phases_s"):
            took = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in phases.items())
            found.append(f"seconds of its phases: {took}")
        if found:
            title = f"found while loading {model['name']}:"
            lines += ["", output.style(title, sys.stdout, bold=True)]
            lines += [f"  {line}" for line in found]
    return lines


def _event_lines(output: Output, value: Mapping[str, Any]) -> list[str]:
    """The latest events of each model; `mlxsup why` explains them."""
    from mlxsup.protocol.flight import OF_MODELS, Recorded

    from ..why.recording import kept_in
    from ..why.stories import lines_of

    events: dict[str, list[Recorded]] = {model["name"]: [] for model in value["models"]}
    for recorded in kept_in(value, time.time()):
        if isinstance(recorded.entry, OF_MODELS):
            events.setdefault(recorded.entry.model, []).append(recorded)
    lines: list[str] = []
    for name, recorded_ones in events.items():
        title = f"latest events of {name}:"
        lines += ["", output.style(title, sys.stdout, bold=True)]
        lines += [f"  {line}" for line in lines_of(recorded_ones)] or ["  none"]
    return [*lines, "", "`mlxsup why MODEL` explains them"]
