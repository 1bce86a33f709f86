"""The commands about models' processes: `load`, `unload`, `restart` and `wait`."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from mlxsup.protocol.context_length import MAX_CONTEXT_LENGTH

from ..arguments import check_known, complete_model, model_argument, model_meant, row_called
from ..changes import change_line, is_step, progress_shown
from ..connection import Target, connect, daemon_command, daemon_options
from ..exit_status import CliError, ExitStatus, interrupt_says
from ..options import duration, load_keep_alive_option
from ..terminal.output import LiveLine, Output
from ..terminal.status import models_lines, note_of, warning_lines
from ..terminal.text import format_duration
from .add import add_option, served_name

if TYPE_CHECKING:
    from mlxsup.client import Client


@click.command()
@model_argument
@click.option(
    "--dry-run", "is_dry", is_flag=True, help="Only show which models would make room for it."
)
@click.option(
    "--context-length",
    metavar="N",
    type=click.IntRange(0, MAX_CONTEXT_LENGTH),
    help="Context length in tokens; 0 for the longest. `mlxsup reload` resets it.",
)
@load_keep_alive_option
@add_option
@daemon_options
def load(
    model: str,
    is_dry: bool,
    context_length: int | None,
    keep_alive: float | None,
    is_sure: bool,
    target: Target,
    output: Output,
) -> None:
    """Example: mlxsup load smollm2-135m --context-length 8192

    Loads MODEL and returns once it is READY. If memory is short, idle models are unloaded, and busy
    ones make room after their turn; --dry-run only shows which. A changed context length restarts
    the model and lasts until the configuration is reloaded. A MODEL that is not served yet is added
    first, as `mlxsup add` does, if you agree.
    """
    how: dict[str, Any] = {"context_length": context_length, "keep_alive": keep_alive}
    with connect(target) as client:
        if is_dry:
            meant = model_meant(client.status(), model)
            name = model if meant is None else meant.row["name"]
            forecast = client.load(name, dry_run=True, **how)
            output.result(forecast, _forecast_sentence(forecast))
            return
        name, _ = served_name(model, client, target, output, is_sure=is_sure)
        model = name.partition(":")[0]  # without its adapter
        said = f"{model} continues to load. `mlxsup unload {model}` stops it."
        with interrupt_says(said), progress_shown(client, model, output):
            client.load(model, **how)
        _show_changed(client, model, output)


def _forecast_sentence(forecast: Mapping[str, Any]) -> str:
    name, reason = forecast["model"], forecast["reason"]
    match forecast["outcome"]:
        case "loaded":
            return f"nothing to do: {name} {reason}"
        case "fits":
            return f"{name} would be loaded next to the other models: {reason}"
        case "evicts":
            gone = ", ".join(forecast["evicts"])
            return f"{name} would be loaded after unloading {gone}: it {reason}"
        case "downloads":
            return f"{name} would be downloaded first: it {reason}"
        case "swaps":
            busy = ", ".join(forecast["swaps"])
            return f"{name} would be loaded after swapping out {busy}: it {reason}"
        case _:
            return f"{name} would wait: it {reason}"


@click.command()
@model_argument
@daemon_command
def unload(model: str, client: Client, output: Output) -> None:
    """Example: mlxsup unload smollm2-135m

    Waits until the running requests of MODEL have finished, then ends its process.
    """
    unload_model(client, model, output)


def unload_model(client: Client, model: str, output: Output) -> None:
    """Unload a model, and show its row; also for `mlxsup stop MODEL`."""
    said = f"{model} will still be unloaded once its answers are complete."
    with interrupt_says(said), progress_shown(client, model, output):
        client.unload(model)
    _show_changed(client, model, output)


@click.command()
@model_argument
@click.option(
    "--now", is_flag=True, help="Interrupt running answers; they continue after the restart."
)
@click.option("--no-wait", is_flag=True, help="Do not wait until it is READY.")
@daemon_command
def restart(model: str, now: bool, no_wait: bool, client: Client, output: Output) -> None:
    """Example: mlxsup restart smollm2-135m

    Restarts the process of MODEL, clears its crash history and returns once it is READY.
    """
    said = f"The restart of {model} continues. `mlxsup wait {model}` waits for it."
    with interrupt_says(said), progress_shown(client, model, output):
        client.restart(model, now=now, wait=not no_wait)
    _show_changed(client, model, output)


def _show_changed(client: Client, name: str, output: Output) -> None:
    """Print the model's row and its warnings."""
    from mlxsup.client import ConnectionLost

    try:
        value = client.status()
    except ConnectionLost:  # the command succeeded, and the daemon has ended since
        value = {"models": []}
    row = row_called(value, name)
    changed = [] if row is None else [row]
    output.result({"models": changed}, models_lines(changed))
    for shown in changed:
        for line in warning_lines(shown["name"], shown.get("warnings")):
            output.note(line)


