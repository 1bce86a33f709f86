"""`mlxsup connect`: makes other programs use the daemon."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ..connecting.site import is_key_missing, site_of
from ..connecting.tools import TOOLS
from ..connection import Target, daemon_options
from ..connection import connect as connect_to
from ..exit_status import CliError, ExitStatus
from ..keys import read_key
from ..model_names import complete_model
from ..terminal.output import Output

if TYPE_CHECKING:
    from ..connecting.tools import Change, Model, Settings


@click.command()
@click.argument("tool", type=click.Choice(list(TOOLS)))
@click.option(
    "--model",
    "model",
    metavar="MODEL",
    shell_complete=complete_model,
    help="The model that it uses first; by default, the first one that is READY.",
)
@click.option(
    "--key", metavar="KEY", help="A key of the gateway, if it needs one; - reads it from stdin."
)
@click.option("--write", "is_writing", is_flag=True, help="Write its file; shows what changes.")
@click.option(
    "--undo", "is_undoing", is_flag=True, help="Bring back what was there before --write."
)
@daemon_options
def connect(
    tool: str,
    model: str | None,
    key: str | None,
    is_writing: bool,
    is_undoing: bool,
    target: Target,
    output: Output,
) -> None:
    """Example: mlxsup connect opencode --write

    Prints the settings with which another program uses the models of the daemon, over HTTP. --write
    puts them into its file; a copy of what was there stays next to it, and --undo brings it back.
    """
    if is_undoing:
        if is_writing or model is not None or key is not None:
            message = "--undo takes none of --write, --model and --key"
            raise CliError(
                message, code="usage", hint="see `mlxsup connect -h`", status=ExitStatus.USAGE
            )
        _undo(tool, output)
        return
    given = read_key(key)
    with connect_to(target) as client:
        site = site_of(client.status(), model, given)
    needs_key = is_key_missing(target, given)
    settings = TOOLS[tool](site)
    described = _described(tool, settings, is_key_missing=needs_key)
    if is_writing:
        _write(tool, settings, described, output)
    elif output.is_json:
        output.object(described)
    else:
        _show(settings, output)
    for note in _notes(tool, settings, is_key_missing=needs_key):
        output.note(note)


def _notes(tool: str, settings: Settings, *, is_key_missing: bool) -> list[str]:
    """What people should know before they rely on the settings."""
    found = []
    if is_key_missing:
        found.append(
            "the gateway needs a key, and these settings have none:"
            f" `mlxsup key new {tool}` makes one, for --key"
        )
    for model in _unknown(settings):
        found.append(
            f"nobody knows the context of {model.name}, because its files cannot be read:"
            f" {model.tokens} tokens are assumed"
        )
    return found


def _unknown(settings: Settings) -> list[Model]:
    """The models whose context is in the settings, although nobody knows it."""
    return [model for model in settings.sized if model.context is None]


def _show(settings: Settings, output: Output) -> None:
    if settings.change is not None:
        output.note(f"in {settings.change.path}:")
        output.data(settings.change.shown)
    for name, value in settings.variables.items():
        output.data(f"export {name}={shlex.quote(value)}")
    _say_usage(settings.usage, output)
    if settings.change is not None:
        output.note("--write puts it there, and keeps a copy of what is there now")


def _say_usage(usage: Sequence[str], output: Output) -> None:
    for line in usage:
        output.note(f"then: {line}")


def _described(tool: str, settings: Settings, *, is_key_missing: bool) -> dict[str, Any]:
    change = settings.change
    return {
        "tool": tool,
        "path": str(change.path) if change else None,
        "settings": change.shown if change else None,
        "variables": settings.variables,
        "usage": list(settings.usage),
        "is_key_missing": is_key_missing,
        "unknown_contexts": [model.name for model in _unknown(settings)],
    }


def _write(tool: str, settings: Settings, described: dict[str, Any], output: Output) -> None:
    from ..connecting import files

    change = settings.change
    if change is None:
        raise CliError(
            f"{tool} keeps its settings in a database, not in a file",
            code="no_file",
            hint=f"`mlxsup connect {tool}` prints what to do",
        )
    before = files.read(change.path)
    after = _applied(change, before)
    if before == after:
        shown, backup = "", None
    else:
        shown = files.diff(change.path, before, after)
        backup = files.write(tool, change.path, before, after).backup
    if output.is_json:
        kept = None if backup is None else str(backup)
        output.object({**described, "diff": shown, "backup": kept})
        return
    output.data(shown or f"{change.path} has it already")
    if backup is not None:
        output.note(f"what was there before: {backup}")
    for name, value in settings.variables.items():
        output.note(f"and in the environment: export {name}={shlex.quote(value)}")
    _say_usage(settings.usage, output)
    if shown:
        output.note(f"`mlxsup connect {tool} --undo` takes it back")


def _applied(change: Change, before: str | None) -> str:
    from ..connecting.commented_json import NotJson, NotThere

    try:
        return change.apply(before or "")
    except (NotJson, NotThere) as error:
        raise CliError(
            f"{change.path}: {error}",
            code="file",
            hint="correct it, or put in by hand what this command prints without --write",
        ) from None


def _undo(tool: str, output: Output) -> None:
    from ..connecting import files

    path, before, after = files.undo(tool)
    shown = files.diff(path, before, after)
    if output.is_json:
        output.object({"tool": tool, "path": str(path), "diff": shown})
    else:
        output.data(shown or f"{path} is what it was")
