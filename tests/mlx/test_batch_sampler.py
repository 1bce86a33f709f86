"""One sampler for all rows: what each row gets is what it gets alone, and what a plain sum says."""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxsup.worker.engines.mlx.batch_sampler import BatchSampler
from mlxsup.worker.engines.mlx.draws import (
    BLOCK,
    Draw,
    draw_by_noise,
    draw_by_share,
    pick_tokens,
)
from mlxsup.worker.engines.mlx.picking import Picker
from mlxsup.worker.engines.mlx.sampling import RowDraws, derive_key, make_draws

from support.mlx_draws import drawer, draws_of
from support.mlx_rows import make_row

pytestmark = pytest.mark.mlx

WAYS: tuple[Draw, ...] = (draw_by_share, draw_by_noise)

WIDTHS = (5, BLOCK, BLOCK + 1, 300, 1200)

PARAMETERS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**63 - 1),
        "temperature": st.sampled_from([0.0, 0.7, 1.0, 3.0]),
    },
    optional={
        "top_k": st.integers(0, 1300) | st.integers(1, 12),
        "top_p": st.floats(0.05, 1.0, exclude_min=True),
        "min_p": st.floats(0.0, 0.9),
        "xtc_probability": st.sampled_from([0.0, 0.5, 1.0]),
        "xtc_threshold": st.floats(0.0, 0.2),
        "repetition_penalty": st.sampled_from([1.0, 0.7, 1.3]),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "penalty_window": st.sampled_from([0, 1, 3, 20]),
        "logit_bias": st.dictionaries(st.integers(0, 4), st.floats(-5.0, 5.0), max_size=3),
        "min_tokens": st.integers(0, 4),
    },
)


class Played:
    """A row that decodes from one step to another, with logits that depend on it and the step.

    Args:
        number: of the row.
        width: of the logits.
        dtype: that a model computes them in.
        parameters: of the row.
    """

    def __init__(self, number: int, width: int, dtype: mx.Dtype, parameters: dict[str, Any]):
        self.number, self.width, self.dtype = number, width, dtype
        self.parameters = parameters
        dice = np.random.default_rng(number)
        self.held: list[int] = dice.integers(0, width, 1 + number * 7 % 30).tolist()
        self.latest = int(dice.integers(0, width))
        self.steps = 0
        self.got: list[tuple[bytes, bytes, int]] = []
        row = make_row(1, [1], **parameters)
        self.draws = make_draws(row, ending=[0, 3], spared=[2])

    def logits(self) -> mx.array:
        dice = np.random.default_rng([self.number, self.steps])
        values = dice.normal(scale=3.0, size=self.width).astype(np.float32)
        return mx.array(values).astype(self.dtype)

    def take(self, shaped: mx.array, weights: bytes, token: int) -> None:
        self.got.append((np.array(shaped).tobytes(), weights, token))
        self.held.append(self.latest)
        self.latest = token
        self.steps += 1


def step(rows: list[Played], samplers: list[BatchSampler], way: Draw) -> None:
    """One step of these rows, as `DrawingBatch` makes it."""
    draws = [row.draws for row in rows]
    if samplers[-1:] == [] or samplers[-1].rows != draws:
        samplers.append(BatchSampler(draws, [row.held for row in rows], rows[0].width, way))
    latest = mx.array([row.latest for row in rows], dtype=mx.uint32)
    logits = mx.stack([row.logits() for row in rows]).astype(mx.float32)
    shaped = samplers[-1].shape(logits, latest)
    logprobs = shaped - mx.logsumexp(shaped, axis=-1, keepdims=True)
    drawn = [place for place, row in enumerate(rows) if not row.draws.is_greedy]
    weights = {}
    if drawn:
        picker = Picker([rows[place].draws for place in drawn], rows[0].width)
        each = np.array(picker.weigh(logprobs[mx.array(drawn)]))
        weights = {place: own.tobytes() for place, own in zip(drawn, each, strict=True)}
    tokens: Any = samplers[-1].draw(logprobs).tolist()
    for place, row in enumerate(rows):
        row.take(shaped[place], weights.get(place, b""), tokens[place])


@pytest.mark.bits
@settings(deadline=None, max_examples=60)
@given(
    kinds=st.lists(PARAMETERS, min_size=1, max_size=6),
    spans=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), min_size=6, max_size=6),
    width=st.sampled_from(WIDTHS),
    dtype=st.sampled_from([mx.float32, mx.bfloat16]),
    way=st.sampled_from(WAYS),
)
def test_a_row_gets_equal_bits_alone_and_in_any_company_A6(
    kinds: list[dict[str, Any]],
    spans: list[tuple[int, int]],
    width: int,
    dtype: mx.Dtype,
    way: Draw,
) -> None:
    """Rows join and leave in between; logits, weights and tokens are compared bit by bit."""

    def make() -> list[Played]:
        return [Played(number, width, dtype, kind) for number, kind in enumerate(kinds)]

    alone, together = make(), make()
    samplers: list[BatchSampler] = []
    for now in range(10):
        present = [
            row
            for row, (joins, steps) in zip(together, spans, strict=False)
            if joins <= now < joins + steps
        ]
        if present:
            step(present, samplers, way)
    for row, other in zip(alone, together, strict=True):
        own: list[BatchSampler] = []
        for _ in other.got:
            step([row], own, way)
        assert [token for *_, token in row.got] == [token for *_, token in other.got]
        assert row.got == other.got
        assert len(own) <= 1, "made once for a row that stays alone"


