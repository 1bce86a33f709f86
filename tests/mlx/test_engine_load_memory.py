"""Memory that runs out, limits of memory that a load sets, and what is left after its close."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlxsup.worker.engine import GpuFaultElsewhereError
from mlxsup.worker.engines.mlx import load as mlx_load
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.folder import check_folder
from mlxsup.worker.engines.mlx.load import materialise, raise_if_memory
from mlxsup.worker.engines.mlx.passes import TogetherPasses

from support.mlx_rows import loaded_engine, make_row, make_spec, run_rows
from support.tiny_model import make_tiny_model

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def load(path: Path) -> None:
    engine = MlxEngine(make_spec(path))
    try:
        engine.load(lambda phase, progress: None)
    finally:
        engine.close()


@pytest.mark.parametrize(
    "text",
    [
        "[metal::malloc] Attempting to allocate 99 bytes which is greater than the maximum"
        " allowed buffer size of 9 bytes.",
        "[METAL] Command buffer execution failed: Insufficient Memory"
        " (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        "cudaMallocAsync(&data, size, stream) failed: out of memory",
        "[malloc] Unable to allocate 99 bytes.",
    ],
)
def test_errors_about_memory_become_memory_errors(text: str) -> None:
    with pytest.raises(MemoryError):
        raise_if_memory(RuntimeError(text))
    raise_if_memory(RuntimeError("There is no Stream(cpu, 1) in current thread."))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "[METAL] Command buffer execution failed: Innocent Victim"
            " (00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)",
            GpuFaultElsewhereError,
        ),
        (
            "[METAL] Command buffer execution failed: Caused GPU Timeout Error"
            " (00000002:kIOGPUCommandBufferCallbackErrorTimeout)",
            RuntimeError,
        ),
    ],
)
def test_a_step_tells_another_process_fault_on_the_gpu_from_its_own(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, text: str, error: type[Exception]
) -> None:
    """Exit 72 accuses none of the requests; 70 does."""

    def fail() -> None:
        raise RuntimeError(text)

    with loaded_engine(tiny) as engine:
        assert engine.batch is not None
        assert isinstance(engine.batch.passes, TogetherPasses)
        monkeypatch.setattr(engine.batch.passes.generator, "next", fail)
        with pytest.raises(error) as caught:
            engine.step()
        assert caught.type is error


def test_memory_that_runs_out_in_a_load_is_not_the_models_fault(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_model(*args: object, **named: object) -> None:
        raise RuntimeError("[malloc] Unable to allocate 99 bytes.")

    monkeypatch.setattr(mlx_load, "load_model", load_model)
    with pytest.raises(MemoryError, match="99 bytes"):
        load(tiny)


def test_memory_that_runs_out_while_arrays_are_read_is_not_the_models_fault(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arrays: object) -> None:
        raise RuntimeError("[malloc] Unable to allocate 99 bytes for what was read.")

    monkeypatch.setattr(mx, "eval", fail)
    with pytest.raises(MemoryError, match="99 bytes"):
        materialise(
            {"one": mx.zeros(1)}, check_folder(tiny, lambda share: None), lambda share: None
        )


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """All limits set on a simulated device that can wire 1000 bytes; it began with 7."""
    limits = [7]

    def set_wired_limit(value: int) -> int:
        limits.append(value)
        return limits[-2]

    info = dict(mx.device_info()) | {"max_recommended_working_set_size": 1000}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    return limits


def test_wiring_is_off_and_the_limit_comes_back_E3_I3(tiny: Path, limit: list[int]) -> None:
    """Several workers must not wire all of it each."""
    with loaded_engine(tiny):
        assert 1000 in limit, "mlx-lm's constructor wires what the machine recommends"
        assert limit[-1] == 0
    assert limit[-1] == 7


@pytest.mark.parametrize(("asked", "wired"), [(300, 300), (5000, 1000), (None, 1000)])
def test_wiring_takes_what_the_spec_says_within_the_machine_I3(
    tiny: Path, limit: list[int], asked: int | None, wired: int
) -> None:
    """None is as much as was loaded, here above what the simulated machine recommends."""
    with loaded_engine(tiny, wired_limit_bytes=asked):
        assert limit[-1] == wired
    assert limit[-1] == 7


def test_memory_and_cache_limits_hold_for_a_life_and_come_back_E3(tiny: Path) -> None:
    memory, cache = mx.set_memory_limit(10**10), mx.set_cache_limit(10**9)
    try:
        with loaded_engine(tiny, memory_limit_bytes=2 * 10**9, cache_limit_bytes=0) as engine:
            assert mx.set_memory_limit(2 * 10**9) == 2 * 10**9
            assert mx.set_cache_limit(0) == 0
            run_rows(engine, [make_row(1, list(range(100)))])
            held = engine.bytes_held()
            assert held.cache == 0
            assert 0 < held.active <= held.peak
        assert mx.set_memory_limit(memory) == 10**10
        assert mx.set_cache_limit(cache) == 10**9
    finally:
        mx.set_memory_limit(memory)
        mx.set_cache_limit(cache)


def test_close_is_safe_before_a_load_and_twice_E2(tiny: Path) -> None:
    engine = MlxEngine(make_spec(tiny))
    engine.close()
    engine.load(lambda phase, progress: None)
    engine.insert(make_row(1, [1, 2, 3]))
    engine.close()
    engine.close()
    assert not engine.has_rows()
