"""The option --keep-alive of commands after which a model may be unloaded as idle."""

from __future__ import annotations

import click

from .duration import duration

FOR_EVER = "-1"


def keep_alive(text: str) -> float:
    """The type of the option: seconds as a duration, or -1 for ever.

    Raises:
        click.BadParameter: the text is neither.
    """
    return -1.0 if text == FOR_EVER else duration(text)


keep_alive_option = click.option(
    "--keep-alive",
    metavar="S",
    type=keep_alive,
    help="Unload the model after being idle so long: 10m; -1: never.",
)
