"""Durations as people type them: `90s`, `10m`, or a plain number of seconds."""

from __future__ import annotations

import click

from mlxsup.protocol.text import parse_duration


def duration(text: str) -> float:
    """Return the seconds of an option's text, read as the `*_s` keys of the configuration are.

    Raises:
        click.BadParameter: the text is not a duration.
    """
    try:
        return parse_duration(text, default_unit="s")
    except ValueError:
        message = f"{text!r} is not a duration; use 90s, 10m, 2h or a number of seconds"
        raise click.BadParameter(message) from None