def test_what_other_rows_keep_changes_no_sum() -> None:
    """0.4 is enough for half of what two tokens have, and not for half of what all have."""
    logprobs = mx.log(mx.array([[0.4, 0.3] + [0.3 / 298] * 298] * 3))
    rows = [draws_of(top_k=2, top_p=0.5), draws_of(top_k=200, top_p=0.9), draws_of(top_p=0.99)]
    together: Any = Picker(rows, 300).weigh(logprobs).tolist()
    alone: Any = [Picker([row], 300).weigh(logprobs[:1])[0].tolist() for row in rows]
    assert together == alone
    assert sum(weight > 0 for weight in together[0]) == 1


def reference_weights(logprobs: Any, parameters: dict[str, Any]) -> tuple[Any, float]:
    """The weights by sorting in float64, and how far the nearest border of `top_p` is."""
    scaled = np.asarray(logprobs, dtype=np.float64) / parameters["temperature"]
    weights = np.exp(scaled - scaled.max())
    by_weight = np.argsort(-weights, kind="stable")
    border = 1.0
    if top_k := parameters.get("top_k", 0):
        weights[by_weight[top_k:]] = 0.0
    if (top_p := parameters.get("top_p", 1.0)) < 1.0:
        above = (np.cumsum(weights[by_weight]) - weights[by_weight]) / weights.sum()
        border = float(np.abs(above - top_p).min())
        weights[by_weight[above >= top_p]] = 0.0
    if min_p := parameters.get("min_p", 0.0):
        border = min(border, float(np.abs(weights / weights.max() - min_p).min()))
        weights[weights < min_p * weights.max()] = 0.0
    return weights, border


@settings(deadline=None, max_examples=150)
@given(
    dice=st.integers(0, 2**32),
    width=st.sampled_from([*WIDTHS, 3000]),
    parameters=st.fixed_dictionaries(
        {"temperature": st.floats(0.2, 4.0)},
        optional={
            "top_k": st.integers(1, 2000),
            "top_p": st.floats(0.05, 0.999),
            "min_p": st.floats(0.001, 0.9),
        },
    ),
)
def test_filters_keep_what_sorting_keeps(dice: int, width: int, parameters: dict[str, Any]) -> None:
    values = np.random.default_rng(dice).normal(scale=2.0, size=width).astype(np.float32)
    expected, border = reference_weights(values, parameters)
    if border < 1e-4:
        return  # rounding decides on which side of it a token is
    got = np.array(Picker([draws_of(**parameters)], width).weigh(mx.array(values[None])))[0]
    assert ((got > 0) == (expected > 1e-38)).all()
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=1e-30)


