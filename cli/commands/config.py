"""`mlxsup config`: checks configuration files."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ..connection import output_options
from ..terminal.output import Output
from .start import configuration_errors, read_configuration


@click.group(short_help="Check configuration files.")
def config() -> None:
    """Example: mlxsup config check mlxsup.toml

    Checks configuration files, and prints their schema.
    """


@config.command(short_help="List what is wrong with a file.")
@click.argument("file", type=click.Path(path_type=Path))
@output_options
def check(file: Path, output: Output) -> None:
    """Example: mlxsup config check mlxsup.toml

    Lists everything that is wrong with FILE, or says that it is valid.
    """
    configuration = read_configuration(file, has_sockets=True)
    with configuration_errors(file):
        from mlxsup.supervisor.memory.problems import check_memory

        check_memory(configuration)
    if output.is_json:
        output.object({"path": str(file), "valid": True})
    else:
        output.data(f"{file} is valid")


@config.command(short_help="Print the file's JSON Schema, for editors.")
@output_options
def schema(output: Output) -> None:
    """Example: mlxsup config schema > mlxsup.schema.json

    Prints the JSON Schema of the configuration. Editors check and complete a file whose first line
    is `#:schema mlxsup.schema.json`.
    """
    from mlxsup.supervisor.config.schema import config_schema

    if output.is_json:
        output.object({"schema": config_schema()})
    else:
        output.data(json.dumps(config_schema(), indent=2, ensure_ascii=False))
