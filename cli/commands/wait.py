"""`mlxsup wait`: returns once models are READY."""

from __future__ import annotations

import click

from ..connection import Target, connect, daemon_options
from ..duration import duration
from ..model_names import complete_model
from ..model_rows import row_called
from ..readiness import wait_until_ready
from ..terminal.output import Output
from ..terminal.status_table import show_models


@click.command()
@click.argument("models", metavar="[MODEL]...", nargs=-1, shell_complete=complete_model)
@click.option(
    "--timeout",
    "timeout_s",
    metavar="S",
    type=duration,
    help="Exit with 124 if it takes longer: 90s, 5m…; 0 only looks.",
)
@daemon_options
def wait(models: tuple[str, ...], timeout_s: float | None, target: Target, output: Output) -> None:
    """Example: mlxsup wait smollm2 --timeout 5m

    Returns once MODEL is READY; without MODEL, once every model that is coming up is. Exits with 1
    if one has FAILED, and with 124 if the time is over. Loads nothing.
    """
    with connect(target) as client:
        status = wait_until_ready(client, models, output, limit_s=timeout_s)
    rows = [row_called(status, name) for name in models] if models else status["models"]
    shown = [row for row in rows if row is not None]
    if output.is_json:
        output.object({"models": shown})
    elif shown:
        show_models(output, status, shown)
    else:
        output.data("no models configured")
