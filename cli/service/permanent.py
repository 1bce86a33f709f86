"""`start --service`: how launchd learns that another start would not help."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import click

from ..exit_status import CliError, ExitStatus
from ..terminal.output import Output
from .facts import PERMANENT_EXITS


def service_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --service to a command that has `output`: errors that another start does not help
    against are printed as always, and the exit code is 0."""

    @click.option(
        "--service",
        "is_service",
        is_flag=True,
        help="Exit with 0 if another start would not help; for launchd.",
    )
    @functools.wraps(function)
    def wrapper(*, is_service: bool, output: Output, **arguments: Any) -> Any:
        try:
            return function(output=output, **arguments)
        except CliError as error:
            if not (is_service and error.status in PERMANENT_EXITS):
                raise
            output.error(error)
            return ExitStatus.OK

    return cast(Callable[..., Any], wrapper)
