"""What a load makes of `context_length`, `memory` and `cache_limit`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxsup.protocol.states import LoadPhase
from mlxsup.worker.engine import BadLaunchError, EngineFacts, StepResult
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.limits import MemoryLimits

from support.mlx_rows import make_row, make_spec, run_rows
from support.tiny_model import CONTEXT_LENGTH, make_tiny_model

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def undeclared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("undeclared"))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["max_position_embeddings"]
    path.write_text(json.dumps(config))
    return folder


def facts_of(path: Path, **changes: Any) -> EngineFacts:
    engine = MlxEngine(make_spec(path, **changes))
    try:
        return engine.load(lambda phase, progress: None)
    finally:
        engine.close()


def test_a_declared_length_is_lowered_and_never_raised(tiny: Path) -> None:
    assert facts_of(tiny, context_length=100).context_length == 100
    more = facts_of(tiny, context_length=9000)
    assert more.context_length == CONTEXT_LENGTH
    assert any("9000" in text and str(CONTEXT_LENGTH) in text for text in more.warnings)


def test_a_length_that_is_not_declared_is_what_is_asked_for(undeclared: Path) -> None:
    asked = facts_of(undeclared, context_length=9000)
    assert (asked.context_length, asked.warnings) == (9000, ())
    silent = facts_of(undeclared)
    assert silent.context_length == 4096
    assert any("set context_length" in text for text in silent.warnings)


def test_a_limit_below_the_weights_ends_the_load_before_they_are_read_I4(tiny: Path) -> None:
    seen: list[LoadPhase] = []
    engine = MlxEngine(make_spec(tiny, memory_limit_bytes=1_000_000))
    try:
        with pytest.raises(BadLaunchError, match=r"and memory allows 1.0 MiB"):
            engine.load(lambda phase, progress: seen.append(phase))
    finally:
        engine.close()
    assert LoadPhase.MATERIALISE not in seen


def test_limits_come_back_when_a_load_fails_too_E3(tiny: Path) -> None:
    """Held to a limit below what it uses, MLX takes three times as long for everything."""
    memory, cache = mx.set_memory_limit(10**10), mx.set_cache_limit(10**9)
    engine = MlxEngine(make_spec(tiny, memory_limit_bytes=1_000_000, cache_limit_bytes=0))
    try:
        with pytest.raises(BadLaunchError):
            engine.load(lambda phase, progress: None)
        engine.close()
        engine.close()
    finally:
        now = mx.set_memory_limit(memory), mx.set_cache_limit(cache)
    assert now == (10**10, 10**9)


def test_a_limit_that_the_weights_nearly_fill_is_warned_of(tiny: Path) -> None:
    weights = (tiny / "model.safetensors").stat().st_size
    (warning,) = facts_of(tiny, memory_limit_bytes=int(weights * 1.1)).warnings
    assert "set memory to at least" in warning
    assert facts_of(tiny, memory_limit_bytes=weights * 100).warnings == ()


GIB = 2**30


@pytest.fixture
def cache_limit() -> Iterator[Callable[[], int]]:
    """What MLX may keep for reuse; 10 GiB and one byte at first."""
    before = mx.set_cache_limit(10 * GIB + 1)

    def limit() -> int:
        now = int(mx.set_cache_limit(before))
        mx.set_cache_limit(now)
        return now

    yield limit
    mx.set_cache_limit(before)


@pytest.mark.parametrize(
    ("backend", "info", "expected"),
    [
        ("cuda", {"total_memory": 140 * GIB}, 8 * GIB),
        ("cuda", {"total_memory": 24 * GIB, "free_memory": GIB}, 3 * GIB),
        ("metal", {"memory_size": 16 * GIB}, 2 * GIB),
        ("cuda", {}, 8 * GIB),
        ("cpu", {"memory_size": 16 * GIB}, 10 * GIB + 1),
    ],
)
def test_a_gpu_keeps_a_bounded_part_for_reuse_unless_told_otherwise(
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
    cache_limit: Callable[[], int],
    backend: str,
    info: dict[str, int],
    expected: int,
) -> None:
    """MLX's own limit there is nearly the whole device, in every process."""
    monkeypatch.setattr(mx, "device_info", lambda: info)
    for told, held in ((None, expected), (0, 0), (9 * GIB, 9 * GIB)):
        limits = MemoryLimits(make_spec(tiny, cache_limit_bytes=told), backend)
        limits.set()
        assert cache_limit() == held
        limits.restore()
        assert cache_limit() == 10 * GIB + 1


@pytest.fixture
def memory_limit() -> Iterator[Callable[[], int]]:
    """What MLX may hold; 20 GiB and one byte at first."""
    before = mx.set_memory_limit(20 * GIB + 1)

    def limit() -> int:
        now = int(mx.set_memory_limit(before))
        mx.set_memory_limit(now)
        return now

    yield limit
    mx.set_memory_limit(before)


@pytest.mark.parametrize(
    ("backend", "told", "expected"),
    [
        ("cuda", None, 7 * GIB),
        ("cuda", 6 * GIB, 6 * GIB),
        ("cuda", 9 * GIB, 7 * GIB),
        ("metal", None, None),
        ("cpu", 6 * GIB, 6 * GIB),
    ],
)
def test_with_cuda_mlx_holds_the_weights_and_most_of_what_rows_may_take(
    tiny: Path,
    memory_limit: Callable[[], int],
    backend: str,
    told: int | None,
    expected: int | None,
) -> None:
    """Two engines on one GPU that read long prompts held 81 GiB each without this, 58 together
    were needed."""
    limits = MemoryLimits(make_spec(tiny, memory_limit_bytes=told), backend)
    limits.set()
    weights = mx.zeros(1000)
    mx.eval(weights)
    limits.set_wired()
    held = mx.get_active_memory() if backend == "cuda" and expected == 7 * GIB else 0
    limits.bound_rows(4 * GIB)
    limits.bound_rows(8 * GIB)
    assert memory_limit() == (20 * GIB + 1 if expected is None else expected + held)
    assert not limits.is_exceeded()
    limits.restore()
    assert memory_limit() == 20 * GIB + 1


def test_more_than_that_is_noticed(tiny: Path, memory_limit: Callable[[], int]) -> None:
    limits = MemoryLimits(make_spec(tiny), "cuda")
    limits.set()
    assert not limits.is_exceeded(), "nothing was bounded"
    limits.set_wired()
    limits.bound_rows(8 * 4000)
    rows = mx.zeros(7 * 1000)
    mx.eval(rows)
    assert not limits.is_exceeded()
    more = mx.zeros(10_000)
    mx.eval(more)
    assert limits.is_exceeded()
    limits.restore()


@pytest.mark.parametrize("call", [MlxEngine.step, MlxEngine.decode])
def test_known_prompts_go_when_rows_need_their_memory(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[MlxEngine], StepResult]
) -> None:
    """Also while a long prompt waits for a lease, and the others only decode."""
    engine = MlxEngine(make_spec(tiny, prefix_cache_bytes=10**7))
    try:
        engine.load(lambda phase, progress: None)
        run_rows(engine, [make_row(1, list(range(2, 60)), max_tokens=4)])
        assert engine.bytes_held().prefix > 0
        engine.insert(make_row(2, list(range(70, 90)), max_tokens=4))
        call(engine)
        assert engine.bytes_held().prefix > 0, "there is memory for it"
        monkeypatch.setattr(MemoryLimits, "is_exceeded", lambda limits: True)
        call(engine)
        assert engine.bytes_held().prefix == 0
    finally:
        engine.close()
