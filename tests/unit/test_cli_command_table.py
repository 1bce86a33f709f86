"""Names of commands, other names for them, and what is suggested for mistyped ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxsup.cli.command_table import ALIASES, COMMANDS, ENDING_COMMANDS, HABITS, expand, guess
from mlxsup.cli.main import root

FILES = Path(__file__).parents[2] / "cli" / "commands"


def test_every_file_of_a_command_is_in_the_table_and_says_what_it_does() -> None:
    files = {file.stem for file in FILES.glob("*.py")} - {"__init__"}
    assert files == {name.replace("-", "_") for name in COMMANDS}
    assert all(what.endswith(".") and len(what) <= 60 for what in COMMANDS.values())


def test_the_help_lists_every_command_and_no_other_name_for_one() -> None:
    with root.make_context("mlxsup", [], resilient_parsing=True) as context:
        shown = root.get_help(context)
    listed = [line.split()[0] for line in shown.partition("Commands:")[2].splitlines()[1:]]
    assert listed == list(COMMANDS)
    assert not {*ALIASES, *HABITS, "help"} & set(COMMANDS)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["ps", "--json"], ["status", "--json"]),
        (["ls"], ["models"]),
        (["ls", "--json"], ["models", "--json"]),
        (["tail", "m"], ["logs", "--follow", "m"]),
        (["help"], ["--help"]),
        (["help", "key", "new"], ["key", "new", "--help"]),
        (["logs", "ps"], ["logs", "ps"]),
        ([], []),
    ],
)
def test_other_names_are_what_they_stand_for(typed: list[str], meant: list[str]) -> None:
    assert expand(typed) == meant


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [
        ("staus", "status"),
        ("htop", "top"),
        ("stpo", "stop"),
        ("sing", None),
        ("reload_", "reload"),
        ("nload", "load"),
        ("frobnicate", None),
    ],
)
def test_what_is_suggested_does_no_harm(typed: str, suggested: str | None) -> None:
    assert guess(typed) == suggested


def test_nothing_that_ends_something_is_suggested_for_a_word_that_begins_otherwise() -> None:
    for name in ENDING_COMMANDS:
        for letter in "abcdefghijklmnopqrstuvwxyz":
            if letter != name[0]:
                assert guess(letter + name[1:]) not in ENDING_COMMANDS
                assert guess(letter + name) not in ENDING_COMMANDS
