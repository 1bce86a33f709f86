"""What changes logits, against the same said in plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlxsup.protocol.parameters import Sampling
from mlxsup.worker.engines.mlx.batch_sampler import BatchSampler
from mlxsup.worker.engines.mlx.sampling import RowDraws
from mlxsup.worker.engines.mlx.shaping import LEAST_ROOM

from support.mlx_draws import shape
from support.mlx_rows import make_row

pytestmark = pytest.mark.mlx

WIDTH = 12

SAMPLINGS = st.builds(
    Sampling,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.25]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    penalty_window=st.sampled_from([0, 1, 2, 7, 20, LEAST_ROOM + 5, 1000]),
)


def penalised(logits: Sequence[float], seen: Sequence[int], sampling: Sampling) -> list[float]:
    """The logits of one row, in float32 at each step."""
    values = np.array(logits, dtype=np.float32)
    window = list(seen[-sampling.penalty_window :] if sampling.penalty_window else seen)
    repetition = np.float32(sampling.repetition_penalty)
    for token in set(window):
        value = values[token]
        values[token] = value * repetition if value < 0 else value / repetition
        values[token] -= np.float32(sampling.presence_penalty)
    for token in window:
        values[token] -= np.float32(sampling.frequency_penalty)
    return [float(value) for value in values]


@settings(deadline=None, max_examples=60)
@given(
    samplings=st.lists(SAMPLINGS, min_size=1, max_size=4),
    lengths=st.lists(st.integers(0, 150), min_size=4, max_size=4),
    steps=st.integers(1, 160),
    dice=st.integers(0, 2**32),
)
@example(
    samplings=[Sampling(frequency_penalty=0.25, penalty_window=0), Sampling(presence_penalty=0.5)],
    lengths=[3, 100, 0, 0],
    steps=3 * LEAST_ROOM,
    dice=1,
)
def test_each_row_is_penalised_for_what_its_own_window_holds(
    samplings: list[Sampling], lengths: list[int], steps: int, dice: int
) -> None:
    """Windows that are shorter than the text, longer, and without an end."""
    numbers = np.random.default_rng(dice)
    count = len(samplings)
    seen = [numbers.integers(0, WIDTH, length).tolist() for length in lengths[:count]]
    rows = [RowDraws(sampling=sampling) for sampling in samplings]
    sampler = BatchSampler(rows, seen, WIDTH)
    for _ in range(steps):
        latest = numbers.integers(0, WIDTH, count)
        for own, token in zip(seen, latest.tolist(), strict=True):
            own.append(token)
        logits = numbers.normal(size=(count, WIDTH)).astype(np.float32)
        shaped: Any = sampler.shape(mx.array(logits), mx.array(latest.astype(np.uint32))).tolist()
        assert shaped == [
            penalised(own, tokens, sampling)
            for own, tokens, sampling in zip(logits.tolist(), seen, samplings, strict=True)
        ]


def test_rows_that_ask_for_nothing_keep_their_logits_between_those_that_do() -> None:
    asking = RowDraws(
        sampling=Sampling(presence_penalty=1.0, frequency_penalty=0.5),
        logit_bias={2: 4.0},
        ending=[3],
        min_tokens=2,
    )
    rows = [RowDraws(), asking, RowDraws(), RowDraws(processors=(lambda row: row + 1,))]
    logits = [[-0.0, 1.5, 1e-40, -2.0]] * 4
    before = np.array(logits[0], dtype=np.float32).tobytes()
    sampler = BatchSampler(rows, [[]] * 4, 4)
    shaped = np.array(sampler.shape(mx.array(logits), mx.array([0, 0, 0, 0])))
    assert shaped[0].tobytes() == shaped[2].tobytes() == before
    assert shaped[1].tolist() == [-1.5, 1.5, 4.0, -np.inf]
    assert shaped[3].tolist() == [1.0, 2.5, 1.0, -1.0]


def test_each_row_has_the_bias_and_the_ends_that_are_its_own() -> None:
    rows = [
        RowDraws(logit_bias={0: 1.0, 3: 2.0}),
        RowDraws(ending=[0, 1], min_tokens=1),
        RowDraws(logit_bias={3: -1.0}, ending=[2], min_tokens=2),
    ]
    sampler = BatchSampler(rows, [[]] * 3, 4)
    none = -float("inf")

    def step() -> Any:
        shaped = sampler.shape(mx.zeros((3, 4)), mx.array([0, 0, 0]))
        sampler.draw(shaped)
        return shaped.tolist()

    assert step() == [[1, 0, 0, 2], [none, none, 0, 0], [0, 0, none, -1]]
    assert step() == [[1, 0, 0, 2], [0, 0, 0, 0], [0, 0, none, -1]]
    assert step() == [[1, 0, 0, 2], [0, 0, 0, 0], [0, 0, 0, -1]]


def test_a_window_holds_the_prompts_last_tokens_too() -> None:
    row = make_row(1, [1], presence_penalty=1.0, penalty_window=3)
    assert shape(row, [0, 1, 2, 3], [0.0] * 5) == [0.0, -1.0, -1.0, -1.0, 0.0]
    assert shape(row, [4], [0.0] * 5) == [0.0, 0.0, 0.0, 0.0, -1.0]
