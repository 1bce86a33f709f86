"""The commands about models' processes: `load`, `unload`, `restart` and `wait`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from mlxsup.protocol.context_length import MAX_CONTEXT_LENGTH

from ..arguments import complete_model, model_argument, model_meant, row_called
from ..changes import progress_shown, wait_until_ready
from ..connection import Target, connect, daemon_command, daemon_options
from ..exit_status import interrupt_says
from ..options import duration, load_keep_alive_option
from ..terminal.output import Output
from ..terminal.status import models_lines, warning_lines
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
    output.result({"models": changed}, models_lines(value, changed))
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
        status = wait_until_ready(client, models, output, limit_s=timeout_s)
    rows = [row_called(status, name) for name in models] if models else status["models"]
    shown = [row for row in rows if row is not None]
    lines = models_lines(status, shown) if shown else "no models configured"
    output.result({"models": shown}, lines)