@pytest.mark.parametrize("way", WAYS)
def test_draws_come_as_often_as_their_probabilities_say(way: Draw) -> None:
    """64 rows with seeds of their own, 100 steps; ids in several blocks, likely and unlikely."""
    width = 5 * BLOCK + 40
    dice = np.random.default_rng(3)
    logits = dice.normal(scale=2.0, size=width)
    logits[BLOCK : 2 * BLOCK] = -np.inf
    shares = np.exp(logits) / np.exp(logits).sum()
    draw = drawer(*(draws_of(seed=seed) for seed in range(64)), way=way)
    logprobs = mx.array(np.log(shares, where=shares > 0, out=np.full(width, -np.inf)))
    counts: Counter[int] = Counter()
    for _ in range(100):
        counts.update(draw(mx.broadcast_to(logprobs.astype(mx.float32), (64, width))))
    total = sum(counts.values())
    groups = [dice.permutation(width)[: width // 4] for _ in range(20)]
    groups += [np.array([token]) for token in np.argsort(-shares)[:20]]
    groups += [np.arange(block * BLOCK, min((block + 1) * BLOCK, width)) for block in range(6)]
    for group in groups:
        share = float(shares[group].sum())
        got = sum(counts[int(token)] for token in group)
        deviation = math.sqrt(total * share * (1 - share))
        assert abs(got - total * share) <= 5 * deviation + 1e-9
    assert not any(BLOCK <= token < 2 * BLOCK for token in counts), "they have no probability"


def test_a_draw_is_the_place_of_two_numbers_in_the_blocks_and_in_the_block() -> None:
    """A kept answer is drawn anew with them after a restart: they may never change."""
    weights = [1.0] * BLOCK + [0.0] * BLOCK + [3.0] * BLOCK + [4.0]
    logprobs = mx.log(mx.array([weights]) / sum(weights))
    draw = drawer(draws_of(seed=11))
    for number in range(50):
        key = derive_key(11, number)
        first, second = (key >> 40) / 2**24, ((key >> 16) & 0xFFFFFF) / 2**24
        mass = first * (4 * BLOCK + 4)
        block = 0 if mass < BLOCK else 2 if mass < 4 * BLOCK else 3
        expected = block * BLOCK + (0 if block == 3 else int(second * BLOCK))
        assert draw(logprobs) == [expected]


TINY = 1e-42  # below the least number of float32 that has all its digits
HIGHEST = 1 - 2.0**-24


@pytest.mark.parametrize("share", [0.0, 0.5, HIGHEST])
@pytest.mark.parametrize(
    "weights",
    [
        [0.0, 1.0, 0.0], [0.0, 0.0, 1e-38, 0.0], [0.0, TINY], [0.0, TINY, 0.0, 1.0, 0.0],
        [0.0] * 200 + [1.0, TINY] + [0.0] * 200, [0.0] * 200 + [TINY, 1.0] + [0.0] * 200,
        [1.0] + [0.0] * 400 + [1.0] + [0.0] * 300,
    ],
)  # fmt: skip
def test_a_token_without_weight_is_never_picked(weights: list[float], share: float) -> None:
    number = mx.array([[share]])
    token: Any = pick_tokens(mx.array([weights]), number, number).item()
    assert weights[token] > 0


def test_sums_that_are_rounded_out_of_order_pick_no_token_without_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In parallel each sum is rounded by itself: here every other one upwards."""
    plain = mx.cumsum

    def uneven(values: mx.array, axis: int) -> mx.array:
        return plain(values, axis=axis) * (1 + 1e-6 * (mx.arange(values.shape[-1]) % 2))

    monkeypatch.setattr(mx, "cumsum", uneven)
    weights = mx.array([[1.0, 0.0, 1.0, 1.0]])  # the sums: 1, 1.000001, 2, 3.000003
    token: Any = pick_tokens(weights, mx.array([[0.0]]), mx.array([[0.33333317]])).item()
    assert token == 2


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_gives_no_numbers_breaks_no_step(way: Draw) -> None:
    draw = drawer(draws_of(), draws_of(top_p=0.5, top_k=3, min_p=0.1), way=way)
    tokens = draw([[math.nan] * 300, [math.nan] * 300])
    assert all(0 <= token < 300 for token in tokens)


def operations(*rows: RowDraws, width: int = 300, way: Draw = draw_by_share) -> Counter[str]:
    """What is computed for one step of these rows, by the name of the operation."""
    held = [[1, 2, 3]] * len(rows)
    sampler = BatchSampler(rows, held, width, way)
    latest = mx.zeros((len(rows),), dtype=mx.uint32)
    logits = mx.zeros((len(rows), width))
    mx.eval(latest, logits)
    text = io.StringIO()
    mx.export_to_dot(text, sampler.draw(sampler.shape(logits, latest)))
    return Counter(re.findall(r'label ="(\w+)"', text.getvalue()))


VIEWS = ("Broadcast", "Squeeze", "ExpandDims", "Reshape")
"""Operations that compute nothing."""


def computed(found: Counter[str]) -> int:
    """How many operations compute anything."""
    return found.total() - sum(found[view] for view in VIEWS)


EVERYTHING: dict[str, Any] = {
    "top_k": 40, "top_p": 0.9, "min_p": 0.05, "xtc_probability": 1.0, "repetition_penalty": 1.1,
    "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {3: 1.0}, "min_tokens": 5,
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("parameters", [{}, {"top_p": 0.9}, {"top_k": 5}, EVERYTHING])
def test_64_rows_take_as_many_operations_as_one(parameters: dict[str, Any], way: Draw) -> None:
    def of(count: int) -> Counter[str]:
        rows = (draws_of(**parameters, seed=seed) for seed in range(count))
        return operations(*rows, way=way)

    one = of(1)
    assert one
    assert of(64) == of(2)
    assert computed(of(64)) <= computed(one) + 3, "with one row some need no index"


def test_what_no_row_asks_for_is_not_computed() -> None:
    assert operations(draws_of(temperature=0.0), draws_of(temperature=0.0)) == {
        "ArgReduce": 1,
        "Squeeze": 1,
    }
    for way in WAYS:
        plain = operations(draws_of(), draws_of(), way=way)
        assert computed(plain) <= 30
        assert not {"Sort", "Partition", "Scatter"} & set(plain)
    assert "Sort" not in operations(draws_of(min_p=0.1))
    assert "Partition" not in operations(draws_of(top_p=0.5))
    everything = operations(draws_of(**EVERYTHING))
    assert everything["Sort"] == everything["Partition"] == 1


def test_a_sampler_counts_its_rows_tokens_and_those_of_no_other() -> None:
    counted, other = draws_of(min_tokens=3), draws_of(temperature=0.0, logit_bias={1: 1.0})
    draw = drawer(counted, other)
    for _ in range(3):
        draw([[0.0] * 8, [0.0] * 8])
    assert (counted.number, other.number) == (3, 3)
    resumed = make_draws(make_row(1, [1], temperature=1.0, delivered=[5] * 7))
    assert resumed.number == 7
