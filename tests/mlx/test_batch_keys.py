"""The masks of batches: the cheapest that is right, and the same attention as mlx-lm's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from mlx_lm.generate import StopSequences
from mlx_lm.models.cache import BatchKVCache, KVCache, RotatingKVCache
from mlx_lm.utils import load_model

from mlxsup.worker.engines.mlx.batch_keys import BatchKeys, RowCounts, with_cheap_masks
from mlxsup.worker.engines.mlx.prompt_batch import NewRow, PromptBatch
from mlxsup.worker.engines.mlx.sampler import PLAIN, draw_by_share
from mlxsup.worker.engines.mlx.shapes import padded_tokens

pytestmark = pytest.mark.mlx


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
    own = BatchKeys(left, pads=pads)
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
    ("padding", "pads", "held", "tokens", "expected"),
    [
        ([0, 0], False, 0, 5, "causal"),
        ([0, 0], False, 5, 5, "causal"),
        ([0], False, 5, 1, "None"),
        ([0, 0], False, 5, 1, "mlx.core.bool"),
        ([0, 3], False, 5, 5, "mlx.core.bool"),
        ([0, 3], False, 5, 1, "mlx.core.bool"),
        ([0, 0], True, 0, 256, "causal"),
        ([0, 0], True, 256, 256, "causal"),
        ([0], True, 5, 1, "None"),
        ([0, 0], True, 5, 8, "mlx.core.bfloat16"),  # keys that pad are hidden
        ([0, 3], True, 256, 256, "mlx.core.bfloat16"),
        ([0, 3], True, 5, 1, "mlx.core.bool"),
    ],
)
def test_mask_is_the_cheapest(
    padding: list[int], pads: bool, held: int, tokens: int, expected: str
) -> None:
    keys = BatchKeys(padding, pads=pads)
    if held:
        numbers = made(len(padding), held).astype(mx.bfloat16)
        keys.update_and_fetch(numbers, numbers)
    assert kind(keys.make_mask(tokens)) == expected
    assert kind(keys.make_mask(tokens, return_array=True)) == "mlx.core.bool"
    assert kind(keys.make_mask(tokens, window_size=4)) == "mlx.core.bool"


def test_a_row_that_sees_no_key_spreads_nothing() -> None:
    keys = BatchKeys([0, 6], pads=True)
    numbers = made(2, 4).astype(mx.float16)
    keys.update_and_fetch(numbers, numbers)
    queries, more, values = (made(2, 8).astype(mx.float16) for _ in range(3))
    assert mx.isfinite(attend(keys, queries, more, values)).all().item()


def test_layers_of_another_kind_stay_as_they_are() -> None:
    window = RotatingKVCache(max_size=4)
    assert with_cheap_masks([window], [3], pads=True) == [window]


class Batches(RuleBasedStateMachine):
    """Batches of rows that join, leave, are cut back and padded, beside mlx-lm's own class."""

    @initialize(pads=st.booleans())
    def begin(self, pads: bool) -> None:
        mx.random.seed(1)
        self.pads = pads
        self.expected, self.found = self.made([3, 1])

    def made(self, held: list[int]) -> tuple[BatchKVCache, BatchKeys]:
        """Return two equal batches of rows that hold so many tokens."""
        rows = []
        for count in held:
            rows.append(KVCache())
            if count:
                rows[-1].update_and_fetch(made(1, count), made(1, count))
        own = BatchKeys.merge(rows)
        if self.pads:
            [own] = with_cheap_masks([BatchKVCache.merge(rows)], held, pads=True)
        return BatchKVCache.merge(rows), own

    @rule(tokens=st.sampled_from([1, 1, 2, 5, 250]))
    def read(self, tokens: int) -> None:
        queries, keys, values = (made(len(self.found.padding), tokens) for _ in range(3))
        expected = attend(self.expected, queries, keys, values)
        found = attend(self.found, queries, keys, values)
        shown = zip(expected, found, self.found.padding, strict=True)
        for wanted, got, left in shown:
            seen = max(left + tokens - self.found.size(), 0)
            np.testing.assert_allclose(got[:, seen:], wanted[:, seen:], atol=1e-5)

    @rule(data=st.data())
    def read_padded(self, data: st.DataObject) -> None:
        lengths = [data.draw(st.integers(1, 6)) for _ in self.found.padding]
        right = [max(lengths) - length for length in lengths]
        numbers = [made(len(lengths), max(lengths)) for _ in range(3)]
        for side in (self.expected, self.found):
            side.prepare(lengths=lengths, right_padding=right)
            attend(side, *numbers)
            side.finalize()

    @precondition(lambda self: len(self.found.padding) > 1)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        places = range(len(self.found.padding))
        keep = sorted(data.draw(st.sets(st.sampled_from(places), min_size=1)))
        for side in (self.expected, self.found):
            side.filter(keep)

    @precondition(lambda self: len(self.found.padding) < 6)
    @rule(held=st.lists(st.sampled_from([0, 1, 4, 260]), min_size=1, max_size=2))
    def join(self, held: list[int]) -> None:
        expected, found = self.made(held)
        self.expected.extend(expected)
        self.found.extend(found)

    @rule(tokens=st.integers(1, 3))
    def cut_back(self, tokens: int) -> None:
        least = self.found.size() - max(self.found.padding)
        assert self.expected.trim(min(tokens, least)) == self.found.trim(min(tokens, least))

    @invariant()
    def rows_are_equal(self) -> None:
        assert self.found.size() == self.expected.size()
        assert self.found.offset.tolist() == self.expected.offset.tolist()
        assert self.found.left_padding.tolist() == self.expected.left_padding.tolist()
        if self.expected.keys is None:
            return
        for place in range(len(self.found.padding)):
            expected, found = (side.extract(place) for side in (self.expected, self.found))
            assert found.offset == expected.offset
            assert mx.array_equal(found.keys, expected.keys)
            assert mx.array_equal(found.values, expected.values)


