"""Attention of rows that decode, with CUDA: the kernels on a GPU, and who uses them anywhere."""

from __future__ import annotations

import shutil
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxsup.protocol.states import Batching
from mlxsup.worker.engines.mlx import decode_attention
from mlxsup.worker.engines.mlx.batch_keys import BatchKeys
from mlxsup.worker.engines.mlx.decode_attention import (
    LEAST_KEYS,
    CompileError,
    DecodeAttention,
    attention_in_use,
)

from support.cuda.played import PlayedKernels
from support.models.tiny_model import make_tiny_model
from support.worker.mlx_rows import known_as, loaded_engine, make_row, run_rows, token_ids

pytestmark = pytest.mark.mlx

attend = mx.fast.scaled_dot_product_attention


CACHE: list[mx.array] = []
"""Holds what `arrays` was given last, as a cache does."""


def in_use() -> DecodeAttention:
    found = attention_in_use()
    assert found is not None
    return found


def arrays(
    rows: int,
    heads: int,
    key_heads: int,
    width: int,
    keys: int,
    dtype: mx.Dtype = mx.float32,
    tell: Callable[..., object] | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Return queries, keys and values as a cache has fetched them: parts of larger arrays."""
    mx.random.seed(rows + keys)
    both = [mx.random.normal((rows, key_heads, keys + 37, width)).astype(dtype) for _ in "kv"]
    k, v = (one[..., :keys, :] for one in both)
    (tell or in_use().fetched)(k, v, *both)
    CACHE[:] = both
    return mx.random.normal((rows, heads, 1, width)).astype(dtype), k, v


def mask_of(padding: list[int], keys: int) -> mx.array:
    return (mx.arange(keys)[None] >= mx.array(padding)[:, None])[:, None, None]


def check_like_mlx(
    own: DecodeAttention, dtype: mx.Dtype, sizes: tuple[int, int, int, int, int]
) -> None:
    """Check that attention is as near to the exact numbers as MLX's own."""
    q, k, v = arrays(*sizes, dtype, own.fetched)
    padding = [min(sizes[-1] - 1, 41 * row) for row in range(sizes[0])]
    mask = mask_of(padding, sizes[-1])
    exact = attend(*(x.astype(mx.float32) for x in (q, k, v)), scale=0.1, mask=mask)
    own.hides(mask, mx.array(padding))
    error = mx.abs(own(q, k, v, scale=0.1, mask=mask) - exact).max()
    assert error <= mx.abs(attend(q, k, v, scale=0.1, mask=mask) - exact).max() + 1e-5


@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs MLX's CUDA build and a GPU")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize(
    "sizes",
    [(3, 32, 8, 128, 777), (5, 8, 8, 64, 1), (2, 28, 4, 128, 5000), (4, 16, 2, 256, 130)],
    ids=str,
)
def test_kernels_compute_what_mlx_does_with_a_mask(
    monkeypatch: pytest.MonkeyPatch, dtype: mx.Dtype, sizes: tuple[int, int, int, int, int]
) -> None:
    taken = list[str]()
    real = mx.fast.precompiled_cuda_kernel

    def run(**call: Any) -> list[mx.array]:
        taken.append(call["name"])
        return real(**call)

    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", run)
    check_like_mlx(DecodeAttention(), dtype, sizes)
    assert len(taken) == 4, "they were tried out, and then used"


# ---------------------------------------------------------------- kernels played on a processor
@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def played(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> PlayedKernels:
    if sys.platform != "linux" or shutil.which("g++") is None:
        pytest.skip("needs g++ on Linux, as CUDA does")
    kernels = PlayedKernels(libraries)
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", kernels.run)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attend)  # restored afterwards
    monkeypatch.setattr(decode_attention, "compile_source", kernels.compile)
    decode_attention.use_decode_attention()
    return kernels


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [(mx.bfloat16, (3, 4, 2, 128, 77)), (mx.float32, (2, 3, 1, 64, 150)),
     (mx.bfloat16, (2, 2, 1, 256, 70))],
)  # fmt: skip
def test_played_kernels_compute_what_mlx_does_with_a_mask(
    played: PlayedKernels, dtype: mx.Dtype, sizes: tuple[int, int, int, int, int]
) -> None:
    check_like_mlx(DecodeAttention(), dtype, sizes)
    assert played.runs == 4, "two tried them out"


