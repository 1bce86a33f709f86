"""The sampler of a batch without a model: rows, logits, and what comes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlxsup.worker.engine import Row
from mlxsup.worker.engines.mlx.sampler import (
    BatchSampler,
    Draw,
    Picker,
    RowDraws,
    draw_by_share,
    make_draws,
)

from support.worker.mlx_rows import make_row


def draws_of(**parameters: Any) -> RowDraws:
    """Return the draws of a row, at a temperature of 1 unless told otherwise."""
    return make_draws(make_row(1, [1], **{"temperature": 1.0, "seed": 5} | parameters))


def drawer(*rows: RowDraws, way: Draw = draw_by_share) -> Callable[[Any], list[int]]:
    """Draws the next token of each row from the log-probabilities of all (rows, vocabulary)."""
    samplers: list[BatchSampler] = []

    def draw(logprobs: Any) -> list[int]:
        values = mx.array(logprobs)
        if not samplers:
            samplers.append(BatchSampler(rows, [[]] * len(rows), values.shape[-1], way))
        tokens: Any = samplers[0].draw(values).tolist()
        return list(tokens)

    return draw


def weigh(row: RowDraws, logprobs: Sequence[float]) -> list[float]:
    """The weights that a row's next token is drawn with."""
    weights: Any = Picker([row], len(logprobs)).weigh(mx.array([logprobs])).tolist()
    return list(weights[0])


def shape(
    row: Row, seen: Sequence[int], logits: Sequence[float], ending: Sequence[int] = ()
) -> list[float]:
    """The logits of a row that has read these tokens."""
    sampler = BatchSampler([make_draws(row, ending=ending)], [list(seen[:-1])], len(logits))
    shaped: Any = sampler.shape(mx.array([logits]), mx.array(list(seen[-1:]))).tolist()
    return list(shaped[0])
