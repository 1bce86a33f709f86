"""What a load runs before READY, and what a worker after a crash runs again."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlxsup.protocol.ids import Generation, RequestKey
from mlxsup.protocol.states import Batching, LoadPhase
from mlxsup.worker.engine import Row
from mlxsup.worker.engines.mlx import batch_modes as mlx_passes
from mlxsup.worker.engines.mlx import loader as mlx_load
from mlxsup.worker.engines.mlx import warm_up as mlx_warm_up
from mlxsup.worker.engines.mlx.batch import MlxBatch
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.kernels import FOLDER_NAME, VARIABLE
from mlxsup.worker.engines.mlx.prefill import CostModel
from mlxsup.worker.engines.mlx.shapes import COMPILE_S, padded_tokens

from support.worker.mlx_rows import known_as, make_row, make_spec

pytestmark = pytest.mark.mlx


def burst(count: int, tokens: int = 32) -> list[int]:
    """Return the prompt lengths of a burst from which one pass reads `tokens` tokens.

    The last of several prompts is a token shorter, and is padded.
    """
    return [tokens + 1] * (count - 1) + [tokens + (count == 1)]


class Lives:
    """Loads and notes what each load runs.

    Attributes:
        rows: the lengths of the prompts, in order.
        read: the tokens of each pass over a prompt; 0: what was learned until then is forgotten.
        passes: the same with the number of prompts that the pass read, forgetting left out.
        decoded: how many rows decoded in a step without prompts.
        reports: the reports of the warm-up.
        steps: of the batch.
        clock: of the batch, and of its passes.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        self.read: list[int] = []
        self.passes: list[tuple[int, int]] = []
        self.decoded: list[int] = []
        self.reports = self.steps = 0
        self.clock: Callable[[], float] = lambda: 0.0
        passes_clock = SimpleNamespace(perf_counter=lambda: self.clock())
        monkeypatch.setattr(mlx_passes, "time", passes_clock)
        insert, step, saw_chunk = MlxBatch.insert, MlxBatch.step, CostModel.saw_chunk

        def noted_insert(batch: MlxBatch, row: Row) -> int:
            self.rows.append(len(row.tokens))
            return insert(batch, row)

        def noted_step(batch: MlxBatch) -> Any:
            self.steps += 1
            result = step(batch)
            self.decoded.append(len({token.key for token in result.tokens}))
            return result

        def noted_chunk(
            costs: CostModel, *, prefill_rows: int, longest: int, **others: Any
        ) -> None:
            if longest:
                self.read.append(longest)
                self.passes.append((prefill_rows, longest))
            saw_chunk(costs, prefill_rows=prefill_rows, longest=longest, **others)

        forget = CostModel.forget

        def noted_forget(costs: CostModel) -> None:
            self.read.append(0)
            forget(costs)

        monkeypatch.setattr(CostModel, "forget", noted_forget)
        monkeypatch.setattr(MlxBatch, "insert", noted_insert)
        monkeypatch.setattr(MlxBatch, "step", noted_step)
        monkeypatch.setattr(CostModel, "saw_chunk", noted_chunk)

    def begin(
        self, folder: Path, clock: Callable[[], float] = lambda: 0.0, **changes: Any
    ) -> MlxEngine:
        """Return a loaded engine; by the clock, unless another is given, no step takes any time."""
        self.rows, self.read, self.passes, self.decoded = [], [], [], []
        self.reports = self.steps = 0
        self.clock = clock
        engine = MlxEngine(make_spec(folder, **({"max_concurrency": 1} | changes)), clock)

        def report(phase: LoadPhase, share: float) -> None:
            self.reports += phase is LoadPhase.WARMUP and share < 1.0

        engine.load(report)
        return engine

    def load(self, folder: Path, clock: Callable[[], float] = lambda: 0.0, **changes: Any) -> None:
        """Live a whole life."""
        self.begin(folder, clock, **changes).close()


def learned_in(folder: Path, generation: int) -> dict[str, Any]:
    """Return what a spec says of the worker with that number and the folder of what is learned."""
    return {"learned_dir": str(folder), "generation": Generation(generation)}


FEW = (33, 65)
"""Prompts whose passes are compiled alone; in place of larger ones, which take seconds."""

MOST_TOKENS = 512
"""Of a pass that idle time runs; in place of one four times as long."""

SHOWN = [9, 129, 257]
"""Prompts that show what tokens cost."""

