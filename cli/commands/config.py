"""`mlxsup config`: checks and changes configuration files, and says which one counts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxsup.protocol.discovery import config_places, find_config

from ..configuration import (
    changed,
    check_models,
    configuration_errors,
    find_configuration,
    read_configuration,
    refusals,
    schema_text,
)
from ..connection import (
    Target,
    daemon_options,
    output_options,
    status_of_daemon,
)
from ..terminal.output import Output
from .settings import bad_configurations, note_consequences
from .start import warn_of_keys

if TYPE_CHECKING:
    from mlxsup.client import Client


@click.group()
def config() -> None:
    """Example: mlxsup config set models.qwen3.idle_unload_s 30m

    Changes and checks configuration files, and shows which one is used.
    """


@config.command(
    "set",
    short_help="Set a key, in the file and in the daemon that runs.",
    context_settings={"ignore_unknown_options": True},  # -1 is a value
)
@click.argument("key")
@click.argument("value")
@daemon_options
def set_(key: str, value: str, target: Target, output: Output) -> None:
    """Example: mlxsup config set models.qwen3.idle_unload_s 30m

    Sets KEY in the configuration file, whose other lines stay, and in the daemon that runs, as
    `mlxsup reload` would. KEY is models.NAME.KEY, defaults.KEY (for all models), clients.NAME.KEY,
    supervisor.KEY or gateway.KEY. VALUE is as in the file, without quotes; names of a list stand
    between commas. A wrong VALUE changes nothing.
    """
    _change(key, value, target, output)


@config.command(short_help="Print the value of a key.")
@click.argument("key")
@daemon_options
def get(key: str, target: Target, output: Output) -> None:
    """Example: mlxsup config get models.qwen3.idle_unload_s

    Prints the value that KEY has in the configuration file, or else its default, as `mlxsup config
    set` takes it.
    """
    from mlxsup.supervisor.config.keys import getting, shown
    from mlxsup.supervisor.config.load import read_text

    status = status_of_daemon(target) or {}
    file = Path(status.get("config_path") or find_configuration(target.config))
    with configuration_errors(file), refusals():
        found = getting(read_text(file), file, key)
    value = found["value"]
    output.result({**found, "config_path": str(file)}, "" if value is None else shown(value))
    if not found["is_set"]:
        output.note(f"{found['key']} is not set in {file}, so that is its default")


@config.command(short_help="Take a key out, so that its default counts.")
@click.argument("key")
@daemon_options
def unset(key: str, target: Target, output: Output) -> None:
    """Example: mlxsup config unset models.qwen3.idle_unload_s

    Takes KEY out of the configuration file, so that its default counts again, in the daemon that
    runs, too. `mlxsup config set` explains KEY.
    """
    _change(key, None, target, output)


def _change(key: str, value: str | None, target: Target, output: Output) -> None:
    """Change a key by the daemon that runs, or else in the file that it would read."""
    from mlxsup.supervisor.config.keys import changing

    def by_daemon(client: Client) -> dict[str, Any]:
        with bad_configurations("see `mlxsup config check`"):
            done = client.configure({key: value})
        rows = {row["name"]: row for row in client.status()["models"]}
        restart = [name for name in done["changed"] if rows[name]["state"] in RESTARTS]
        return {**done, "restarts": restart}

    done = {"restarts": [], **changed(target, by_daemon, lambda read: changing(read, {key: value}))}
    written, is_now = next(iter(done["values"].items()))
    path = done["config_path"]
    if is_now is None:
        said = f"{written} has its default now, and is not in {path}"
    else:
        said = f"{written} = {json.dumps(is_now, ensure_ascii=False)} in {path}"
    output.result(done, said)
    if "later" in done:
        parts = written.split(".")
        later = [name for name in done["later"] if name in (parts[0], parts[-1])]
        note_consequences({**done, "later": later}, output)
    for name in done["restarts"]:
        output.note(f"{name} restarts with it; running requests finish first")


RESTARTS = ("DRAINING", "STOPPING", "PENDING", "LOADING")
"""States of a model that is given a new process because of a change."""


@config.command(short_help="List the errors in a file.")
@click.argument("file", metavar="[FILE]", required=False, type=click.Path(path_type=Path))
@output_options
def check(file: Path | None, output: Output) -> None:
    """Example: mlxsup config check mlxsup.toml

    Lists everything that is wrong with FILE and with the folders of its models, or says that it is
    valid. Without FILE it checks the one that `mlxsup config path` prints.
    """
    file = find_configuration(file)
    # Reading and checking it takes longer than a command may be silent.
    if os.path.exists(file) and not output.is_json:
        output.data(f"checking {file}")
    configuration = read_configuration(file, has_sockets=True)
    with configuration_errors(file):
        check_models(configuration, file)
    warn_of_keys(configuration, output)
    output.result({"path": str(file), "valid": True}, f"{file} is valid")


@config.command(short_help="Print which file and which daemon are used, and why.")
@daemon_options
def path(target: Target, output: Output) -> None:
    """Example: mlxsup config path

    Prints the configuration file that `mlxsup start` reads, why it is that one, and where commands
    look for the daemon. All look at the same places in the same order: --endpoint, --config,
    MLXSUP_ENDPOINT, MLXSUP_CONFIG, ./mlxsup.toml, $XDG_CONFIG_HOME/mlxsup/config.toml (or
    ~/.config/mlxsup/config.toml), ~/.mlxsup/config.toml; `start` skips the endpoints.
    """
    found = find_config(target.config)
    place = target.find()
    if output.is_json:
        shown = None if found is None else str(found.path.expanduser().absolute())
        looked = [
            {"path": str(one.path), "source": one.source, "exists": one.is_there}
            for one in config_places(target.config)
        ]
        source = None if found is None else found.source
        daemon = {"endpoint": place.endpoint, "source": place.source or "default"}
        output.object({"path": shown, "source": source, "daemon": daemon, "looked_at": looked})
        return
    if found is None:
        tried = ", ".join(str(one.path) for one in config_places(target.config))
        output.note(f"there is no configuration file; looked for {tried}")
    else:
        output.data(str(found.path.expanduser().absolute()))
        why = "named by" if found.is_named else "the first file found in the usual places:"
        output.note(f"{why} {found.source}{'' if found.is_there else '; it does not exist'}")
    why = f"because of {place.source}" if place.source else "in the default folder"
    output.note(f"commands look for the daemon at {place.endpoint}, {why}")


@config.command(short_help="Print the file's JSON Schema, for editors.")
@output_options
def schema(output: Output) -> None:
    """Example: mlxsup config schema > mlxsup.schema.json

    Prints the JSON Schema of the configuration. Editors check and complete a file whose first line
    is `#:schema mlxsup.schema.json`.
    """
    output.result({"schema": json.loads(schema_text())}, schema_text())
