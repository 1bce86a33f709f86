"""What a load runs before READY, what it learns from that, and what later lives run again."""

from __future__ import annotations

import math
import os
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import Batching
from mlxsup.worker.engine import Row
from mlxsup.worker.engines.mlx import kept_rows as mlx_kept_rows
from mlxsup.worker.engines.mlx import load as mlx_load
from mlxsup.worker.engines.mlx import warm_up as mlx_warm_up
from mlxsup.worker.engines.mlx.batch import MlxBatch
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.kernels import FOLDER_NAME, VARIABLE
from mlxsup.worker.engines.mlx.pace_file import FILE_NAME
from mlxsup.worker.engines.mlx.prefill import LARGEST_CPU_CHUNK
from mlxsup.worker.engines.mlx.shapes import COMPILE_S

from support.bad_learned import KERNELS, BadLearned
from support.mlx_lives import SIZES, Lives, burst, learned_in, play_cuda
from support.mlx_rows import known_as, make_row, make_spec, run_rows
from support.tiny_model import make_tiny_model

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> Lives:
    return Lives(monkeypatch)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    play_cuda(monkeypatch)


def pace_in(folder: Path) -> str:
    return (folder / FILE_NAME).read_text()


# ---------------------------------------------------------------- the first life
def test_each_size_is_shown_in_one_pass(tiny: Path, lives: Lives) -> None:
    lives.load(tiny)
    assert lives.rows == [9, 129, 1025]
    assert lives.read == [8, 128, 1024]


def test_a_slow_model_is_not_shown_long_prompts(tiny: Path, lives: Lives) -> None:
    ticks = count(step=0.2)  # each look at the clock, so each step takes that long
    lives.load(tiny, lambda: next(ticks))
    assert lives.rows == [9]


def test_nothing_is_shown_that_might_not_fit_into_memory(
    tiny: Path, lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int | None]] = []

    def none_left(backend: str, limit: int | None) -> int:
        asked.append((backend, limit))
        return 0

    monkeypatch.setattr(mlx_warm_up, "free_memory_bytes", none_left)
    lives.load(tiny, memory_limit_bytes=1 << 33)
    assert lives.rows == [9]
    assert asked == [("cpu", 1 << 33)]