SHOWN_AGAIN = [9, 129, 129, 257, 257]
"""The same with CUDA, where the first pass over as many may show what preparing costs."""


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> Lives:
    monkeypatch.setattr(mlx_warm_up, "SHOWN", tuple(size - 1 for size in SHOWN[1:]))
    monkeypatch.setattr(mlx_warm_up, "COMPILED", tuple(size - 1 for size in FEW))
    monkeypatch.setattr(mlx_warm_up, "USUAL_BURSTS", ())
    monkeypatch.setattr(mlx_warm_up, "DEEP", 1 << 40)
    monkeypatch.setattr(mlx_warm_up, "MOST_TOKENS", MOST_TOKENS)
    return Lives(monkeypatch)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is a GPU with plenty of memory; it computes on the CPU."""
    monkeypatch.setattr(mlx_load, "open_stream", lambda: ("cuda", mx.new_stream(mx.cpu)))
    monkeypatch.setattr(mlx_warm_up, "free_memory_bytes", lambda *_: 1 << 40)


# ---------------------------------------------------------------- the first life
def test_each_size_is_shown_in_one_pass_while_that_is_quick_and_fits_into_memory(
    tiny: Path, lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives.load(tiny)
    assert (lives.rows, lives.read) == (SHOWN, [8, 128, 256])
    ticks = count(step=0.2)  # each look at the clock, so each step takes that long
    lives.load(tiny, lambda: next(ticks))
    assert lives.rows == [9]
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

    monkeypatch.setattr(mlx_warm_up, "SHOWN", ())
    monkeypatch.setattr(MlxBatch, "remove", remove_slowly)
    engine = lives.begin(tiny)
    ready = engine.bytes_held().active
    mx.synchronize(engine.stream)
    assert engine.bytes_held().active == ready
    monkeypatch.setattr(MlxBatch, "remove", remove)
    engine.close()


@pytest.mark.usefixtures("cuda")
def test_cuda_has_the_usual_shapes_compiled_and_learns_after_that(tiny: Path, lives: Lives) -> None:
    lives.load(tiny, max_concurrency=4)
    bursts = [length for count in (1, 2, 4) for length in burst(count)]
    assert lives.rows == [9, *bursts, *FEW, *SHOWN_AGAIN]
    assert lives.passes[1:4] == [(1, 32), (2, 32), (4, 32)], "each burst is one pass"
    assert lives.read[4:] == [32, 64, 0, 8, 128, 128, 256, 256]
    assert {1, 2, 4} <= set(lives.decoded)
    assert lives.reports >= lives.steps > 15, "each step is progress of the load"


@pytest.mark.usefixtures("cuda")
def test_fixed_chunks_are_compiled_as_they_are_and_slow_compiling_is_left_for_later(
    tiny: Path, lives: Lives
) -> None:
    lives.load(tiny, deterministic=True)
    assert lives.rows == [9, 2, *FEW, 9]
    assert set(lives.read) == {8, 1, 32, 64, 0}
    ticks = count(step=25.0)
    lives.load(tiny, lambda: next(ticks))
    assert lives.rows[0] == lives.rows[-1] == 9
    assert FEW[-1] not in lives.rows


@pytest.mark.usefixtures("cuda")
def test_a_step_of_a_new_shape_has_a_longer_limit_with_cuda(tiny: Path, lives: Lives) -> None:
    engine = lives.begin(tiny, max_concurrency=2)

    def predictions(*keys: int) -> list[float]:
        for key in keys:
            engine.insert(make_row(key, list(range(300)), max_tokens=3))
        predicted_s = []
        while engine.row_count():
            predicted_s.append(engine.predict_step_s())
            engine.step()
        return predicted_s

    assert engine.predict_step_s() == 0.0, "nothing to do"
    assert max(predictions(1, 2)) >= COMPILE_S, "two long prompts at once were never read"
    assert max(predictions(3, 4)) < COMPILE_S
    engine.close()


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("generation", [1, 2])
def test_a_long_prompt_is_read_once_after_a_crash_in_idle_time(
    tiny: Path, lives: Lives, monkeypatch: pytest.MonkeyPatch, generation: int
) -> None:
    monkeypatch.setattr(mlx_warm_up, "DEEP", 299)
    engine = lives.begin(tiny, max_concurrency=3, generation=generation)
    assert lives.rows.count(300) == (generation == 1)
    while engine.prepare():
        pass
    assert lives.rows.count(300) == 1
    engine.close()


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(("free_bytes", "runs"), [(399_999, False), (400_000, True)])
def test_a_long_prompt_is_read_in_passes_of_the_largest_size_if_these_fit_into_memory(
    tiny: Path, lives: Lives, monkeypatch: pytest.MonkeyPatch, free_bytes: int, runs: bool
) -> None:
    monkeypatch.setattr(mlx_warm_up, "SHOWN", ())
    monkeypatch.setattr(mlx_warm_up, "LARGEST", 64)  # as many as the last of FEW
    monkeypatch.setattr(mlx_warm_up, "DEEP", 256)
    monkeypatch.setattr(mlx_warm_up, "free_memory_bytes", lambda *_: free_bytes)
    taken = {9: 100, 33: 10_000, 65: 100_000}  # bytes of the pass, by the prompt's length
    monkeypatch.setattr(mx, "get_active_memory", lambda: 0)
    monkeypatch.setattr(mx, "get_peak_memory", lambda: taken[lives.rows[-1]])
    lives.load(tiny, max_concurrency=2)
    assert (257 in lives.rows) is runs, "four times the keys, and as many tokens"
    assert (lives.read.count(64) > 1) is runs


@pytest.mark.usefixtures("cuda")
def test_passes_are_padded_and_idle_time_runs_the_shapes_that_the_load_has_not(
    tiny: Path, lives: Lives
) -> None:
    engine = lives.begin(tiny, max_concurrency=3)
    assert engine.batch is not None
    assert engine.batch.is_padded
    loaded = len(lives.passes)
    while engine.prepare():
        pass
    ran = lives.passes[loaded:]
    assert len(ran) > 15
    assert len(set(ran)) == len(ran), "none twice"
    assert (1, 32) in lives.passes[:loaded]
    assert (1, 32) not in ran, "nor those of the load"
    assert {rows for rows, _ in ran} <= {1, 2}
    assert all(padded_tokens(size) == size and rows * size <= MOST_TOKENS for rows, size in ran)
    assert not engine.row_count()
    engine.close()


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


def torn_kernel(folder: Path) -> None:
    kernels = folder / FOLDER_NAME / "1-"
    kernels.mkdir(parents=True)
    (kernels / "add.ptx").write_bytes(b"half a ker")


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (torn_kernel, "damaged kernels deleted model=m kernels=1"),
        (
            lambda folder: (folder / FOLDER_NAME).write_bytes(b"in the way"),
            "compiled kernels not kept model=m cause=",
        ),
    ],
    ids=["torn", "in the way"],
)
def test_kernels_that_cannot_be_used_are_said_once_and_the_model_loads(
    tiny: Path,
    lives: Lives,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    prepare: Callable[[Path], object],
    words: str,
) -> None:
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mlx_load, "version", lambda package: "1")
    monkeypatch.setattr(mx, "device_info", dict)
    caplog.set_level("INFO", logger="mlxsup")
    prepare(tmp_path)
    lives.load(tiny, **learned_in(tmp_path, 1))
    said = [one.getMessage() for one in caplog.records]
    assert sum(words in line for line in said) == 1
    assert lives.rows == SHOWN


# ---------------------------------------------------------------- the lives after a crash
@pytest.mark.usefixtures("cuda")
def test_a_restart_compiles_nothing_and_shows_one_size_although_its_first_pass_is_slow(
    tiny: Path, lives: Lives, tmp_path: Path
) -> None:
    steps = Counter[int]()

    def clock() -> float:
        steps[len(lives.rows)] += 1
        return 0.15 * (len(lives.rows) > 1 or steps[1] > 1)  # within the first step

    lives.load(tiny, clock, **learned_in(tmp_path, 2), max_concurrency=4)
    assert lives.rows == [9, 9, *[SHOWN[1]] * 2]
    assert lives.read == [8, 0, 8, 128, 128]


@pytest.mark.usefixtures("cuda")
def test_prompts_that_are_read_one_by_one_make_no_burst(tiny: Path, lives: Lives) -> None:
    known = known_as(tiny, Batching.SERIAL_PREFILL)
    lives.load(tiny, max_concurrency=4, known_batching=known)
    assert lives.rows == [9, *[2] * (1 + 2 + 4), *FEW, *SHOWN_AGAIN]


@pytest.mark.usefixtures("cuda")
def test_prompts_that_might_not_fit_into_memory_together_are_only_decoded(
    tiny: Path, lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass over four times the tokens needs 16 times the memory at most, and so does each row;
    what many rows have taken is not what each of them takes."""
    monkeypatch.setattr(mx, "get_active_memory", lambda: 0)
    monkeypatch.setattr(mx, "get_peak_memory", lambda: 1000 * lives.passes[-1][0])
    monkeypatch.setattr(mlx_warm_up, "free_memory_bytes", lambda *_: 17_000)
    lives.load(tiny, max_concurrency=20)
    bursts = [length for count in (1, 2, 4, 8, 16) for length in burst(count)]
    assert lives.rows == [9, *bursts, *[2] * 20, *FEW, 9]


@pytest.mark.parametrize(
    ("context_length", "prompts"), [(2, [1]), (6, [4]), (130, [9]), (131, [9, 129])]
)
def test_what_is_run_fits_into_the_context(
    lives: Lives, tiny: Path, context_length: int, prompts: list[int]
) -> None:
    """With two tokens of an answer; the first prompt is cut, and larger ones are left out."""
    lives.load(tiny, context_length=context_length)
    assert lives.rows == prompts
