"""What a load runs before READY, what it learns from it, and what later lives need not repeat."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

import mlx.core as mx
import pytest

from mlxsup.protocol.ids import Generation, RequestKey
from mlxsup.worker.engine import Row
from mlxsup.worker.engines.mlx import load as mlx_load
from mlxsup.worker.engines.mlx import warm_up as mlx_warm_up
from mlxsup.worker.engines.mlx.batch import MlxBatch
from mlxsup.worker.engines.mlx.kernels import FOLDER_NAME, VARIABLE
from mlxsup.worker.engines.mlx.pace_file import FILE_NAME
from mlxsup.worker.engines.mlx.prefill import LARGEST_CPU_CHUNK
from mlxsup.worker.engines.mlx.shapes import COMPILE_S
from mlxsup.worker.engines.mlx.warm_up import powers_up_to

from support.bad_learned import KERNELS, BadLearned
from support.mlx_lives import SIZES, Lives, burst, learned_in, play_cuda
from support.mlx_rows import make_row, run_rows
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


def test_the_cpu_compiles_nothing(tiny: Path, lives: Lives) -> None:
    engine = lives.begin(tiny, max_concurrency=4)
    assert lives.rows[-3:] == [9, 129, 1025]
    engine.insert(make_row(1, list(range(300))))
    assert engine.predict_step_s() < COMPILE_S
    run_rows(engine)
    engine.close()


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
def test_what_takes_too_long_to_compile_is_left_for_later(tiny: Path, lives: Lives) -> None:
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


@pytest.mark.parametrize("is_gpu", [True, False])
def test_the_pacer_knows_which_step_is_the_first_of_its_shape_with_cuda(
    is_gpu: bool, tiny: Path, lives: Lives, request: pytest.FixtureRequest
) -> None:
    if is_gpu:
        request.getfixturevalue("cuda")
    engine = lives.begin(tiny, max_concurrency=2)
    assert engine.batch is not None

    def firsts(*keys: int) -> list[bool]:
        for key in keys:
            engine.insert(make_row(key, list(range(300)), max_tokens=3))
        seen = []
        while engine.has_rows():
            engine.step()
            assert engine.batch is not None
            seen.append(engine.batch.pacer.is_first)
        return seen

    assert firsts(1, 2)[0] is is_gpu, "two long prompts at once were never read"
    assert not any(firsts(3, 4))
    engine.close()


@pytest.mark.parametrize(
    ("most", "expected"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8])]
)
def test_decoding_is_compiled_for_powers_of_two_and_the_most(
    most: int, expected: list[int]
) -> None:
    assert powers_up_to(most) == expected


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


def test_a_life_without_a_folder_learns_afresh(tiny: Path, lives: Lives) -> None:
    for generation in (1, 2):
        lives.load(tiny, generation=Generation(generation))
        assert lives.rows == [9, 129, 1025]


def of_3000(first: int) -> list[Row]:
    """Requests whose chunks together are larger than what the warm-up has shown."""
    return [make_row(key, list(range(first + key, first + key + 3000))) for key in range(1, 6)]


def test_a_pace_is_kept_at_ready_and_again_when_the_batch_is_empty(
    tiny: Path, lives: Lives, tmp_path: Path
) -> None:
    """A worker that is killed has kept what it knew a minute before at the latest."""
    now = [0.0]
    engine = lives.begin(tiny, lambda: now[0], max_concurrency=5, **learned_in(tmp_path, 1))
    at_ready = pace_in(tmp_path)
    run_rows(engine, of_3000(0))
    served = pace_in(tmp_path)
    assert served != at_ready
    now[0] = 30.0
    run_rows(engine, of_3000(200))
    assert pace_in(tmp_path) == served
    now[0] = 61.0
    run_rows(engine, of_3000(400))
    engine.close()


def test_a_clean_exit_keeps_what_was_learned_last(tiny: Path, lives: Lives, tmp_path: Path) -> None:
    engine = lives.begin(tiny, max_concurrency=5, **learned_in(tmp_path, 1))
    at_ready = pace_in(tmp_path)
    for row in of_3000(0):
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
