"""What `load`, `unload` and `restart` show at the end: the model that they changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .model_rows import row_called
from .terminal.output import Output

if TYPE_CHECKING:
    from mlxsup.client import Client


def show_changed(client: Client, name: str, output: Output) -> None:
    """Prints the model's row and its warnings."""
    from mlxsup.client import ConnectionLost

    from .terminal.model_row import warning_lines
    from .terminal.status_table import show_models

    try:
        value = client.status()
    except ConnectionLost:  # the command succeeded, and the daemon has ended since
        value = {"models": []}
    row = row_called(value, name)
    changed = [] if row is None else [row]
    if output.is_json:
        output.object({"models": changed})
    else:
        show_models(output, value, changed)
        for shown in changed:
            for line in warning_lines(shown["name"], shown.get("warnings")):
                output.note(line)
