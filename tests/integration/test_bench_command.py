"""The script that holds `mlxsup bench` against the bursts of the fast path, with tiny sizes."""

from __future__ import annotations

import asyncio

import pytest

from bench.model_command import FIGURES, MODEL, ratios, verdict
from support.daemon import Daemon, fake, wait_for_state


def test_both_sides_measure_the_same_daemon_in_turn() -> None:
    entry = fake(fake={"step_s": 0.002})
    with Daemon({MODEL: entry}) as daemon, daemon.client() as client:
        wait_for_state(client, MODEL, "READY")
        found = asyncio.run(ratios(daemon.endpoint, 2, 40, 2))
    assert set(found) == set(FIGURES)
    assert all(len(values) == 2 and min(values) > 0 for values in found.values())


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0.9, 0.95, 0.99, 1.01, 1.02, 1.1], "agrees"),
        ([1.01, 1.02, 1.03, 1.01, 1.02, 1.1], "differs"),
        ([1.0] * 5, "too few"),
    ],
)
def test_a_difference_is_one_if_the_interval_of_the_median_leaves_one_out(
    values: list[float], said: str
) -> None:
    assert said in verdict(values)
