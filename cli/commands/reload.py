"""`mlxsup reload`: applies the configuration file to the running daemon."""

from __future__ import annotations

from typing import Any

import click

from ..connection import Target, connect, daemon_options
from ..exit_status import CliError, ExitStatus
from ..terminal.output import Output
from ..terminal.quantities import format_bytes
from ..terminal.status_table import show_models


@click.command()
@daemon_options
def reload(target: Target, output: Output) -> None:
    """Example: mlxsup reload

    Makes the daemon read its configuration file again and shows what changed. If anything in the
    file is wrong, nothing changes.
    """
    from mlxsup.client import RequestError

    with connect(target) as client:
        try:
            value = client.reload()
        except RequestError as error:
            if "problems" not in error.detail:
                raise
            raise CliError(
                error.message,
                code="bad_configuration",
                hint="correct the file, then `mlxsup reload`",
                status=ExitStatus.BAD_CONFIGURATION,
            ) from None
        status = client.status()
    touched = {*value["added"], *value["changed"], *value["removed"]}
    rows = [row for row in status["models"] if row["name"] in touched]
    if value["later"]:
        output.note(f"takes effect at the next start: {', '.join(value['later'])}")
    if value["over_budget_bytes"]:
        over = format_bytes(value["over_budget_bytes"])
        output.note(
            f"{over} more is reserved than the new memory budget: idle models are evicted now,"
            " busy ones when their turn is over, or once they are idle"
        )
    if output.is_json:
        output.object({**value, "models": rows})
    elif rows:
        show_models(output, status, rows)
    else:
        output.data(_summary(value))
    if value["settings"] and rows:
        output.note(f"settings changed: {', '.join(value['settings'])}")


def _summary(value: dict[str, Any]) -> str:
    parts = {"removed": value["removed"], "settings changed:": value["settings"]}
    said = [f"{what} {', '.join(names)}" for what, names in parts.items() if names]
    return "; ".join(said) or "nothing has changed"