test_rows_are_those_of_mlx_lms_cache = Batches.TestCase
test_rows_are_those_of_mlx_lms_cache.settings = settings(
    max_examples=20, stateful_step_count=12, deadline=None
)


PROMPTS = {0: list(range(20, 40)), 1: list(range(50, 70))}


def read(
    folder: Path, uids: list[int], sizes: Sequence[tuple[int, ...]], *, pads: bool
) -> list[list[mx.array]]:
    """Read these prompts together, so many tokens of each in a pass; return each one's keys."""
    width_of = (lambda rows, tokens, held, is_even: padded_tokens(tokens)) if pads else None
    rows = {
        uid: NewRow(
            tokens=PROMPTS[uid],
            known=[],
            cache=None,
            max_tokens=1,
            draws=PLAIN,
            stops=StopSequences([]),
        )
        for uid in uids
    }
    batch = PromptBatch(load_model(folder)[0], rows, draw_by_share, width_of=width_of)
    done = dict.fromkeys(uids, 0)
    for chunk in sizes:
        ends = {uid: done[uid] + size for uid, size in zip(uids, chunk, strict=True)}
        batch.prompt([PROMPTS[uid][done[uid] : ends[uid]] for uid in uids])
        batch.wait()
        done = ends
    layers = [batch.extract_cache(place) for place in range(len(uids))]
    return [[layer.state[0] for layer in row] for row in layers]


@pytest.mark.parametrize("pads", [False, True])
def test_prompts_of_a_batch_are_read_as_alone_after_a_pass_that_was_padded(
    tiny: Path, pads: bool
) -> None:
    """A row stops at a fork, so the next pass finds it padded on the left."""
    together = read(tiny, [0, 1], [(3, 8), (17, 12)], pads=pads)
    for uid in PROMPTS:
        [alone] = read(tiny, [uid], [(20,)], pads=pads)
        for got, wanted in zip(together[uid], alone, strict=True):
            np.testing.assert_allclose(np.array(got), np.array(wanted), atol=1e-4)


@pytest.mark.parametrize("pads", [False, True])
def test_what_a_pass_leaves_is_freed_unless_others_have_its_shape(
    tiny: Path, pads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[None] = []
    monkeypatch.setattr(mx, "clear_cache", lambda: freed.append(None))
    read(tiny, [0, 1], [(3, 8), (17, 12)], pads=pads)
    assert bool(freed) is not pads


def test_padding_that_a_model_sets_counts() -> None:
    """As models of mlx-vlm do after they have read rows one by one."""
    keys = BatchKeys([0, 0])
    numbers = made(2, 4)
    keys.update_and_fetch(numbers, numbers)
    keys.left_padding = mx.array([0, 2])
    assert keys.offset.tolist() == [4, 2]


def test_all_layers_of_a_pass_use_one_array_of_places() -> None:
    """To make one for each layer took the host 0.1 to 0.2 ms of a step of 32 layers."""
    counts = RowCounts()
    layers = [BatchKeys([2, 0], counts=counts) for _ in range(2)]
    seen = []
    for _ in range(2):
        for keys in layers:
            keys.update_and_fetch(made(2, 4), made(2, 4))
        first, second = (keys.offset for keys in layers)
        assert first is second
        seen.append(first.tolist())
    assert seen == [[2, 4], [6, 8]]
