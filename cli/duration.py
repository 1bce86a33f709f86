"""Durations as people type them: `90s`, `10m`, or a plain number of seconds."""

from __future__ import annotations

import click
from mlxsup.protocol.text import parse_duration


def duration(text: str) -> float:
    """The type of an option that takes seconds, as the `*_s` keys of the configuration do.

    Raises:
        click.BadParameter: the text is none.
    """
    try:
        is_plain = text.strip().replace(".", "", 1).isdecimal()
        return parse_duration(f"{text}s" if is_plain else text)
    except ValueError:
        message = f"{text!r} is no duration; it takes 90s, 10m, 2h or seconds"
        raise click.BadParameter(message) from None
