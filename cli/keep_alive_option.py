"""The option --keep-alive of commands after which a model may be unloaded as idle."""

from __future__ import annotations

import click

from mlxsup.protocol.keep_alive import SHORTEST_LOAD_S

from .duration import duration

FOR_EVER = "-1"


def keep_alive(text: str) -> float:
    """Return the option's seconds: a duration, or -1 for ever.

    Raises:
        click.BadParameter: the text is neither.
    """
    return -1.0 if text == FOR_EVER else duration(text)


def keep_alive_of_load(text: str) -> float:
    """Return the same for `load`, which takes no 0: the model would go as soon as it is there.

    Raises:
        click.BadParameter: the text is neither, or is 0.
    """
    seconds = keep_alive(text)
    if 0 <= seconds < SHORTEST_LOAD_S:
        raise click.BadParameter(
            f"a load takes seconds above 0, or {FOR_EVER} for ever: {text} would unload it at once"
        )
    return seconds


keep_alive_option = click.option(
    "--keep-alive",
    metavar="S",
    type=keep_alive,
    help="Unload the model once it is idle for so long: 10m; 0: with the answer; -1: never.",
)

load_keep_alive_option = click.option(
    "--keep-alive",
    metavar="S",
    type=keep_alive_of_load,
    help="Unload the model once it is idle for so long: 10m; -1: never.",
)
