"""What a worker that follows a crash runs again before READY, and passes over many prompts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxsup.protocol.states import Batching
from mlxsup.worker.engines.mlx import warm_up as mlx_warm_up

from support.mlx_lives import SIZES, Lives, learned_in, play_cuda
from support.mlx_rows import known_as
from support.tiny_model import make_tiny_model

pytestmark = pytest.mark.mlx

MANY: dict[str, Any] = {"max_concurrency": 4}

STEPS_OF_ONE = 4
"""Of a request that runs alone, until it has two tokens."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> Lives:
    play_cuda(monkeypatch)
    return Lives(monkeypatch)


def test_a_restart_runs_the_shapes_again_and_the_largest_bursts_first(
    tiny: Path, lives: Lives, tmp_path: Path
) -> None:
    """The next daemon may find the folder of kernels empty, and begins with what is needed most."""
    lives.load(tiny, **learned_in(tmp_path, 2), **MANY)
    assert lives.passes[1:4] == [(1, 32), (2, 32), (4, 32)], "nothing was learned"
    lives.load(tiny, **learned_in(tmp_path, 2), **MANY)
    assert lives.rows == [9, *[33] * (4 + 2 + 1), *SIZES, 9]
    assert lives.passes[1:4] == [(4, 32), (2, 32), (1, 32)]
    lives.load(tiny, **learned_in(tmp_path, 1), **MANY)
    assert lives.passes[1:4] == [(1, 32), (2, 32), (4, 32)]


@pytest.mark.parametrize(("step_s", "passes"), [(0.125, [4, 2]), (0.75, [4]), (30.0, [4])])
def test_a_restart_begins_no_step_of_these_after_its_limit(
    step_s: float, passes: list[int], tiny: Path, lives: Lives, tmp_path: Path
) -> None:
    lives.load(tiny, **learned_in(tmp_path, 1), **MANY)
    lives.load(tiny, lambda: step_s * lives.steps, **learned_in(tmp_path, 2), **MANY)
    rows = [33 for count in passes for _ in range(count)]
    assert lives.rows == [9, *rows, 9]
    assert lives.passes == [(1, 8), *((count, 32) for count in passes), (1, 8)]
    alone = 2 * STEPS_OF_ONE
    assert lives.steps - alone == math.ceil(0.6 / step_s)


@pytest.mark.parametrize(
    ("generation", "rows"), [(1, [33] * (1 + 2 + 4 + 8)), (2, [*[2] * (8 + 4 + 2), 33])]
)
def test_prompts_that_might_not_fit_into_memory_together_are_only_decoded(
    generation: int,
    rows: list[int],
    tiny: Path,
    lives: Lives,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pass over four times the tokens needs 16 times the memory at most, and so does each row;
    what many rows have taken is not what each of them takes."""
    lives.load(tiny, **learned_in(tmp_path, 1), max_concurrency=8)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 0)
    monkeypatch.setattr(mx, "get_peak_memory", lambda: 1000 * lives.passes[-1][0])
    monkeypatch.setattr(mlx_warm_up, "free_memory_bytes", lambda *_: 17_000)
    lives.load(tiny, **learned_in(tmp_path, generation), max_concurrency=8)
    assert lives.rows == [9, *rows, *SIZES, 9]


def test_prompts_that_are_read_one_by_one_make_no_burst(tiny: Path, lives: Lives) -> None:
    known = known_as(tiny, Batching.SERIAL_PREFILL)
    lives.load(tiny, max_concurrency=4, known_batching=known)
    assert lives.rows == [9, *[2] * (1 + 2 + 4), *SIZES, 9, 129, 1025]
