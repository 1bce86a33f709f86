"""A command that creates a file takes no `-` for its name."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from mlxsup.cli.commands.bench import bench
from mlxsup.cli.commands.doctor import doctor
from mlxsup.cli.commands.init import init
from mlxsup.cli.commands.why import why

TAKERS = [(why, "report"), (bench, "kept"), (doctor, "saved_path"), (init, "file")]


def parameter_of(command: click.Command, name: str) -> click.Parameter:
    return next(one for one in command.params if one.name == name)


@pytest.mark.parametrize(("command", "name"), TAKERS, ids=[one.name for one, _ in TAKERS])
def test_standard_output_is_no_file(command: click.Command, name: str) -> None:
    parameter = parameter_of(command, name)
    context = click.Context(command)
    with pytest.raises(click.BadParameter, match="name a file instead"):
        parameter.type_cast_value(context, "-")
    assert parameter.type_cast_value(context, "./-") == Path("./-")
    assert parameter.type_cast_value(context, "a.json") == Path("a.json")