@pytest.mark.skipif(mx.cuda.is_available(), reason="a load brings the GPU's own attention back")
def test_rows_of_a_batch_decode_with_the_kernels_and_answer_alike(
    tmp_path: Path, played: PlayedKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(
        tmp_path / "m", config={"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}
    )
    rows = [make_row(n, list(range(20, 30 + 40 * n)), 4, ignore_eos=True) for n in range(1, 4)]
    answers = []
    for is_used in (True, False):
        if not is_used:
            monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attend)
        with loaded_engine(folder, known_batching=known_as(folder, Batching.TOGETHER)) as engine:
            played.runs = 0
            got = run_rows(engine, rows)
            assert (played.runs > 0) is is_used
            answers.append({key: token_ids(own) for key, own in got.items()})
            played.runs = 0
            alone = run_rows(engine, [rows[2]])
            assert (played.runs > 0) is is_used
            assert token_ids(alone[rows[2].key]) == answers[-1][rows[2].key]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("keys", [2, LEAST_KEYS, 3 * LEAST_KEYS + 5])
def test_only_the_mask_of_the_pass_takes_the_kernels(played: PlayedKernels, keys: int) -> None:
    padding = [0, keys // 2, keys - 1]
    mask = mask_of(padding, keys)

    def runs(q: mx.array, k: mx.array, v: mx.array, mask: Any, **more: Any) -> int:
        played.runs = 0
        found = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.1, mask=mask, **more)
        assert mx.allclose(found, attend(q, k, v, scale=0.1, mask=mask, **more), atol=1e-5)
        return played.runs

    q, k, v = arrays(3, 4, 2, 64, keys)
    assert runs(q, k, v, mask) == 0, "it stands for nothing yet"
    in_use().hides(mask, mx.array(padding))
    assert runs(q, k, v, mask) == 4, "they are tried out"
    assert runs(q, k, v, mask) == 2
    assert runs(q, k, v, mask & True) == 0, "a model has changed it"
    assert runs(q, k + 1, v, mask) == runs(q, k, v + 1, mask) == 0, "or what was fetched"
    assert runs(q, k, v, None) == 0, "of several rows a cache knows what to hide"
    assert runs(*arrays(1, 4, 2, 64, keys), None) == 2, "one row sees all of its keys"
    q, k, v = arrays(3, 4, 2, 64, keys)
    assert runs(q, k, v, mask, sinks=mx.zeros(4)) == 0
    assert runs(mx.concatenate([q, q], axis=2), k, v, mask) == 0, "several tokens"
    assert runs(*arrays(3, 4, 2, 96, keys), mask) == 0, "no warp can share out such keys"
    assert runs(*arrays(3, 18, 2, 64, keys), mask) == 0, "too many heads share keys"


@pytest.mark.parametrize(("options", "is_used"), [({}, True), ({"window_size": 8}, False)])
def test_a_cache_says_what_its_mask_hides(
    played: PlayedKernels, options: dict[str, Any], is_used: bool
) -> None:
    q, k, v = arrays(3, 4, 2, 64, 20)
    batch = BatchKeys([0, 3, 19])
    batch.update_and_fetch(k[..., :-1, :], v[..., :-1, :])
    mask = batch.make_mask(1, **options)
    k, v = batch.update_and_fetch(k[..., -1:, :], v[..., -1:, :])
    found = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.1, mask=mask)
    assert mx.allclose(found, attend(q, k, v, scale=0.1, mask=mask), atol=1e-5)
    assert (played.runs > 0) is is_used, "a window hides more than padding"


def test_a_scale_may_be_a_whole_number(played: PlayedKernels) -> None:
    q, k, v = arrays(3, 4, 2, 64, 20)
    mask = mask_of([0, 3, 19], 20)
    in_use().hides(mask, mx.array([0, 3, 19]))
    found = mx.fast.scaled_dot_product_attention(q, k, v, scale=1, mask=mask)
    assert mx.allclose(found, attend(q, k, v, scale=1.0, mask=mask), atol=1e-5)
    assert played.runs > 0


def test_nothing_of_a_batch_that_has_left_is_kept(played: PlayedKernels) -> None:
    q, k, v = arrays(3, 4, 2, 64, 20)
    batch = BatchKeys([0, 3, 19])
    mask = batch.make_mask(1)
    batch.update_and_fetch(k, v)
    mx.fast.scaled_dot_product_attention(q, k, v, scale=0.1, mask=mask)
    kept = [weakref.ref(each) for each in (batch.keys, batch.values, mask)]
    del batch, mask
    assert all(each() is None for each in kept)


def fail(source: str) -> bytes:
    raise CompileError("libnvrtc.so was not found")


def refuse(**_: Any) -> list[mx.array]:
    raise RuntimeError("Failed to load compiled kernel")


def refuse_scalar(**_: Any) -> list[mx.array]:
    raise ValueError("Invalid scalar argument type")


def compute_wrongly(*, output_shapes: list[tuple[int, ...]], **_: Any) -> list[mx.array]:
    return [mx.ones(shape) for shape in output_shapes]


@pytest.mark.parametrize(
    ("owner", "name", "played_by", "reason"),
    [
        (decode_attention, "compile_source", fail, "libnvrtc.so was not found"),
        (mx.fast, "precompiled_cuda_kernel", refuse, "Failed to load compiled kernel"),
        (mx.fast, "precompiled_cuda_kernel", refuse_scalar, "Invalid scalar argument type"),
        (mx.fast, "precompiled_cuda_kernel", compute_wrongly, "compute something else"),
    ],
)
def test_kernels_that_cannot_be_used_leave_attention_to_mlx(
    played: PlayedKernels,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: Any,
    name: str,
    played_by: Any,
    reason: str,
) -> None:
    monkeypatch.setattr(owner, name, played_by)
    q, k, v = arrays(3, 4, 2, 64, 20)
    mask = mask_of([0, 3, 19], 20)
    in_use().hides(mask, mx.array([0, 3, 19]))
    for _ in range(2):
        found = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.1, mask=mask)
        assert mx.array_equal(found, attend(q, k, v, scale=0.1, mask=mask))
    [said] = caplog.messages
    assert reason in said
