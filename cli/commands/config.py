"""`mlxsup config`: checks configuration files, and says which one counts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from mlxsup.protocol.places import config_places, find_config

from ..configuration import (
    configuration_errors,
    find_configuration,
    read_configuration,
    schema_text,
)
from ..connection import Target, daemon_options, output_options
from ..terminal.output import Output
from .start import warn_of_keys


@click.group()
def config() -> None:
    """Example: mlxsup config check mlxsup.toml

    Checks configuration files and shows which one is used.
    """


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
        from mlxsup.supervisor.config.model_folders import check_model_folders
        from mlxsup.supervisor.memory.estimator import check_memory

        check_model_folders(configuration, file)
        check_memory(configuration)
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
