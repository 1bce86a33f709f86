"""`mlxsup stop`: returns when every process is gone."""

from __future__ import annotations

import time
from typing import Any

import click

from ..connection import Target, connect, daemon_options
from ..duration import duration
from ..exit_status import CliError, ExitStatus
from ..process_names import listed, process_names
from ..terminal.output import Output
from ..terminal.quantities import format_duration

DEFAULT_DRAIN_S = 30.0
DEFAULT_END_S = 15.0
"""How long ending the processes may take after the drain: asking, SIGTERM, SIGKILL, giving up."""

EXTRA_S = 10.0
"""How long the daemon itself may take after that: ending its clients' streams, last log lines."""

REST_S = 2.0
"""A worker that outlives the daemon by this much cannot be ended."""


@click.command()
@click.option("--now", is_flag=True, help="Do not wait for running requests.")
@click.option(
    "--timeout", "timeout_s", metavar="S", type=duration, help="How long to wait for them."
)
@daemon_options
def stop(now: bool, timeout_s: float | None, target: Target, output: Output) -> None:
    """Example: mlxsup stop

    Lets running requests finish, ends every process and returns once all are gone.
    """
    from ..processes import Watched

    with connect(target) as client:
        names = process_names(client.status())
        value = client.stop(now=now, timeout_s=timeout_s)
    watched = Watched([*value["pids"], value["supervisor_pid"]])
    start_s = time.monotonic()

    def say(waited_s: float, left: list[int]) -> None:
        output.note(f"waiting for {listed(left, names)} ({format_duration(waited_s)} so far)")

    left = watched.wait(
        _limit_s(value, now=now, timeout_s=timeout_s), say, value["supervisor_pid"], REST_S
    )
    took_s = time.monotonic() - start_s
    if left and value["supervisor_pid"] not in left:
        raise CliError(
            f"the daemon has ended, but {listed(left, names)} cannot be ended:"
            " SIGKILL has no effect",
            code="left_behind",
            hint="the system cannot end it either; the next start tries again and names it",
            status=ExitStatus.LEFT_BEHIND,
        )
    if left:
        raise CliError(
            f"{listed(left, names)} did not end within {format_duration(took_s)}",
            code="still_running",
            hint="end them with `mlxsup stop --now`",
        )
    if output.is_json:
        output.object({"stopped": True, **value, "took_s": round(took_s, 3)})
    else:
        count = len(value["pids"])
        workers = f"{count} worker{'' if count == 1 else 's'}"
        output.data(f"stopped the daemon (pid {value['supervisor_pid']}) and {workers}")


def _limit_s(value: dict[str, Any], *, now: bool, timeout_s: float | None) -> float:
    end_s = _number(value, "end_limit_s", DEFAULT_END_S) + EXTRA_S
    if now:
        return end_s
    if timeout_s is not None:
        return timeout_s + end_s
    return _number(value, "drain_timeout_s", DEFAULT_DRAIN_S) + end_s


def _number(value: dict[str, Any], name: str, default: float) -> float:
    found = value.get(name)
    return found if isinstance(found, int | float) else default
