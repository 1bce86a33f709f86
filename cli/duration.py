"""Durations as people type them: `90s`, `10m`, or a plain number of seconds."""

from __future__ import annotations

import re

import click

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration(text: str) -> float:
    """The type of an option that takes seconds, as the `*_s` keys of the configuration do.

    Raises:
        click.BadParameter: the text is none.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is no duration; it takes 90s, 10m, 2h or seconds")
    return float(match.group(1)) * _SECONDS[match.group(2) or "s"]