def test_no_pass_holds_memory_any_more_when_a_model_is_ready(
    tiny: Path, lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in use then counts as the model's weights."""
    remove = MlxBatch.remove

    def remove_slowly(self: MlxBatch, *keys: RequestKey) -> None:
        with mx.stream(self._stream):  # half a second
            mx.async_eval(mx.ones((1024, 1024)) @ mx.ones((1024, 1024)))  # type: ignore[no-untyped-call]
        remove(self, *keys)

    monkeypatch.setattr(MlxBatch, "remove", remove_slowly)
    engine = lives.begin(tiny)
    ready = engine.bytes_held().active
    mx.synchronize(engine.stream)
    assert engine.bytes_held().active == ready
    engine.close()


@pytest.mark.usefixtures("cuda")
def test_cuda_has_the_usual_shapes_compiled_and_learns_after_that(tiny: Path, lives: Lives) -> None:
    lives.load(tiny, max_concurrency=6)
    bursts = [length for count in (1, 2, 4, 6) for length in burst(count)]
    assert lives.rows == [9, *bursts, *SIZES, 9, 129, 1025]
    assert lives.passes[1:5] == [(1, 32), (2, 32), (4, 32), (6, 32)], "each burst is one pass"
    assert lives.read[5:] == [32, 128, 512, 1024, 2048, 0, 8, 128, 1024]
    assert {1, 2, 4, 6} <= set(lives.decoded)
    assert lives.reports >= lives.steps > 15, "each step is progress of the load"


@pytest.mark.usefixtures("cuda")
def test_fixed_chunks_are_compiled_as_they_are(tiny: Path, lives: Lives) -> None:
    lives.load(tiny, deterministic=True)
    assert lives.rows == [9, 2, *SIZES, 9]
    assert set(lives.read) == {8, 1, 32, 128, 256, 0}


@pytest.mark.usefixtures("cuda")
def test_slow_compiling_is_left_for_later(tiny: Path, lives: Lives) -> None:
    ticks = count(step=25.0)
    lives.load(tiny, lambda: next(ticks))
    assert lives.rows[0] == lives.rows[-1] == 9
    assert 2049 not in lives.rows


@pytest.mark.usefixtures("cuda")
def test_a_step_of_a_new_shape_has_a_longer_limit_with_cuda(tiny: Path, lives: Lives) -> None:
    engine = lives.begin(tiny, max_concurrency=2)

    def predictions(*keys: int) -> list[float]:
        for key in keys:
            engine.insert(make_row(key, list(range(300)), max_tokens=3))
        predicted_s = []
        while engine.has_rows():
            predicted_s.append(engine.predict_step_s())
            engine.step()
        return predicted_s

    assert engine.predict_step_s() == 0.0, "nothing to do"
    assert max(predictions(1, 2)) >= COMPILE_S, "two long prompts at once were never read"
    assert max(predictions(3, 4)) < COMPILE_S
    engine.close()


# ---------------------------------------------------------------- later lives
def test_a_later_life_uses_the_pace_of_an_earlier_one(
    tiny: Path, lives: Lives, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="mlxsup")
    for generation, pace, rows in ((1, "measured", [9, 129, 1025]), (2, "learned", [9])):
        engine = lives.begin(tiny, **learned_in(tmp_path, generation))
        assert lives.rows == rows
        said = caplog.records[-1].getMessage()
        assert said == f"model warmed up model=m rows={len(rows)} pace={pace} seconds=0.000"
        engine.insert(make_row(1, list(range(1500)), max_tokens=1))
        assert engine.prefill_chunk() == LARGEST_CPU_CHUNK, "the first chunk is no small one"
        engine.remove(make_row(1, [1]).key)
        engine.close()


def of_300(first: int) -> list[Row]:
    """Requests whose chunks together are larger than what the warm-up has shown."""
    return [make_row(key, list(range(first + key, first + key + 300))) for key in range(1, 6)]


def test_a_pace_is_kept_at_ready_and_again_when_the_batch_is_empty(
    tiny: Path, lives: Lives, tmp_path: Path
) -> None:
    """A worker that is killed has kept what it knew a minute before at the latest."""
    now = [0.0]
    engine = lives.begin(tiny, lambda: now[0], max_concurrency=5, **learned_in(tmp_path, 1))
    at_ready = pace_in(tmp_path)
    run_rows(engine, of_300(0))
    served = pace_in(tmp_path)
    assert served != at_ready
    now[0] = 30.0
    run_rows(engine, of_300(200))
    assert pace_in(tmp_path) == served
    now[0] = 61.0
    run_rows(engine, of_300(400))
    engine.close()


def test_a_clean_exit_keeps_what_was_learned_last(tiny: Path, lives: Lives, tmp_path: Path) -> None:
    engine = lives.begin(tiny, max_concurrency=5, **learned_in(tmp_path, 1))
    at_ready = pace_in(tmp_path)
    for row in of_300(0):
        engine.insert(row)
    engine.step()
    engine.close()
    assert pace_in(tmp_path) != at_ready


def test_the_pace_of_another_model_is_not_used(
    tiny: Path, lives: Lives, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="mlxsup")
    lives.load(tiny, **learned_in(tmp_path / "learned", 1))
    other = make_tiny_model(tmp_path / "other", seed=1)
    lives.load(other, **learned_in(tmp_path / "learned", 2))
    assert lives.rows == [9, 129, 1025]
    said = [one.getMessage() for one in caplog.records]
    assert 'learned pace not used model=m cause="it is of another model or version of MLX"' in said


# ---------------------------------------------------------------- the folder of kernels
@pytest.mark.parametrize("has_cuda", [True, False])
def test_only_cuda_is_told_where_to_keep_its_kernels(
    tiny: Path, lives: Lives, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_cuda: bool
) -> None:
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: has_cuda)
    lives.load(tiny, **learned_in(tmp_path, 1))
    assert (tmp_path / FOLDER_NAME).exists() is has_cuda
    assert os.environ.get(VARIABLE, "").startswith(str(tmp_path)) is has_cuda


