"""How much the prefix cache may keep where nobody says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import psutil
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlxsup.worker.engines.mlx import prefix_size as mlx_prefix_size
from mlxsup.worker.engines.mlx.caches import row_bytes, tokens_that_can_be_cut
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.prefix_size import (
    automatic_bytes,
    free_memory_bytes,
    row_after_one_token,
    tokens_that_fit,
)

from support.cache_models import CONFIGURATIONS, WINDOW, make_cache_model
from support.mlx_rows import loaded_engine, make_row, make_spec, run_rows
from support.tiny_model import BYTES_PER_TOKEN, CONTEXT_LENGTH, make_tiny_model

pytestmark = pytest.mark.mlx

GIB = 2**30


@pytest.mark.parametrize(
    ("free", "row", "expected"),
    [
        (50 * GIB, 2 * GIB, 5 * GIB),
        (50 * GIB, 16 * GIB, 16 * GIB),
        (50 * GIB, 100 * GIB, 25 * GIB),
        (0, GIB, 0),
    ],
)
def test_a_tenth_of_the_free_memory_or_a_row_but_not_most_of_it(
    free: int, row: int, expected: int
) -> None:
    assert automatic_bytes(free_bytes=free, row_bytes=row) == expected


def test_free_memory_is_below_the_limit_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert free_memory_bytes("cpu", None) > GIB // 4
    limit = mx.get_active_memory() + 1000
    assert 0 <= free_memory_bytes("cpu", limit) <= 1000
    assert free_memory_bytes("cpu", 0) == 0
    told = {"free_memory": 7 * GIB, "total_memory": 8 * GIB}
    monkeypatch.setattr(mx, "device_info", lambda: told)
    assert free_memory_bytes("cuda", None) == 7 * GIB, "of the device, not of the machine"
    del told["free_memory"]
    assert free_memory_bytes("cuda", None) == 8 * GIB, "an older MLX tells only the whole"
    told.clear()
    assert free_memory_bytes("cuda", None) == 0


def test_free_memory_is_what_the_machine_has_or_what_the_limit_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = SimpleNamespace(available=5000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 700)
    for backend in ("cpu", "metal"):
        assert free_memory_bytes(backend, None) == 5000
    limits = (9000, 5700, 5699, 701, 700, 1)
    assert [free_memory_bytes("cpu", limit) for limit in limits] == [5000, 5000, 4999, 1, 0, 0]


@pytest.mark.parametrize("model_type", sorted(CONFIGURATIONS))
def test_what_a_row_takes_is_known_from_one_token(tmp_path: Path, model_type: str) -> None:
    """Nothing is computed for it, and it is what a real row of that length is kept with."""
    folder = make_cache_model(tmp_path, model_type)
    with loaded_engine(folder, prefix_cache_bytes=2**26, max_concurrency=1) as engine:
        prefixes = engine.prefixes
        assert prefixes is not None
        with mx.stream(engine.stream):
            row = row_after_one_token(engine.model)
        run_rows(engine, [make_row(1, list(range(200)), max_tokens=1)])
        longest = max(prefixes.entries(), key=lambda node: node.end)
        assert longest.value is not None
        # The state-space layers and the windows do not grow.
        assert longest.value.array_bytes == row_bytes(row, longest.end)
        is_bounded = model_type == "mamba"
        assert (row_bytes(row, 4000) == row_bytes(row, 8000)) == is_bounded


def test_how_many_tokens_fit_beside_what_does_not_grow() -> None:
    state, window, keys = ArraysCache(size=1), RotatingKVCache(max_size=8), KVCache()
    state[0] = mx.zeros((1, 100))
    for layer in (window, keys):
        layer.update_and_fetch(mx.zeros((1, 1, 1, 1)), mx.zeros((1, 1, 1, 1)))
    row = [CacheList(state, window), keys]
    assert row_bytes(row, 20) == 400 + 8 * 8 + 20 * 8
    limits = (0, 400, 416, 400 + 64 + 159, 400 + 64 + 160, 10**6)
    assert [tokens_that_fit(limit, row, 50) for limit in limits] == [0, 0, 1, 19, 20, 50]


def test_the_engine_says_what_it_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model(tmp_path)
    monkeypatch.setattr(mlx_prefix_size, "free_memory_bytes", lambda backend, limit: 6 * 2**20)

    def facts_of(**changes: Any) -> tuple[int, int]:
        engine = MlxEngine(make_spec(folder, **changes))
        facts = engine.load(lambda phase, at: None)
        engine.close()
        return facts.prefix_cache_bytes, facts.prefix_cache_tokens

    row = BYTES_PER_TOKEN * CONTEXT_LENGTH
    assert row == 4 * 2**20
    assert facts_of(prefix_cache_bytes=None) == (3 * 2**20, 3 * 2**20 // BYTES_PER_TOKEN)
    assert facts_of(prefix_cache_bytes=None, context_length=1024) == (row // 4, 1024)
    assert facts_of(prefix_cache_bytes=2**20) == (2**20, 2**20 // BYTES_PER_TOKEN)
    assert facts_of(prefix_cache_bytes=0) == (0, 0)
    assert facts_of(prefix_cache_bytes=None, deterministic=True) == (0, 0)


def test_which_caches_can_be_cut(tmp_path: Path) -> None:
    expected = {"llama": None, "deepseek_v32": None, "gemma3_text": WINDOW}
    for model_type in CONFIGURATIONS:
        folder = make_cache_model(tmp_path / model_type, model_type)
        with loaded_engine(folder, max_concurrency=1) as engine:
            fresh = make_prompt_cache(engine.model)
            assert tokens_that_can_be_cut(fresh) == expected.get(model_type, 0)


def test_an_entry_that_is_too_large_keeps_its_beginning(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    with loaded_engine(folder, prefix_cache_bytes=100 * (BYTES_PER_TOKEN + 4)) as engine:
        tokens = [(7 * number) % 1000 for number in range(300)]
        run_rows(engine, [make_row(1, tokens, max_tokens=3)])
        assert engine.insert(make_row(2, tokens, max_tokens=3)) == 100