@click.command()
@click.argument("models", metavar="[MODEL]...", nargs=-1, shell_complete=complete_model)
@click.option(
    "--timeout",
    "timeout_s",
    metavar="S",
    type=duration,
    help="Exit with 124 after this time, such as 90s or 5m; 0 checks once.",
)
@daemon_command
def wait(models: tuple[str, ...], timeout_s: float | None, client: Client, output: Output) -> None:
    """Example: mlxsup wait smollm2-135m --timeout 5m

    Returns once MODEL is READY or, without MODEL, once every model that is starting is READY. The
    exit code is 1 if a model has FAILED and 124 after the timeout. It starts no load.
    """
    with interrupt_says("Stopped waiting. Loads continue."):
        status = _wait_until_ready(client, models, output, timeout_s)
    rows = [row_called(status, name) for name in models] if models else status["models"]
    shown = [row for row in rows if row is not None]
    lines = models_lines(shown) if shown else "no models configured"
    output.result({"models": shown}, lines)


def _wait_until_ready(
    client: Client, names: Sequence[str], output: Output, limit_s: float | None
) -> dict[str, Any]:
    """Return the daemon's status once these models are READY.

    It shows each change of their states on standard error, and on a terminal how far they are.

    Args:
        client: of the daemon; this takes its one subscription.
        names: of models, or their aliases; if there are none, every model that is coming up.
        output: where changes are shown.
        limit_s: for how long to wait at most; 0 only looks; None for no limit.

    Raises:
        CliError: one has FAILED, does not come up, or is unknown; or the time is over (124).
        RequestError, ConnectionLost: the daemon has ended.
    """
    changes = client.events()
    status = client.status()
    pending = _pending(_chosen(status, names), is_named=bool(names))
    timer = None if limit_s is None else threading.Timer(limit_s, changes.close)
    if timer is not None:
        timer.start()
    try:
        with LiveLine(output) as line:
            waiting = ", ".join(f"{row['name']} ({row['state']})" for row in pending)
            if waiting:
                line.show(f"waiting for {waiting}")
            while pending:
                change = next(changes, None)
                if change is None:
                    raise _too_late(pending, limit_s or 0.0)
                if any(change["model"] == row["name"] for row in pending):
                    if is_step(change):
                        line.remark(change_line(change))
                    else:
                        line.show(change_line(change, has_bar=True))
                status = client.status()
                pending = _pending(_chosen(status, names), is_named=bool(names))
    finally:
        if timer is not None:
            timer.cancel()
    return status


def _chosen(status: Mapping[str, Any], names: Sequence[str]) -> list[Mapping[str, Any]]:
    if not names:
        return list(status["models"])
    return [check_known(status, name) for name in names]


def _pending(rows: Sequence[Mapping[str, Any]], *, is_named: bool) -> list[Mapping[str, Any]]:
    """Return those that are not READY yet but may become so by themselves."""
    for row in rows:
        name = row["name"]
        if row["state"] == "FAILED":
            raise CliError(
                f"{name} has FAILED: {note_of(row, time.time())}",
                code="model_failed",
                hint=f"see `mlxsup logs {name}`, then `mlxsup restart {name}`",
            )
        if is_named and row["wanted"] != "up":
            raise CliError(
                f"{name} is {row['state']} and is not being loaded",
                code="not_loading",
                hint=f"load it with `mlxsup load {name}`",
            )
    return [row for row in rows if row["wanted"] == "up" and row["state"] != "READY"]


def _too_late(pending: Sequence[Mapping[str, Any]], limit_s: float) -> CliError:
    said = [f"{row['name']} is {row['state']}" for row in pending]
    notes = [note_of(row, time.time()) for row in pending]
    parts = [f"{what} ({note})" if note else what for what, note in zip(said, notes, strict=True)]
    after = f" after {format_duration(limit_s)}" if limit_s else ""
    return CliError(
        f"not READY{after}: {', '.join(parts)}",
        code="timeout",
        hint="use a longer --timeout, or see `mlxsup status`",
        status=ExitStatus.TIMED_OUT,
    )
