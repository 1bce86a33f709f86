"""The options of commands that send requests: on whose behalf, and how urgent they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from mlxsup.protocol.ids import TERMINAL
from mlxsup.protocol.states import Priority

PRIORITY = click.Choice([priority.value for priority in Priority])
"""A class, which a shell can complete."""


def priority_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --priority and --client, which the command gets under these names."""
    help_client = "On whose behalf, if [clients] lists it; by default, your terminal's."
    option = click.option("--client", metavar="NAME", default=TERMINAL, help=help_client)
    function = option(function)
    help_priority = "Who waits with a higher class starts first."
    return click.option("--priority", type=PRIORITY, help=help_priority)(function)