@pytest.mark.parametrize("case", KERNELS, ids=lambda case: case.name)
def test_kernels_that_cannot_be_used_are_said_once_and_the_model_loads(
    tiny: Path,
    lives: Lives,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    case: BadLearned,
) -> None:
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mlx_load, "version", lambda package: "1")
    monkeypatch.setattr(mx, "device_info", dict)
    caplog.set_level("INFO", logger="mlxsup")
    case.prepare(tmp_path)
    lives.load(tiny, **learned_in(tmp_path, 1))
    said = [one.getMessage() for one in caplog.records]
    assert sum(case.words in line for line in said) == 1
    assert lives.rows == [9, 129, 1025]


MANY: dict[str, Any] = {"max_concurrency": 4}

FEW = (33, 65)
"""In place of `SIZES`, of which the largest takes seconds."""

STEPS_OF_ONE = 4
"""Of a request that runs alone, until it has two tokens."""


@pytest.fixture
def cuda_lives(monkeypatch: pytest.MonkeyPatch) -> Lives:
    play_cuda(monkeypatch)
    monkeypatch.setattr(mlx_warm_up, "COMPILED", tuple(size - 1 for size in FEW))
    return Lives(monkeypatch)


def test_a_restart_runs_the_shapes_again_and_the_largest_bursts_first(
    tiny: Path, cuda_lives: Lives, tmp_path: Path
) -> None:
    """The next daemon may find the folder of kernels empty, and begins with what is needed most."""
    cuda_lives.load(tiny, **learned_in(tmp_path, 2), **MANY)
    assert cuda_lives.passes[1:4] == [(1, 32), (2, 32), (4, 32)], "nothing was learned"
    cuda_lives.load(tiny, **learned_in(tmp_path, 2), **MANY)
    assert cuda_lives.rows == [9, *burst(4), *burst(2), *burst(1), *FEW, 9]
    assert cuda_lives.passes[1:4] == [(4, 32), (2, 32), (1, 32)]
    cuda_lives.load(tiny, **learned_in(tmp_path, 1), **MANY)
    assert cuda_lives.passes[1:4] == [(1, 32), (2, 32), (4, 32)]


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
    tiny: Path, cuda_lives: Lives, tmp_path: Path
) -> None:
    """With CUDA a pass over other numbers of prompts or tokens is prepared for 50 ms each."""
    serve_bursts(tiny, cuda_lives, tmp_path, [70, 71], [40, 45, 41])
    cuda_lives.load(tiny, **learned_in(tmp_path, 2), **MANY)
    assert cuda_lives.rows[1:8] == [*burst(3, 44), *burst(4)]
    assert cuda_lives.passes[1:3] == [(3, 44), (4, 32)]
    cuda_lives.load(tiny, **learned_in(tmp_path, 3), **MANY)
    assert cuda_lives.passes[1:3] == [(3, 44), (4, 32)], "this life has served none, and keeps it"
    cuda_lives.load(tiny, **learned_in(tmp_path, 4), max_concurrency=2)
    assert cuda_lives.passes[1] == (2, 32), "there are no longer as many places"
    cuda_lives.load(tiny, **learned_in(tmp_path, 1), **MANY)
    assert cuda_lives.passes[1] == (1, 32), "what every request needs comes first"


