"""What --keep-alive of `load`, `generate` and `chat` takes."""

from __future__ import annotations

import click
import pytest

from mlxsup.cli.keep_alive_option import keep_alive


@pytest.mark.parametrize(
    ("text", "seconds"), [("-1", -1.0), ("0", 0.0), ("90s", 90.0), ("10m", 600.0)]
)
def test_a_time_is_seconds_and_minus_one_is_for_ever(text: str, seconds: float) -> None:
    assert keep_alive(text) == seconds


@pytest.mark.parametrize("text", ["-2", "-10m", "soon", ""])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        keep_alive(text)
