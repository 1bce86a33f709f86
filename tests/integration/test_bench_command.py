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


@pytest.mark.parametrize(
    ("command", "again", "said"),
    [
        ([0.9, 0.96, 1.3], [0.95, 1.0, 1.02], "within noise"),
        ([0.9, 0.94, 1.3], [0.95, 1.0, 1.02], "**differs**"),
        ([1.0, 1.06, 1.1], [0.95, 1.0, 1.02], "**differs**"),
        ([1.0, 1.0, 1.0], [0.79, 1.0, 1.02], "too noisy to tell"),
        ([1.0, 1.0, 1.0], [1.0, 1.26, 1.02], "too noisy to tell"),
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
        one = Ratios(command=[1.0, 1.04, 1.1], again=[0.97, 1.0, 1.05])
        return dict.fromkeys(FIGURES, one)

    monkeypatch.setattr(model_command, "ratios", played)
    monkeypatch.setattr(model_command, "Daemon", MagicMock())
    model_command.run(tmp_path, 3)
    said = capsys.readouterr().out
    assert said.startswith("## ")
    assert "Within noise: the median" in said
    cells = "1.040 (1.000 to 1.100) | 1.000 (0.970 to 1.050) | 1.050 | within noise"
    assert said.count(cells) == len(STREAMS) * len(FIGURES)
