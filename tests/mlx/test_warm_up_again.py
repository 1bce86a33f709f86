"""What a worker that follows a crash runs again before READY, and passes over many prompts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxsup.protocol.states import Batching
from mlxsup.worker.engines.mlx import kept_rows as mlx_kept_rows
from mlxsup.worker.engines.mlx import warm_up as mlx_warm_up
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.prefix_cache import own_arrays

from support.mlx_lives import SIZES, Lives, burst, learned_in, play_cuda
from support.mlx_rows import known_as, make_row, make_spec, run_rows
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
    assert lives.rows == [9, *burst(4), *burst(2), *burst(1), *SIZES, 9]
    assert lives.passes[1:4] == [(4, 32), (2, 32), (1, 32)]
    lives.load(tiny, **learned_in(tmp_path, 1), **MANY)
    assert lives.passes[1:4] == [(1, 32), (2, 32), (4, 32)]


def serve_bursts(tiny: Path, lives: Lives, folder: Path, *bursts: list[int]) -> None:
    """A first life that serves these bursts, one after the other, and ends well."""
    engine = lives.begin(tiny, **learned_in(folder, 1), **MANY)
    for number, lengths in enumerate(bursts):
        run_rows(
            engine,
            [
                make_row(10 * number + place, list(range(number, number + length)), max_tokens=3)
                for place, length in enumerate(lengths)
            ],
        )
    engine.close()


def test_a_restart_first_reads_a_burst_like_the_last_one(
    tiny: Path, lives: Lives, tmp_path: Path
) -> None:
    """With CUDA a pass over other numbers of prompts or tokens is prepared for 50 ms each."""
    serve_bursts(tiny, lives, tmp_path, [70, 71], [40, 45, 41])
    lives.load(tiny, **learned_in(tmp_path, 2), **MANY)
    assert lives.rows[1:8] == [*burst(3, 44), *burst(4)]
    assert lives.passes[1:3] == [(3, 44), (4, 32)]
    lives.load(tiny, **learned_in(tmp_path, 3), **MANY)
    assert lives.passes[1:3] == [(3, 44), (4, 32)], "this life has served none, and keeps it"
    lives.load(tiny, **learned_in(tmp_path, 4), max_concurrency=2)
    assert lives.passes[1] == (2, 32), "there are no longer as many places"
    lives.load(tiny, **learned_in(tmp_path, 1), **MANY)
    assert lives.passes[1] == (1, 32), "what every request needs comes first"


def test_a_burst_that_ends_a_life_while_it_warms_up_is_not_read_by_the_next_one(
    tiny: Path, lives: Lives, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may hold the memory that there was for it."""
    serve_bursts(tiny, lives, tmp_path, [40, 45, 41])

    def has_no_memory(cache: list[Any]) -> int:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(mlx_kept_rows, "own_arrays", has_no_memory)
        engine = MlxEngine(make_spec(tiny, **learned_in(tmp_path, 2), **MANY))
        lives.passes = []
        with pytest.raises(MemoryError):
            engine.load(lambda phase, share: None)
        engine.close()
    assert lives.passes[1] == (3, 44)
    lives.load(tiny, **learned_in(tmp_path, 3), **MANY)
    assert lives.passes[1] == (4, 32)


def test_a_prompt_alone_and_the_rest_of_long_ones_are_no_burst(
    tiny: Path, lives: Lives, tmp_path: Path
) -> None:
    serve_bursts(tiny, lives, tmp_path, [70, 71], [90], [2090, 2080])
    lives.load(tiny, **learned_in(tmp_path, 2), **MANY)
    assert lives.passes[1] == (2, 1024), "their first chunk"


def test_caches_of_bursts_are_copied_as_if_they_were_kept(
    tiny: Path, lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first copies in a process take CUDA 0.1 s, for which the next request would wait."""
    copied: list[int] = []

    def noted(cache: list[Any]) -> int:
        copied.append(cache[0].offset)
        return own_arrays(cache)

    monkeypatch.setattr(mlx_kept_rows, "own_arrays", noted)
    engine = lives.begin(tiny, **MANY)
    assert engine.batch is not None
    assert not any(engine.batch.books()), "the copies are gone"
    engine.close()
    assert len(copied) == len(burst(2) + burst(4)), "one that runs alone ends by itself"
    assert min(copied) > 32


@pytest.mark.parametrize(("step_s", "passes"), [(0.125, [4, 2]), (0.75, [4]), (30.0, [4])])
def test_a_restart_begins_no_step_of_these_after_its_limit(
    step_s: float, passes: list[int], tiny: Path, lives: Lives, tmp_path: Path
) -> None:
    lives.load(tiny, **learned_in(tmp_path, 1), **MANY)
    lives.load(tiny, lambda: step_s * lives.steps, **learned_in(tmp_path, 2), **MANY)
    rows = [length for count in passes for length in burst(count)]
    assert lives.rows == [9, *rows, 9]
    assert lives.passes == [(1, 8), *((count, 32) for count in passes), (1, 8)]
    alone = 2 * STEPS_OF_ONE
    assert lives.steps - alone == math.ceil(0.6 / step_s)


@pytest.mark.parametrize(
    ("generation", "rows"),
    [
        (1, [*burst(1), *burst(2), *burst(4), *burst(8)]),
        (2, [*[2] * (8 + 4 + 2), *burst(1)]),
    ],
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


@pytest.mark.parametrize(("free_bytes", "is_read"), [(3 * 44 * 1000 // 8, True), (16_000, False)])
def test_a_burst_that_an_earlier_life_has_read_needs_memory_for_its_tokens(
    free_bytes: int,
    is_read: bool,
    tiny: Path,
    lives: Lives,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve_bursts(tiny, lives, tmp_path, [40, 45, 41])
    monkeypatch.setattr(mx, "get_active_memory", lambda: 0)
    monkeypatch.setattr(mx, "get_peak_memory", lambda: 1000)  # for the first 8 tokens
    monkeypatch.setattr(mlx_warm_up, "free_memory_bytes", lambda *_: free_bytes)
    lives.load(tiny, **learned_in(tmp_path, 2), **MANY)
    assert (lives.passes[1] == (3, 44)) is is_read


def test_prompts_that_are_read_one_by_one_make_no_burst(tiny: Path, lives: Lives) -> None:
    known = known_as(tiny, Batching.SERIAL_PREFILL)
    lives.load(tiny, max_concurrency=4, known_batching=known)
    assert lives.rows == [9, *[2] * (1 + 2 + 4), *SIZES, 9, 129, 1025]
