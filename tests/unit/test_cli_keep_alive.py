"""What --keep-alive of `load`, `generate` and `chat` takes."""

from __future__ import annotations

import click
import pytest

from mlxsup.cli.commands.chat import chat
from mlxsup.cli.commands.generate import generate
from mlxsup.cli.commands.load import load
from mlxsup.cli.keep_alive_option import keep_alive, keep_alive_of_load
from mlxsup.protocol.keep_alive import SHORTEST_LOAD_S


@pytest.mark.parametrize(
    ("text", "seconds"), [("-1", -1.0), ("0", 0.0), ("90s", 90.0), ("10m", 600.0)]
)
def test_a_time_is_seconds_and_minus_one_is_for_ever(text: str, seconds: float) -> None:
    assert keep_alive(text) == seconds


@pytest.mark.parametrize("text", ["-2", "-10m", "soon", ""])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        keep_alive(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("-1", -1.0), ("0.001", SHORTEST_LOAD_S), ("10m", 600.0)]
)
def test_a_load_takes_the_same(text: str, seconds: float) -> None:
    assert keep_alive_of_load(text) == seconds


@pytest.mark.parametrize("text", ["0", "0s", "0.0009", "-2", "soon"])
def test_but_a_load_that_would_unload_at_once_is_a_wrong_option(text: str) -> None:
    with pytest.raises(click.BadParameter):
        keep_alive_of_load(text)


def test_the_help_of_whoever_takes_0_says_what_it_means() -> None:
    for command, knows in ((generate, True), (chat, True), (load, False)):
        [option] = [one for one in command.params if one.name == "keep_alive"]
        assert isinstance(option, click.Option)
        assert ("0: with the answer" in str(option.help)) == knows
