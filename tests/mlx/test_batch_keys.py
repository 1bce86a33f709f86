"""The masks of batches: the cheapest that is right, and the same attention as mlx-lm's."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import BatchKVCache, RotatingKVCache

from mlxsup.worker.engines.mlx.batch_keys import BatchKeys, note_evenness, with_cheap_masks

HEADS, WIDTH = 2, 8


def made(rows: int, tokens: int) -> mx.array:
    """Numbers for the heads of so many tokens."""
    return mx.random.normal((rows, HEADS, tokens, WIDTH))


def attend(cache: Any, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """Attention as a layer of mlx-lm's models computes it."""
    mask = cache.make_mask(queries.shape[2])
    keys, values = cache.update_and_fetch(keys, values)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=1.0, mask=mask)


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("left", [[0], [0, 0], [0, 3]])
@pytest.mark.parametrize("sizes", [(5, 1, 4, 1), (256, 7, 256), (1, 255, 3)])
def test_attention_is_that_of_mlx_lms_cache(
    pads: bool, left: list[int], sizes: tuple[int, ...]
) -> None:
    mx.random.seed(1)
    reference = BatchKVCache(left)
    [own] = with_cheap_masks([BatchKVCache(left)], pads=pads)
    note_evenness([own], is_even=not any(left))
    for size in sizes:
        numbers = [made(len(left), size) for _ in range(3)]
        expected, found = attend(reference, *numbers), attend(own, *numbers)
        for row, begin in enumerate(left):
            seen = max(begin + size - reference._idx, 0)  # what pads a row attends to nothing
            wanted, got = (np.array(each[row, :, seen:]) for each in (expected, found))
            np.testing.assert_allclose(got, wanted, atol=1e-5)


def kind(mask: Any) -> str:
    """Name a mask."""
    return str(mask.dtype) if isinstance(mask, mx.array) else str(mask)


@pytest.mark.parametrize(
    ("is_even", "pads", "held", "tokens", "expected"),
    [
        (True, False, 0, 5, "causal"),
        (True, False, 5, 5, "causal"),
        (True, False, 5, 1, "None"),
        (False, False, 5, 5, "mlx.core.bool"),
        (False, False, 5, 1, "mlx.core.bool"),
        (True, True, 0, 256, "causal"),
        (True, True, 256, 256, "causal"),
        (True, True, 5, 1, "None"),
        (True, True, 5, 8, "mlx.core.bfloat16"),  # keys that pad are hidden
        (False, True, 256, 256, "mlx.core.bfloat16"),
        (False, True, 5, 1, "mlx.core.bool"),
    ],
)
def test_mask_is_the_cheapest(
    is_even: bool, pads: bool, held: int, tokens: int, expected: str
) -> None:
    keys = BatchKeys.of(BatchKVCache([0, 0]), pads=pads)
    if held:
        numbers = made(2, held).astype(mx.bfloat16)
        keys.update_and_fetch(numbers, numbers)
    keys.is_even = is_even
    assert kind(keys.make_mask(tokens)) == expected
    assert kind(keys.make_mask(tokens, return_array=True)) == "mlx.core.bool"
    assert kind(keys.make_mask(tokens, window_size=4)) == "mlx.core.bool"


def test_a_row_that_sees_no_key_spreads_nothing() -> None:
    keys = BatchKeys.of(BatchKVCache([0, 6]), pads=True)
    numbers = made(2, 4).astype(mx.float16)
    keys.update_and_fetch(numbers, numbers)
    queries, more, values = (made(2, 8).astype(mx.float16) for _ in range(3))
    assert mx.isfinite(attend(keys, queries, more, values)).all().item()


def test_layers_of_another_kind_stay_as_they_are() -> None:
    window = RotatingKVCache(max_size=4)
    assert with_cheap_masks([window], pads=True) == [window]
    note_evenness([window], is_even=True)
    assert not hasattr(window, "is_even")
