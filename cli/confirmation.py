"""Asks before something is removed."""

from __future__ import annotations

import sys

import click

from .exit_status import CliError, ExitStatus


def confirm(question: str) -> None:
    """Return if the user says yes.

    Raises:
        CliError: the answer is no, or there is no terminal to ask at.
    """
    if not sys.stdin.isatty():
        raise CliError(
            "nobody can be asked here whether that is meant",
            code="usage",
            hint="add --yes",
            status=ExitStatus.USAGE,
        )
    if not click.confirm(question, default=False, err=True):
        raise CliError("nothing was removed", code="declined")
