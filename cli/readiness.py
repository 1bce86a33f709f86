"""Wait until models are READY."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .arguments import row_called
from .connection import unknown_model
from .exit_status import CliError, ExitStatus
from .state_changes import Changes, is_step
from .terminal.change_printer import change_line
from .terminal.live_line import LiveLine
from .terminal.output import Output
from .terminal.status import note_of
from .terminal.text import format_duration

if TYPE_CHECKING:
    from mlxsup.client import Client

Row = Mapping[str, Any]


def wait_until_ready(
    client: Client, names: Sequence[str], output: Output, *, limit_s: float | None = None
) -> dict[str, Any]:
    """Return the daemon's status once these models are READY.

    It shows each change of their states on standard error, and on a terminal how far they are.

    Args:
        client: of the daemon; this takes its one subscription.
        names: of models, or their aliases; if there are none, every model that is coming up.
        output: how to write output.
        limit_s: for how long to wait at most; 0 only looks; None for no limit.

    Raises:
        CliError: one has FAILED, does not come up, or is unknown; or the time is over (124).
        RequestError, ConnectionLost: the daemon has ended.
    """
    give_up_at = None if limit_s is None else time.monotonic() + limit_s
    changes = Changes(client)
    with LiveLine(output) as line:
        while True:
            status = client.status()
            pending = _pending(_chosen(status, names), is_named=bool(names))
            if not pending:
                return status
            left_s = None if give_up_at is None else max(0.0, give_up_at - time.monotonic())
            heard = changes.wait(left_s)
            for change in heard:
                if any(change["model"] == row["name"] for row in pending):
                    _show(change, line, output)
            if not heard:
                raise _late(pending, limit_s or 0.0)


def _chosen(status: Mapping[str, Any], names: Sequence[str]) -> list[Row]:
    if not names:
        return list(status["models"])
    rows: list[Row] = []
    for name in names:
        row = row_called(status, name)
        if row is None:
            raise unknown_model(name, [one["name"] for one in status["models"]])
        rows.append(row)
    return rows


def _pending(rows: Sequence[Row], *, is_named: bool) -> list[Row]:
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
                f"{name} is {row['state']}, and nothing loads it",
                code="not_loading",
                hint=f"load it with `mlxsup load {name}`",
            )
    return [row for row in rows if row["wanted"] == "up" and row["state"] != "READY"]


def _show(change: dict[str, Any], line: LiveLine, output: Output) -> None:
    if is_step(change):
        line.remark(change_line(change))
    else:
        line.show(change_line(change))


def _late(pending: Sequence[Row], limit_s: float) -> CliError:
    said = [f"{row['name']} is {row['state']}" for row in pending]
    notes = [note_of(row, time.time()) for row in pending]
    parts = [f"{what} ({note})" if note else what for what, note in zip(said, notes, strict=True)]
    after = f" after {format_duration(limit_s)}" if limit_s else ""
    return CliError(
        f"not READY{after}: {', '.join(parts)}",
        code="timeout",
        hint="wait longer, or see `mlxsup status`",
        status=ExitStatus.TIMED_OUT,
    )
