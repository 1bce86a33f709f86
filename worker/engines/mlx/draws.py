"""Two ways of drawing a token from the weights of a row's tokens with the row's own key.

By share: numbers of the key are looked up in running sums of the weights. That costs two numbers
for a row, but a rounding of one weight moves the borders of every token behind it. By noise: each
token gets separate noise, and the largest sum of noise and logarithm of the weight is drawn. A
rounding only changes the draw if it swaps the two largest, which is several times as rare.

On the CPU a row's logits have equal bits in any company, so nothing is rounded otherwise, and what
a draw costs is what counts. On a GPU they are rounded otherwise in every batch and after a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

Draw = Callable[[mx.array, Sequence[int]], mx.array]
"""Draws a token for each row (rows,), a token without weight never.

Args: the weights (rows, vocabulary), none negative, and each row's key of 64 bits.
"""

BLOCK = 128
"""How many neighbouring ids form a block: a draw by share picks a block, and then a token of it."""

LEAST_SHARE = 2.0**-33
"""Instead of the number 0, for which the noise would be infinite; the least above it is 2**-32."""


def draw_by_share(weights: mx.array, keys: Sequence[int]) -> mx.array:
    """See `Draw`; each row's two numbers have 24 bits of its key each."""
    first, second = ([key >> 40 for key in keys], [key >> 16 & 0xFFFFFF for key in keys])
    return pick_tokens(weights, _fractions(first), _fractions(second))


def draw_by_noise(weights: mx.array, keys: Sequence[int]) -> mx.array:
    """See `Draw`; the likelihood of the largest sum is that of its weight (Gumbel's noise)."""
    return mx.argmax(mx.log(weights) + make_noise(keys, weights.shape[-1]), axis=-1)


SAMPLER_VERSIONS: dict[Draw, str] = {draw_by_share: "2", draw_by_noise: "3"}
"""Changes when the same seed may draw other tokens; a part of every model's fingerprint, so that
nothing is continued the other way. No number is used twice."""


def choose_draw(backend: str) -> Draw:
    """The way that suits a backend (`cpu`, `cuda` or `metal`), once for each load."""
    return draw_by_share if backend == "cpu" else draw_by_noise


def make_noise(keys: Sequence[int], width: int) -> mx.array:
    """Gumbel's noise for each token of each row (rows, width), from -2.82 to 22.88.

    A row's noise follows from its key, whatever other rows there are, and is made for all of them
    at once. It is finite: a row may have one token with a weight, which must win in any case.
    """
    halves = np.array([[key >> 32, key & 0xFFFFFFFF] for key in keys], dtype=np.uint32)
    uniform = mx.vmap(lambda half: mx.random.uniform(shape=(width,), key=half))
    shares = mx.maximum(uniform(mx.array(halves)), LEAST_SHARE)
    # Small shares have the finest steps, so they give the large noise: unlikely tokens need it.
    return -mx.log(-mx.log1p(-shares))


def _fractions(numbers: list[int]) -> mx.array:
    """Of 2**24 (rows, 1): exact, because float32 has as many bits."""
    return mx.array((np.array(numbers) / 2**24).astype(np.float32)[:, None])


def pick_tokens(weights: mx.array, first: mx.array, second: mx.array) -> mx.array:
    """The token at which a share of each row's weights is reached.

    The first number picks a block, the second one a token of it. One sum over a whole vocabulary
    in float32 would lose the many unlikely tokens behind the likely ones.

    Args:
        weights: (rows, vocabulary), none negative; a token without any is never picked.
        first: from 0 up to 1 (rows, 1).
        second: likewise.
    """
    rows, width = weights.shape
    if rest := -width % BLOCK:
        weights = mx.pad(weights, [(0, 0), (0, rest)])
    blocks = weights.reshape(rows, -1, BLOCK)
    block = _pick(mx.sum(blocks, axis=-1), first)
    within = mx.take_along_axis(blocks, block[:, :, None], axis=1)[:, 0]
    return (block * BLOCK + _pick(within, second))[:, 0]


def _pick(masses: mx.array, share: mx.array) -> mx.array:
    """The first place (rows, 1) where the sum so far is above that share of the whole.

    Never a place without mass, however sums are rounded: in parallel they need not ascend, and the
    share of a tiny whole may be rounded up to it. Then it is the last place with mass.
    """
    ends = mx.where(masses > 0, mx.cumsum(masses, axis=-1), 0.0)
    whole = mx.max(ends, axis=-1, keepdims=True)
    is_beyond = ends > share * whole
    # Of those beyond the one that ends first, because its distance from 2 * whole is the largest.
    return mx.argmax(mx.where(is_beyond, 2 * whole - ends, ends), axis=-1, keepdims=True)
