"""What `load`, `unload` and `restart` show at the end: the model that they changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .terminal.model_row import warning_lines
from .terminal.output import Output
from .terminal.status_table import show_models

if TYPE_CHECKING:
    from mlxsup.client import Client


def show_changed(client: Client, name: str, output: Output) -> None:
    """Prints the model's row and its warnings."""
    from mlxsup.client import ConnectionLost

    try:
        value = client.status()
    except ConnectionLost:  # the command succeeded, and the daemon has ended since
        value = {"models": []}
    changed: list[dict[str, Any]] = [row for row in value["models"] if row["name"] == name]
    if output.is_json:
        output.object({"models": changed})
    else:
        show_models(output, value, changed)
        for row in changed:
            for line in warning_lines(name, row.get("warnings")):
                output.note(line)
