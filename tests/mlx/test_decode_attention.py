"""Attention of rows that decode, with CUDA: the kernels on a GPU, and who uses them anywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxsup.protocol.states import Batching
from mlxsup.worker.engines.mlx import decode_attention
from mlxsup.worker.engines.mlx.batch_keys import BatchKeys
from mlxsup.worker.engines.mlx.decode_attention import LEAST_KEYS, DecodeAttention, hides

from support.models.tiny_model import make_tiny_model
from support.worker.mlx_rows import known_as, loaded_engine, make_row, run_rows, token_ids

pytestmark = pytest.mark.mlx

attend = mx.fast.scaled_dot_product_attention


def arrays(
    rows: int, heads: int, key_heads: int, width: int, keys: int, dtype: mx.Dtype
) -> tuple[mx.array, mx.array, mx.array]:
    """Return queries, and keys and values as parts of larger arrays."""
    mx.random.seed(rows + keys)
    both = [mx.random.normal((rows, key_heads, keys + 37, width)) for _ in "kv"]
    k, v = (one.astype(dtype)[..., :keys, :] for one in both)
    return mx.random.normal((rows, heads, 1, width)).astype(dtype), k, v


def mask_of(padding: list[int], keys: int) -> mx.array:
    return (mx.arange(keys)[None] >= mx.array(padding)[:, None])[:, None, None]


@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs MLX's CUDA build and a GPU")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize(
    "sizes",
    [(3, 32, 8, 128, 777), (5, 8, 8, 64, 1), (2, 28, 4, 128, 5000), (4, 16, 2, 256, 130)],
    ids=str,
)
def test_kernels_compute_what_mlx_does_with_a_mask(
    dtype: mx.Dtype, sizes: tuple[int, int, int, int, int]
) -> None:
    own = DecodeAttention()
    q, k, v = arrays(*sizes, dtype)
    padding = [min(sizes[-1] - 1, 41 * row) for row in range(sizes[0])]
    mask = mask_of(padding, sizes[-1])
    exact = attend(*(x.astype(mx.float32) for x in (q, k, v)), scale=0.1, mask=mask)
    own.hides(mask, mx.array(padding))
    error = mx.abs(own(q, k, v, scale=0.1, mask=mask) - exact).max()
    assert error <= mx.abs(attend(q, k, v, scale=0.1, mask=mask) - exact).max() + 1e-5


# ---------------------------------------------------------------- kernels played on a CPU
class PlayedKernels:
    """What the kernels are told to compute, computed by numpy."""

    def __init__(self) -> None:
        self.runs = 0

    def make(self, *, name: str, **_: Any) -> Callable[..., list[mx.array]]:
        return self._read if name.endswith("_read") else self._join

    def _read(
        self, *, inputs: list[mx.array], output_shapes: list[tuple[int, ...]], **_: Any
    ) -> list[mx.array]:
        self.runs += 1
        arrays: list[Any] = [np.array(each) for each in inputs]
        q, k, v, padding, scale = arrays
        rows, heads, parts, width = output_shapes[0]
        shared = heads // k.shape[1]
        means, sums = np.zeros((rows, heads, parts, width)), np.zeros((rows, heads, parts))
        tops = np.full((rows, heads, parts), -3e38)
        for row, head in np.ndindex(rows, heads):
            places = np.array_split(np.arange(padding[row], k.shape[2]), parts)
            for part, own in enumerate(places):
                if len(own):
                    scores = scale * (k[row, head // shared, own] @ q[row, head, 0])
                    tops[row, head, part] = top = scores.max()
                    sums[row, head, part] = np.exp(scores - top).sum()
                    means[row, head, part] = np.exp(scores - top) @ v[row, head // shared, own]
        return [mx.array(each.astype(np.float32)) for each in (means, sums, tops)]

    def _join(
        self, *, inputs: list[mx.array], output_shapes: list[tuple[int, ...]], **_: Any
    ) -> list[mx.array]:
        means, sums, tops = inputs
        weights = mx.exp(tops - tops.max(axis=-1, keepdims=True))
        total = (weights * sums).sum(axis=-1)[..., None]
        return [((weights[..., None] * means).sum(axis=-2) / total).reshape(output_shapes[0])]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> PlayedKernels:
    kernels = PlayedKernels()
    monkeypatch.setattr(mx.fast, "cuda_kernel", kernels.make)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attend)  # restored afterwards
    monkeypatch.setattr(decode_attention, "_in_use", None)
    decode_attention.use_decode_attention()
    return kernels


def test_rows_of_a_batch_decode_with_the_kernels_and_answer_alike(
    tmp_path: Path, played: PlayedKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(
        tmp_path / "m", config={"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}
    )
    rows = [make_row(n, list(range(20, 30 + 40 * n)), 8, ignore_eos=True) for n in range(1, 4)]
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
            run_rows(engine, [rows[2]])
            assert played.runs == 0, "a lone row needs no mask"
    assert answers[0] == answers[1]


@pytest.mark.parametrize("keys", [2, LEAST_KEYS, 3 * LEAST_KEYS + 5])
def test_only_the_mask_of_the_pass_takes_the_kernels(played: PlayedKernels, keys: int) -> None:
    attention = mx.fast.scaled_dot_product_attention
    q, k, v = arrays(3, 4, 2, 64, keys, mx.float32)
    padding = [0, keys // 2, keys - 1]
    mask = mask_of(padding, keys)

    def runs(q: mx.array, k: mx.array, v: mx.array, mask: Any, **more: Any) -> int:
        played.runs = 0
        found = attention(q, k, v, scale=0.1, mask=mask, **more)
        assert mx.allclose(found, attend(q, k, v, scale=0.1, mask=mask, **more), atol=1e-5)
        return played.runs

    assert runs(q, k, v, mask) == 0, "it stands for nothing yet"
    hides(mask, mx.array(padding))
    assert runs(q, k, v, mask) == 1
    assert runs(q, k, v, mask & True) == 0, "a model has changed it"
    assert runs(q, k, v, None) == 0
    assert runs(q, k, v, mask, sinks=mx.zeros(4)) == 0
    wide = arrays(3, 4, 2, 96, keys, mx.float32)
    assert runs(*wide, mask) == 0, "no warp can share out such keys"
    assert runs(*arrays(3, 18, 2, 64, keys, mx.float32), mask) == 0, "too many heads share keys"
    assert runs(mx.concatenate([q, q], axis=2), k, v, mask) == 0, "several tokens"
    batch = BatchKeys(padding)
    batch.update_and_fetch(k[..., :-1, :], v[..., :-1, :])
    assert runs(q, k, v, batch.make_mask(1, window_size=8)) == 0, "a window hides more"
    assert runs(q, k, v, batch.make_mask(1)) == 1
