"""`mlxsup reload`: a running daemon reads its configuration again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from ..connection import daemon_command
from ..exit_status import CliError, ExitStatus
from ..terminal.output import Line, Output
from ..terminal.status import models_lines
from ..terminal.tables import listing
from ..terminal.text import counted, format_bytes

if TYPE_CHECKING:
    from mlxsup.client import Client

LATER = "after their turn or once they are idle"
FORESEEN = ("MODEL", "CHANGE", "STATE", "WHAT HAPPENS")


@click.command()
@click.option("--dry-run", "is_dry", is_flag=True, help="Only show what would change.")
@daemon_command
def reload(is_dry: bool, client: Client, output: Output) -> None:
    """Example: mlxsup reload

    Makes the daemon read its configuration file again, and shows what changed. A file with errors
    changes nothing; --dry-run only shows what would change.
    """
    with bad_configurations("correct the file, then run `mlxsup reload`"):
        value = client.reload(dry_run=is_dry)
    status = client.status()
    touched = {*value["added"], *value["changed"], *value["removed"]}
    rows = [row for row in status["models"] if row["name"] in touched]
    note_consequences(value, output, is_dry=is_dry)
    for refused in value.get("refuses", ()):
        output.note(f"{refused['model']} could not be loaded: it {refused['reason']}")
    for name, cause in value["unread"].items():
        output.note(f"{name}: {cause}")
    shown: str | Iterable[Line] = _summary(value, is_dry=is_dry)
    if is_dry and value["foreseen"]:
        cells = [
            (one["model"], one["change"], one["state"] or "-", effect_of(one))
            for one in value["foreseen"]
        ]
        shown = listing(FORESEEN, cells)
    elif rows:
        shown = models_lines(rows)
    output.result({**value, "models": rows}, shown)
    if value["settings"] and rows:
        changed = ", ".join(value["settings"])
        output.note(f"settings {'that change' if is_dry else 'changed'}: {changed}")


@contextmanager
def bad_configurations(hint: str) -> Iterator[None]:
    """Raise a daemon's refusal of a whole configuration with the exit code that it has here."""
    from mlxsup.client import RequestError

    try:
        yield
    except RequestError as error:
        if "problems" not in error.detail:
            raise
        status = ExitStatus.BAD_CONFIGURATION
        raise CliError(error.message, hint=hint, status=status) from None


def note_consequences(value: Mapping[str, Any], output: Output, *, is_dry: bool = False) -> None:
    """Say what of a reload takes effect later, and whom it takes memory from."""
    if value["later"]:
        output.note(f"takes effect at the next start: {', '.join(value['later'])}")
    if value["over_budget_bytes"]:
        over = format_bytes(value["over_budget_bytes"])
        what = _freed(value) if is_dry else f"idle models are unloaded now, busy ones {LATER}"
        output.note(f"models may grow to {over} more than the new memory budget: {what}")


def _freed(value: Mapping[str, Any]) -> str:
    """Return how a reload would free what is too much, and of which models."""
    parts = []
    if value["evicts"]:
        parts.append(f"{', '.join(value['evicts'])} would be unloaded")
    if value["still_over_bytes"]:
        parts.append(f"busy models would be unloaded {LATER}")
    return "; ".join(parts) or "workers would release memory they do not need"


def effect_of(row: Mapping[str, Any]) -> str:
    """Return what a reload would do to a model, in a few words."""
    running = row["running"]
    finishes = f"finishes {counted(running, 'running request')}, then " if running else ""
    match row["change"], row["becomes"]:
        case "added", "PENDING":
            return "is loaded"
        case "added", _:
            return "is loaded on request"
        case "removed", _:
            return f"{finishes}ends"
        case _, "DRAINING" | "STOPPING":
            return f"{finishes}restarts"
        case _, "PENDING" if row["state"] != "PENDING":
            return "is loaded again"
        case _, "READY":
            return "takes effect without a restart"
        case _:
            return "takes effect when it is loaded"


def _summary(value: Mapping[str, Any], *, is_dry: bool) -> str:
    parts = {"removed": value["removed"], "settings changed:": value["settings"]}
    if is_dry:
        parts = {"settings that change:": value["settings"]}
    said = [f"{what} {', '.join(names)}" for what, names in parts.items() if names]
    return "; ".join(said) or ("nothing would change" if is_dry else "nothing changed")
