"""`mlxsup connect`: prints the settings with which other programs use the daemon."""

from __future__ import annotations

import shlex

import click

from ..arguments import complete_writer
from ..connecting import PROGRAMS, is_key_missing, site_of
from ..connection import Target, daemon_options
from ..connection import connect as connect_to
from ..keys import read_key
from ..terminal.output import Output

TOOLS = {name: one.settings for name, one in PROGRAMS.items() if one.settings is not None}


@click.command()
@click.argument("tool", metavar="TOOL", type=click.Choice(list(TOOLS)))
@click.option(
    "--model",
    "model",
    metavar="MODEL",
    shell_complete=complete_writer,
    help="The default model of the program; otherwise the first one that is READY.",
)
@click.option(
    "--key",
    metavar="KEY",
    help="An API key of the gateway, if one is needed; - reads it from stdin.",
)
@daemon_options
def connect(tool: str, model: str | None, key: str | None, target: Target, output: Output) -> None:
    """Example: mlxsup connect opencode

    Prints the settings that another program needs to use the models of the daemon over HTTP, and
    into which of its files they go. TOOL is claude, codex, opencode, pi, vscode or zed; `mlxsup
    launch AGENT` starts an agent without any settings. Other programs take the base URL that
    `mlxsup status` prints, with /v1 behind it for OpenAI's API, and any text as the API key.
    """
    given = read_key(key)
    with connect_to(target) as client:
        site = site_of(client.status(), model, given)
    needs_key = is_key_missing(target, given)
    settings = TOOLS[tool](site)
    value = {
        "tool": tool,
        "path": str(settings.path),
        "settings": settings.text,
        "variables": settings.variables,
        "usage": [settings.usage],
        "is_key_missing": needs_key,
    }
    output.note(f"in {settings.path}:")
    exports = [f"export {name}={shlex.quote(one)}" for name, one in settings.variables.items()]
    output.result(value, "\n".join([settings.text, *exports]))
    output.note(f"then: {settings.usage}")
    if needs_key:
        output.note(
            f"the gateway needs an API key: `mlxsup key new {tool}` creates one; pass it with --key"
        )
