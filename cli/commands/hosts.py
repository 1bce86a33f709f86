"""`mlxsup hosts`: the hosts that serve one model together."""

from __future__ import annotations

from pathlib import Path

import click

from ..connection import config_option, output_options
from ..exit_status import ExitStatus
from ..terminal.output import Output


@click.group()
def hosts() -> None:
    """Example: mlxsup hosts check

    Looks at the hosts that serve a model together, [[models.NAME.hosts]].
    """


@hosts.command(short_help="Check each host of a group.")
@click.argument("model", required=False)
@click.argument("places", metavar="[HOST]...", nargs=-1)
@config_option
@output_options
def check(
    model: str | None, places: tuple[str, ...], config_path: Path | None, output: Output
) -> ExitStatus:
    """Example: mlxsup hosts check qwen

    Asks every configured host, over ssh, whether it could take part: its address, its versions of
    mlxsup and MLX, its files of the model, the memory that is free there, and the link to it. Exits
    with 1 if one could not. No daemon is needed.

    With HOST, looks at these hosts instead, and prints the tables to paste into the configuration:
    the address of this machine first, then NAME=ADDRESS for each other one, where NAME is what ssh
    calls it. `mlxsup hosts check qwen 10.0.0.1 studio-2=10.0.0.2`
    """
    from ..host_checks import check_hosts  # help would wait for it

    return check_hosts(model, places, config_path, output)
