"""A trial of a group before its first request: what its ranks compute together, a rank also knows
by itself.

Ranks that all get the same wrong sum agree with each other, so nothing that compares ranks shows
it. MLX's JACCL gave such sums from the second chunk of a prompt on, while every short answer was
right (mlx#4342).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlxsup.protocol.text import log_line

from ...engine import DivergedError, EngineFacts
from .folder import ModelFolder
from .loader import load_lazily
from .prefill import FIXED_CHUNK, MOST_READ_TOKENS

TOKENS = 6000
"""Of the trial, unless the context is shorter: wrong sums were seen behind 2,000 and 4,000."""

CPU_TOKENS = 1500
"""Instead on a CPU, where attention computes the scores of all pairs: 6,000 take 16 times as long,
and no link between CPUs is known to go wrong."""

WINDOW = 16
"""Positions of which the median counts: where two experts are equally good, rounding chooses."""

SIZES = (MOST_READ_TOKENS, FIXED_CHUNK, WINDOW)
"""Of the pieces, in turn: collectives went wrong that followed others of other shapes
(mlx#3149)."""

TOLERANCE = 0.1
"""Of what a layer adds to its input. Rounding in bfloat16 is a tenth of that; one of eight ranks
whose part is missing, three times as much."""

PATTERN = 199
"""Numbers below it, and some more, are exact in bfloat16."""

logger = logging.getLogger(__name__)


def check_group(
    model: Any,
    folder: ModelFolder,
    group: mx.distributed.Group,
    *,
    facts: EngineFacts,
    report: Callable[[], object],
) -> None:
    """Raise if the ranks compute or hand on something wrong; all of them run this together.

    Of a tensor group each rank computes the first layer alone, too, from the files. What the ranks
    of a pipeline compute is theirs alone, so numbers that all of them know go through it.

    Args:
        model: a rank's share.
        folder: the whole model.
        group: all ranks.
        facts: of the model.
        report: called now and then.

    Raises:
        DivergedError: names what was wrong.
    """
    began = time.perf_counter()
    count = min(CPU_TOKENS if facts.backend == "cpu" else TOKENS, facts.context_length)
    if facts.parallel == "tensor":
        whole, _ = load_lazily(folder)
        tokens = mx.array(np.random.default_rng(0).integers(facts.vocabulary_size, size=count))
        check_layer(model, whole, tokens, report)
    else:
        check_pipeline(group, count, folder.number("hidden_size") or 1, report)
    mx.clear_cache()  # of a whole layer
    took_s = time.perf_counter() - began
    logger.info(
        log_line("the ranks compute as one", by=facts.parallel, tokens=count, seconds=took_s)
    )


def check_layer(model: Any, whole: Any, tokens: mx.array, report: Callable[[], object]) -> None:
    """Raise if the ranks' first layer is not that of the whole model.

    Only this layer is evaluated, for all pieces in one graph, so that the collectives follow each
    other as in a pass through many layers. Every three pieces are a prompt: cuDNN plans attention
    anew for each number of keys, a second or two each time, and no rank hands keys to another.

    Args:
        model: a rank's share.
        whole: the model, whose arrays are still to be read.
        tokens: of the prompts, one behind the other (count,).
        report: called after each piece.

    Raises:
        DivergedError: names the first position.
    """
    shared: list[Any] = []
    alone: list[Any] = []
    layers = model.layers
    layers[0] = noted = _Noted(layers[0])
    try:
        for number, (begin, end) in enumerate(_pieces(tokens.size)):
            if number % len(SIZES) == 0:
                shared += (latest := make_prompt_cache(model))
                alone += make_prompt_cache(whole)
            model(tokens[None, begin:end], cache=latest)
    finally:
        layers[0] = noted.layer
    mx.eval([result for _, _, result in noted.calls])
    own = {id(cache): other for cache, other in zip(shared, alone, strict=True)}
    begin = 0
    for arguments, named, result in noted.calls:
        expected = _first(
            whole.layers[0](
                *(own.get(id(one), one) for one in arguments),
                **{key: own.get(id(one), one) for key, one in named.items()},
            )
        )
        errors = _errors(arguments[0], result, expected)
        medians = np.median(errors.reshape(-1, WINDOW), axis=1)
        wrong = np.flatnonzero(~(medians <= TOLERANCE))  # one that is no number is wrong, too
        if wrong.size:
            raise DivergedError(
                f"the hosts compute layer 1 together otherwise than one of them alone, from token"
                f" {begin + int(wrong[0]) * WINDOW + 1} on, by {medians[wrong[0]]:.0%}; use"
                ' parallel = "pipeline" if the model can, else one host'
            )
        begin += errors.size
        report()


class _Noted:
    """A layer whose calls are noted: positional and named arguments, and the result."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.calls: list[tuple[Any, dict[str, Any], mx.array]] = []

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        result = self.layer(*arguments, **named)
        self.calls.append((arguments, named, _first(result)))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


def _first(result: Any) -> mx.array:
    """Return the hidden state that a layer has computed, perhaps beside others."""
    array: mx.array = result[0] if isinstance(result, tuple) else result
    return array


def _errors(given: mx.array, result: mx.array, expected: mx.array) -> np.ndarray[Any, Any]:
    """Return how far a layer's results (1, tokens, …) are from what is expected, as shares of what
    it adds to what it was given (tokens,)."""

    def length(array: mx.array) -> mx.array:
        return mx.linalg.norm(array.astype(mx.float32).reshape(array.shape[1], -1), axis=-1)

    least = mx.finfo(mx.float32).eps * length(expected)
    shares = length(result - expected) / mx.maximum(length(expected - given), least)
    # A model with broken weights is served, with a warning.
    return np.array(mx.where(mx.isfinite(length(expected)), shares, 0.0))


def check_pipeline(
    group: mx.distributed.Group, count: int, width: int, report: Callable[[], object]
) -> None:
    """Raise if numbers do not go through all ranks as they should; each rank adds one to them.

    Args:
        group: all ranks.
        count: tokens in all.
        width: of the hidden state.
        report: called after each piece.

    Raises:
        DivergedError: names the length of the message.
    """
    rank, size = group.rank(), group.size()
    for begin, end in _pieces(count):
        numbers = (mx.arange((end - begin) * width) % PATTERN).astype(mx.bfloat16)
        numbers = numbers.reshape(1, end - begin, width)
        # As mlx-lm's pipelines do it.
        state = mx.distributed.recv_like(numbers, rank + 1) if rank + 1 < size else numbers
        state = state + 1
        if rank:
            state = mx.distributed.send(state, rank - 1)
        state = mx.distributed.all_gather(state)[:1]
        if not mx.array_equal(state, numbers + size).item():
            raise DivergedError(
                f"numbers for {end - begin} tokens do not arrive as they were sent through the"
                " hosts; check the link between them"
            )
        report()


def _pieces(count: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each piece of a prompt, which ends with a window."""
    begin, last = 0, count // WINDOW * WINDOW
    for size in cycle(SIZES):
        if begin == last:
            return
        end = min(begin + size, last)
        yield begin, end
        begin = end
