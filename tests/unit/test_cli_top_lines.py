"""What `mlxsup top` says in a pipe."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsup.cli.top.lines import summary

from support.top_facts import looked, model

IDLE: dict[str, Any] = {"tokens_per_s": None}
USED = "2.00 GiB used, 6.00 GiB of 8.00 GiB reserved"


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ([], "no models; 0 running, 0 waiting; 0.0 MiB used, 6.00 GiB of 8.00 GiB reserved"),
        ([model("a", **IDLE)], f"1 READY; 0 running, 0 waiting; {USED}"),
        (
            [
                model("a", running=["1", "2"], queued=5, tokens_per_s=60.25, paused=["3"]),
                model("b", "LOADING", queued=2, footprint_bytes=0, **IDLE),
                model("c", footprint_bytes=0, running=["4"], tokens_per_s=10.0),
            ],
            f"2 READY, 1 LOADING; 3 running, 7 waiting, 1 paused, 70.2 tok/s; {USED}",
        ),
    ],
)
def test_a_line_counts_models_and_requests_and_sums_up_speed_and_memory(
    models: list[dict[str, Any]], words: str
) -> None:
    assert summary(looked(models)) == words