def test_a_burst_that_ends_a_life_while_it_warms_up_is_not_read_by_the_next_one(
    tiny: Path, cuda_lives: Lives, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may hold the memory that there was for it."""
    serve_bursts(tiny, cuda_lives, tmp_path, [40, 45, 41])

    def has_no_memory(cache: list[Any]) -> int:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(mlx_kept_rows, "own_arrays", has_no_memory)
        engine = MlxEngine(make_spec(tiny, **learned_in(tmp_path, 2), **MANY))
        cuda_lives.passes = []
        with pytest.raises(MemoryError):
            engine.load(lambda phase, share: None)
        engine.close()
    assert cuda_lives.passes[1] == (3, 44)
    cuda_lives.load(tiny, **learned_in(tmp_path, 3), **MANY)
    assert cuda_lives.passes[1] == (4, 32)


def test_a_prompt_alone_and_the_rest_of_long_ones_are_no_burst(
    tiny: Path, cuda_lives: Lives, tmp_path: Path
) -> None:
    serve_bursts(tiny, cuda_lives, tmp_path, [70, 71], [90], [2090, 2080])
    cuda_lives.load(tiny, **learned_in(tmp_path, 2), **MANY)
    assert cuda_lives.passes[1] == (2, 1024), "their first chunk"


@pytest.mark.parametrize(("step_s", "passes"), [(0.125, [4, 2]), (0.75, [4]), (30.0, [4])])
def test_a_restart_begins_no_step_of_these_after_its_limit(
    step_s: float, passes: list[int], tiny: Path, cuda_lives: Lives, tmp_path: Path
) -> None:
    cuda_lives.load(tiny, **learned_in(tmp_path, 1), **MANY)
    cuda_lives.load(tiny, lambda: step_s * cuda_lives.steps, **learned_in(tmp_path, 2), **MANY)
    rows = [length for count in passes for length in burst(count)]
    assert cuda_lives.rows == [9, *rows, 9]
    assert cuda_lives.passes == [(1, 8), *((count, 32) for count in passes), (1, 8)]
    alone = 2 * STEPS_OF_ONE
    assert cuda_lives.steps - alone == math.ceil(0.6 / step_s)


@pytest.mark.parametrize(("free_bytes", "is_read"), [(3 * 44 * 1000 // 8, True), (16_000, False)])
def test_a_burst_that_an_earlier_life_has_read_needs_memory_for_its_tokens(
    free_bytes: int,
    is_read: bool,
    tiny: Path,
    cuda_lives: Lives,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve_bursts(tiny, cuda_lives, tmp_path, [40, 45, 41])
    monkeypatch.setattr(mx, "get_active_memory", lambda: 0)
    monkeypatch.setattr(mx, "get_peak_memory", lambda: 1000)  # for the first 8 tokens
    monkeypatch.setattr(mlx_warm_up, "free_memory_bytes", lambda *_: free_bytes)
    cuda_lives.load(tiny, **learned_in(tmp_path, 2), **MANY)
    assert (cuda_lives.passes[1] == (3, 44)) is is_read


def test_prompts_that_are_read_one_by_one_make_no_burst(tiny: Path, cuda_lives: Lives) -> None:
    known = known_as(tiny, Batching.SERIAL_PREFILL)
    cuda_lives.load(tiny, max_concurrency=4, known_batching=known)
    assert cuda_lives.rows == [9, *[2] * (1 + 2 + 4), *FEW, 9, 129, 1025]


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
    cuda_lives: Lives,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pass over four times the tokens needs 16 times the memory at most, and so does each row;
    what many rows have taken is not what each of them takes."""
    cuda_lives.load(tiny, **learned_in(tmp_path, 1), max_concurrency=8)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 0)
    monkeypatch.setattr(mx, "get_peak_memory", lambda: 1000 * cuda_lives.passes[-1][0])
    monkeypatch.setattr(mlx_warm_up, "free_memory_bytes", lambda *_: 17_000)
    cuda_lives.load(tiny, **learned_in(tmp_path, generation), max_concurrency=8)
    assert cuda_lives.rows == [9, *rows, *FEW, 9]
