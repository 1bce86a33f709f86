"""`mlxsup events`: follows the models' changes of state."""

from __future__ import annotations

import click

from ..connection import Target, connect, daemon_options
from ..exit_status import ExitStatus
from ..state_changes import state_changes
from ..terminal.change_printer import change_line
from ..terminal.output import Output
from ..terminal.reader_watch import reader_watched


@click.command()
@daemon_options
def events(target: Target, output: Output) -> int:
    """Example: mlxsup events --json

    Prints a line each time a model's state changes, until interrupted.
    """
    try:
        with connect(target) as client, reader_watched(client.close):
            changes = state_changes(client)
            output.note(f"following {client.endpoint}; Ctrl-C ends")
            for change in changes:
                if output.is_json:
                    output.object(change)
                else:
                    output.data(change_line(change))
    except KeyboardInterrupt:
        # This is how users end it, so it is no failure.
        output.end_line()
    return ExitStatus.OK
