"""`mlxsup config`: looks at configuration files."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ..connection import output_options
from ..terminal.output import Output
from .start import read_configuration


@click.group(short_help="Look at configuration files.")
def config() -> None:
    """Example: mlxsup config check mlxsup.toml

    Looks at configuration files.
    """


@config.command(short_help="Say what is wrong with a file.")
@click.argument("file", type=click.Path(path_type=Path))
@output_options
def check(file: Path, output: Output) -> None:
    """Example: mlxsup config check mlxsup.toml

    Says everything that is wrong with FILE, or that nothing is.
    """
    read_configuration(file)
    if output.is_json:
        output.object({"path": str(file), "valid": True})
    else:
        output.data(f"{file} is valid")


@config.command(short_help="Print the JSON Schema of the file, for editors.")
@output_options
def schema(output: Output) -> None:
    """Example: mlxsup config schema > mlxsup.schema.json

    Prints the JSON Schema of the configuration. An editor checks and completes a file whose first
    line is `#:schema mlxsup.schema.json`.
    """
    from mlxsup.supervisor.config.schema import config_schema

    if output.is_json:
        output.object({"schema": config_schema()})
    else:
        output.data(json.dumps(config_schema(), indent=2, ensure_ascii=False))
