"""What a look-up in the prefix cache adds to a turn, beside long and many entries.

In this process, with caches of one byte for each token: only the index is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from mlxsup.worker.engines.mlx.prefix_cache import PrefixCache
from mlxsup.worker.engines.mlx.prefix_size import PrefixRoom

from .report import print_table, spread

GIANT = 100_000
SMALL = 200
LAYERS = 32
VOCABULARY = 100_000
NEW_TOKENS = 500


def kept(tokens: list[int]) -> list[KVCache]:
    """A cache that has as many layers as a large model's."""
    arrays = mx.zeros((1, 1, len(tokens), 1), dtype=mx.uint8)
    layers = [KVCache() for _ in range(LAYERS)]
    for layer in layers:
        layer.keys, layer.values, layer.offset = arrays, arrays, len(tokens)
    return layers


def run(repeats: int) -> None:
    """Measures and prints."""
    numbers = np.random.default_rng(0)

    def words(count: int) -> list[int]:
        return [int(token) for token in numbers.integers(0, VOCABULARY, count)]

    def timed_ms(call: Callable[[], object]) -> float:
        began = time.thread_time()
        call()
        return 1000 * (time.thread_time() - began)

    print(f"## A look-up beside a prompt of {GIANT:,} tokens (CPU)\n")
    print(f"{repeats} repeats of 20; processor time, median (range); {LAYERS} layers\n")
    rows = []
    for others in (0, 400, 4000):
        cache = PrefixCache(PrefixRoom(max_bytes=2**40))
        giant = words(GIANT)
        cache.keep(giant, kept(giant))
        for _ in range(others):
            tokens = [*giant[:NEW_TOKENS], *words(SMALL)]
            cache.keep(tokens, kept(tokens))
        new = {
            "shares 3 tokens": (giant[:3], NEW_TOKENS),
            f"shares {NEW_TOKENS} tokens": (giant[:NEW_TOKENS], 20),
            "shares all": (giant, 1),
        }
        for what, (shared, count) in new.items():
            prompts = [[*shared, *words(count)] for _ in range(20 * repeats)]
            times = [timed_ms(partial(cache.find, prompt)) for prompt in prompts]
            rows.append([f"{others:,}", f"look-up, {what}", spread(times, " ms", 3)])
        times = []
        for _ in range(20 * repeats):
            tokens = words(GIANT)
            layers = kept(tokens)
            times.append(timed_ms(partial(cache.keep, tokens, layers)))
        rows.append([f"{others:,}", f"keeping another of {GIANT:,}", spread(times, " ms", 3)])
    print_table(["other entries", "what", "time"], rows)
