"""The tree of commands, and which of them a command line names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from mlxsup.cli.command_table import expand
from mlxsup.cli.main import root

Leaf = tuple[str, ...]
"""The words of a command that does something."""


def leaves(command: click.Command = root, path: Leaf = ()) -> Iterator[Leaf]:
    """Every command that does something, below this one."""
    if not isinstance(command, click.Group):
        yield path
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        assert child is not None
        yield from leaves(child, (*path, name))


def leaf_of(arguments: Sequence[str]) -> Leaf:
    """Which command these arguments run."""
    words = expand(arguments)
    [found] = [leaf for leaf in leaves() if tuple(words[: len(leaf)]) == leaf]
    return found
