"""The masks of batches: the cheapest that is right, and the same attention as mlx-lm's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import StopSequences
from mlx_lm.models.cache import BatchKVCache, RotatingKVCache
from mlx_lm.utils import load_model

from mlxsup.worker.engines.mlx.batch_keys import BatchKeys, note_evenness, with_cheap_masks
from mlxsup.worker.engines.mlx.prompt_batch import NewRow, PromptBatch
from mlxsup.worker.engines.mlx.sampler import PLAIN, draw_by_share
from mlxsup.worker.engines.mlx.shapes import padded_tokens

from support.models.tiny_model import make_tiny_model

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


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


@pytest.mark.parametrize("pads", [False, True])
def test_prompts_of_a_batch_are_read_as_alone_after_a_pass_that_was_padded(
    folder: Path, pads: bool
) -> None:
    """A row stops at a fork, so the next pass finds it padded on the left."""
    model = load_model(folder)[0]
    prompts = {0: list(range(20, 40)), 1: list(range(50, 70))}
    chunks = [(3, 8), (17, 12)]
    width_of = (lambda rows, tokens, held, is_even: padded_tokens(tokens)) if pads else None

    def read(uids: list[int], sizes: Sequence[tuple[int, ...]]) -> list[list[mx.array]]:
        rows = {
            uid: NewRow(
                tokens=prompts[uid],
                known=[],
                cache=None,
                max_tokens=1,
                draws=PLAIN,
                stops=StopSequences([]),
            )
            for uid in uids
        }
        batch = PromptBatch(model, rows, draw_by_share, width_of=width_of)
        done = dict.fromkeys(uids, 0)
        for chunk in sizes:
            ends = {uid: done[uid] + size for uid, size in zip(uids, chunk, strict=True)}
            batch.prompt([prompts[uid][done[uid] : ends[uid]] for uid in uids])
            done = ends
        layers = [batch.extract_cache(place) for place in range(len(uids))]
        return [[layer.state[0] for layer in row] for row in layers]

    together = read([0, 1], chunks)
    for uid in prompts:
        [alone] = read([uid], [(20,)])
        for got, wanted in zip(together[uid], alone, strict=True):
            np.testing.assert_allclose(np.array(got), np.array(wanted), atol=1e-4)
