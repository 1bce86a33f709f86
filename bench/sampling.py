"""What drawing the tokens of a step costs: a sampler for each row, or one for all of them.

Both sides get logits and give tokens. *Row by row* is mlx-lm's generator with mlx-lm's samplers
and logits processors, one of each row's own; *at once* is mlxsup's sampler. On a GPU most of the
time is that of the thread that steps: the computations are short, and each has to be asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlxsup.protocol.parameters import Sampling
from mlxsup.worker.engines.mlx.batch_sampler import BatchSampler
from mlxsup.worker.engines.mlx.draws import choose_draw
from mlxsup.worker.engines.mlx.sampling import RowDraws

from .report import print_table

ROWS = (1, 16, 64)
WIDTHS = (32_000, 151_936)
CONTEXT = 40
TARGET_MS = 1.2
TARGETED = (64, "temperature")

KINDS: dict[str, dict[str, float]] = {
    "temperature": {"temperature": 0.8},
    "top_k 20, top_p 0.8": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "top_p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "min_p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
    },
}
"""What all rows of a batch ask for."""

Draw = Callable[[mx.array], mx.array]
"""From logits (rows, vocabulary) to tokens (rows,)."""


def make_row_by_row(kind: dict[str, float], rows: int) -> Draw:
    """A sampler and processors for each row, called as mlx-lm's generator calls them."""
    sampler_of = {
        "temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    }  # fmt: skip
    named: dict[str, Any] = {
        sampler_of[key]: value for key, value in kind.items() if key in sampler_of
    }
    penalties: dict[str, Any] = {key: value for key, value in kind.items() if key not in sampler_of}
    samplers = [make_sampler(**named) for _ in range(rows)]
    processors = [make_logits_processors(**penalties) for _ in range(rows)]
    context = mx.arange(CONTEXT)

    def draw(logits: mx.array) -> mx.array:
        if processors[0]:
            changed = []
            for row, own in enumerate(processors):
                one = logits[row : row + 1]
                for processor in own:
                    one = processor(context, one)
                changed.append(one)
            logits = mx.concatenate(changed, axis=0)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        drawn = [sampler(logprobs[row : row + 1]) for row, sampler in enumerate(samplers)]
        return mx.concatenate(drawn, axis=0)

    return draw


def make_at_once(kind: dict[str, float], rows: int, width: int) -> Draw:
    """mlxsup's sampler, as `DrawingBatch` calls it."""
    sampling = Sampling(**kind)  # type: ignore[arg-type]
    draws = [RowDraws(sampling=sampling, seed=seed) for seed in range(rows)]
    backend = "cpu" if mx.default_device().type == mx.DeviceType.cpu else "cuda"
    held = [list(range(CONTEXT))] * rows
    sampler = BatchSampler(draws, held, width, choose_draw(backend))
    latest = mx.zeros((rows,), dtype=mx.uint32)

    def draw(logits: mx.array) -> mx.array:
        shaped = sampler.shape(logits, latest)
        return sampler.draw(shaped - mx.logsumexp(shaped, axis=-1, keepdims=True))

    return draw


def best_ms(draw: Draw, logits: mx.array, repeats: int) -> tuple[float, float]:
    """The best of many: until tokens are there, and of that the thread's own work."""
    whole: list[float] = []
    own: list[float] = []
    for _ in range(repeats):
        fresh = logits + 0
        mx.eval(fresh)
        started, worked = time.perf_counter(), time.thread_time()
        tokens = draw(fresh)
        mx.async_eval(tokens)  # type: ignore[no-untyped-call]
        own.append(time.thread_time() - worked)
        mx.eval(tokens)
        whole.append(time.perf_counter() - started)
    return min(whole) * 1000, min(own) * 1000


def run(repeats: int) -> None:
    """Measures and prints.

    Args:
        repeats: of each figure, times four; both sides take turns.
    """
    device = mx.default_device().type.name
    print(f"## Drawing a step's tokens: row by row, or at once ({device})\n", flush=True)
    print(
        f"best of {4 * repeats} in ms; thread: CPU time of the thread that steps; "
        f"target: {TARGETED[0]} rows with a {TARGETED[1]} in {TARGET_MS} ms on a GPU\n"
    )
    head = ["vocabulary", "rows", "asked for", "row by row", "… thread", "at once", "… thread", ""]
    lines = [
        _measure(width, rows, kind, 4 * repeats)
        for width in WIDTHS
        for rows in ROWS
        for kind in KINDS
    ]
    print_table(head, lines)


def _measure(width: int, rows: int, kind: str, repeats: int) -> list[str]:
    logits = mx.random.normal((rows, width), key=mx.random.key(1)) * 3
    mx.eval(logits)
    row_by_row, own_before = best_ms(make_row_by_row(KINDS[kind], rows), logits, repeats)
    at_once, own_after = best_ms(make_at_once(KINDS[kind], rows, width), logits, repeats)
    verdict = ""
    if (rows, kind) == TARGETED and mx.default_device().type == mx.DeviceType.gpu:
        verdict = "kept" if at_once <= TARGET_MS else "MISSED"
    figures = [f"{value:.2f}" for value in (row_by_row, own_before, at_once, own_after)]
    return [f"{width:,}", str(rows), kind, *figures, verdict]
