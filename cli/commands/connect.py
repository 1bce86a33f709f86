"""`mlxsup connect`: prints the settings with which an editor uses the daemon."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from ..arguments import complete_writer, is_writer, model_meant, names_of
from ..connection import Target, daemon_options, unknown_model
from ..connection import connect as connect_to
from ..exit_status import CliError
from ..keys import launch_key
from ..terminal.output import Output

PROVIDER = "mlxsup"
"""Our name in the files and menus of the programs."""

ANY_KEY = "mlxsup"
"""Some programs insist on a key, and the gateway may need none."""

UNKNOWN_KEY = "KEY"
"""Stands for a key that is not there yet: what only prints settings makes none."""

UNKNOWN_CONTEXT = 8192
"""Tokens that a program is to count on if the context of a model is not known."""

MOST_ANSWER = 8192
"""Tokens that a program leaves free for an answer, at most; half of a smaller context."""


class Model(NamedTuple):
    """A model that a program is to show, as requests call it, and its context in tokens."""

    name: str
    context: int | None

    @property
    def tokens(self) -> int:
        """Its context, or what is safe."""
        return self.context or UNKNOWN_CONTEXT

    @property
    def answer(self) -> int:
        """Return the tokens of its context that are for the answer."""
        return min(MOST_ANSWER, self.tokens // 2)


class Site(NamedTuple):
    """The gateway that a program is connected to, and its models.

    Attributes:
        url: of the gateway.
        models: all; the first is used unless the program is asked for another one.
        key: of the gateway; while it needs none, any text does.
    """

    url: str
    models: Sequence[Model]
    key: str = ANY_KEY

    @property
    def model(self) -> Model:
        """Return the model that is used first."""
        return self.models[0]

    @property
    def base(self) -> str:
        """Return the base URL of OpenAI's clients."""
        return f"{self.url}/v1"


class Settings(NamedTuple):
    """The settings with which a program uses a daemon.

    Attributes:
        path: of the file that they go into.
        text: what belongs there; of a JSON file, the keys that are ours.
        usage: what to do then: a command, or what to choose where.
        variables: of the environment, which it needs besides.
    """

    path: Path
    text: str
    usage: str
    variables: Mapping[str, str] = {}


# ---------------------------------------------------------------- the daemon


def site_of(status: Mapping[str, Any], name: str | None, key: str | None) -> Site:
    """Return the site that a daemon's status describes.

    Args:
        status: of the daemon.
        name: of the model that the program uses first, as requests may call it: also an alias, or
            `NAME:PRESET` or `NAME:ADAPTER`; None: the first that is READY.
        key: of the gateway; None for none.
    """
    gateway = status.get("gateway")
    if not gateway:
        hint = "`mlxsup stop`, then `mlxsup start --detach --http`"
        message = "the daemon runs without HTTP, which other programs need"
        raise CliError(message, code="no_gateway", hint=hint)
    if not (url := gateway.get("url")):
        message = f"HTTP is {gateway['state']}, and other programs need it"
        raise CliError(message, code="no_gateway", hint="`mlxsup status` shows why")
    rows = [row for row in status["models"] if is_writer(row)]
    if name is not None and model_meant(status, name) is None:
        raise unknown_model(name, [known for row in rows for known in names_of(row)])
    if not rows:
        message = "the daemon has no model that writes text"
        raise CliError(message, code="no_models", hint="`mlxsup add MODEL`")
    ready = [row["name"] for row in rows if row["state"] == "READY"]
    first = name or (ready or [row["name"] for row in rows])[0]
    meant = model_meant(status, first)
    context_length = (rows[0] if meant is None else meant.row)["context_length"]
    others = [Model(row["name"], row["context_length"]) for row in rows if row["name"] != first]
    models = [Model(first, context_length), *others]
    return Site(url=url, models=models, key=key or ANY_KEY)


# ---------------------------------------------------------------- the programs


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _home(variable: str, default: str) -> Path:
    """Return a folder that a variable of the environment names, or one below the home folder."""
    given = os.environ.get(variable)
    return Path(given).expanduser() if given else Path.home() / default


def _vscode(site: Site) -> Settings:
    models = [
        {
            "id": one.name,
            "name": one.name,
            "url": f"{site.base}/chat/completions",
            "toolCalling": True,
            "vision": False,
            "maxInputTokens": one.tokens - one.answer,
            "maxOutputTokens": one.answer,
        }
        for one in site.models
    ]
    about = {"name": PROVIDER, "vendor": "customendpoint", "apiKey": site.key}
    entry = {**about, "apiType": "chat-completions", "models": models}

    is_mac = sys.platform == "darwin"
    mac = Path.home() / "Library" / "Application Support"
    folder = mac if is_mac else _home("XDG_CONFIG_HOME", ".config")
    path = folder / "Code" / "User" / "chatLanguageModels.json"
    usage = f"choose {site.model.name} in the chat's list of models (VS Code 1.122 or later)"
    return Settings(path=path, text=_json([entry]), usage=usage)


def _zed(site: Site) -> Settings:
    can = {"images": False, "parallel_tool_calls": False, "prompt_cache_key": False}
    models = [
        {
            "name": one.name,
            "display_name": one.name,
            "max_tokens": one.tokens,
            "max_output_tokens": one.answer,
            "capabilities": {"tools": True, **can},
        }
        for one in site.models
    ]
    entry = {"api_url": site.base, "available_models": models}
    return Settings(
        path=_home("XDG_CONFIG_HOME", ".config") / "zed" / "settings.json",
        text=_json({"language_models": {"openai_compatible": {PROVIDER: entry}}}),
        usage=f"choose {site.model.name} in the agent panel's list of models",
        variables={f"{PROVIDER.upper()}_API_KEY": site.key},
    )


# ---------------------------------------------------------------- the command

TOOLS = {"vscode": _vscode, "zed": _zed}
"""The functions that make the settings, by the word that users type for a program."""


@click.command()
@click.argument("tool", metavar="TOOL", type=click.Choice(list(TOOLS)))
@click.option(
    "--model",
    "model",
    metavar="MODEL",
    shell_complete=complete_writer,
    help="The default model of the program; otherwise the first one that is READY.",
)
@daemon_options
def connect(tool: str, model: str | None, target: Target, output: Output) -> None:
    """Example: mlxsup connect zed

    Prints the settings that an editor needs to use the models of the daemon over HTTP, and into
    which of its files they go. TOOL is vscode or zed; `mlxsup launch AGENT` starts a coding agent,
    and with --print shows its settings. Other programs take the base URL that `mlxsup status`
    prints, with /v1 behind it for OpenAI's API, and any text as the API key.
    """
    with connect_to(target) as client:
        status = client.status()
    key, is_missing = launch_key(target, is_made=False)
    settings = TOOLS[tool](site_of(status, model, UNKNOWN_KEY if is_missing else key))
    value = {
        "tool": tool,
        "path": str(settings.path),
        "settings": settings.text,
        "variables": settings.variables,
        "usage": [settings.usage],
        "is_key_missing": is_missing,
    }
    output.note(f"in {settings.path}:")
    exports = [f"export {name}={shlex.quote(one)}" for name, one in settings.variables.items()]
    output.result(value, "\n".join([settings.text, *exports]))
    output.note(f"then: {settings.usage}")
    if is_missing:
        output.note(f"write a key in place of {UNKNOWN_KEY}: `mlxsup key new {tool}` makes one")
