"""The script that holds `mlxsup bench` against the bursts of the fast path, with tiny sizes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from bench import model_command
from bench.model_command import FIGURES, MODEL, STREAMS, Ratios, ratios
from support.daemon import Daemon, fake, wait_for_state


def test_both_sides_measure_the_same_daemon_in_turn() -> None:
    entry = fake(fake={"step_s": 0.002})
    with Daemon({MODEL: entry}) as daemon, daemon.client() as client:
        wait_for_state(client, MODEL, "READY")
        found = asyncio.run(ratios(daemon.endpoint, 2, 40, 2))
    assert set(found) == set(FIGURES)
    for one in found.values():
        assert len(one.command) == len(one.again) == 2
        assert min(*one.command, *one.again) > 0


ONE = [0.9, 0.92, 0.95, 0.97, 0.99, 1.0, 1.0, 1.01, 1.03, 1.05, 1.08, 1.1]
"""Twelve rounds: the interval of the median, 0.95 to 1.05, leaves out two at either end."""


@pytest.mark.parametrize(
    ("command", "again", "said"),
    [
        (ONE, ONE, "within noise"),
        ([0.1, 0.1, *[1.05] * 10], ONE, "within noise"),
        ([*[0.95] * 10, 9.0, 9.0], ONE, "within noise"),
        ([1.11 * one for one in ONE], ONE, "**differs**"),
        ([0.9 * one for one in ONE], ONE, "**differs**"),
        ([0.1, 0.1, *ONE[2:-2], 9.0, 9.0], ONE, "within noise"),
        ([0.9, 0.9, 0.9, *ONE[3:-3], 1.2, 1.2, 1.2], ONE, "too noisy to tell"),
        (ONE, [0.9, 0.9, 0.9, *ONE[3:-3], 1.2, 1.2, 1.2], "too noisy to tell"),
        (ONE[:5], ONE, "too noisy to tell"),
        (ONE, ONE[:5], "too noisy to tell"),
    ],
)
def test_a_difference_is_one_if_it_exceeds_what_the_same_measurement_differs_by(
    command: list[float], again: list[float], said: str
) -> None:
    assert Ratios(command=command, again=again).verdict == said


def test_the_section_says_what_noise_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async def played(endpoint: str, streams: int, tokens: int, repeats: int) -> dict[str, Ratios]:
        one = Ratios(command=ONE, again=[1.02 * ratio for ratio in ONE])
        return dict.fromkeys(FIGURES, one)

    monkeypatch.setattr(model_command, "ratios", played)
    monkeypatch.setattr(model_command, "Daemon", MagicMock())
    model_command.run(tmp_path, 3)
    said = capsys.readouterr().out
    assert said.startswith("## ")
    assert "Within noise: the two intervals have values in common." in said
    ratio = "1.000 (0.900 to 1.100) | 0.950 to 1.050"
    cells = f"{ratio} | 1.020 (0.918 to 1.122) | 0.969 to 1.071 | within noise"
    assert said.count(cells) == len(STREAMS) * len(FIGURES)
