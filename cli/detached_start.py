"""What `start --detach` says, once the daemon answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .connection import Target, connect
from .exit_status import CliError
from .readiness import wait_until_ready
from .terminal.output import Output

if TYPE_CHECKING:
    from .detach import Started


def report(started: Started, target: Target, output: Output, *, is_waiting: bool) -> None:
    """Says where the daemon listens and how it is ended.

    Args:
        started: the daemon.
        target: the options with which commands reach it.
        output: how to write output.
        is_waiting: whether to return only when the models that it loads are READY.

    Raises:
        CliError: one of them has FAILED; the daemon runs.
    """
    if not output.is_json:
        output.data(f"listening at {started.endpoint} (pid {started.pid})")
        hint = target.repeat_in("end it with `mlxsup stop`")
        output.note(f"output goes to {started.output}; {hint}")
    if is_waiting:
        try:
            with connect(Target(endpoint=started.endpoint)) as client:
                status = wait_until_ready(client, (), output)
        except CliError as error:
            error.hint = target.repeat_in(error.hint)
            raise
        if not (output.is_json or any(row["state"] == "READY" for row in status["models"])):
            output.note(
                "nothing is loaded yet: a model with `preload = false` is loaded on request"
            )
    if output.is_json:
        output.object(
            {"endpoint": started.endpoint, "pid": started.pid, "output": str(started.output)}
        )
