"""What earlier requests have computed of a prompt, kept for later ones that begin alike.

Over mlx-lm's own LRU cache. Everything here belongs to the thread that owns the engine: a look-up
copies arrays on the calling thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import LRUPromptCache

MODEL = "model"
"""mlx-lm's cache serves several models; ours has one."""

LEAST_TOKENS = 16
"""What is shorter is computed faster than it is looked up and copied."""

MAX_ENTRIES = 4096
"""Bytes are what counts; this bounds the bookkeeping of tiny entries."""


class PrefixCache:
    """Key-value caches by the tokens they hold.

    Args:
        max_bytes: of the arrays it keeps; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries = LRUPromptCache(max_size=MAX_ENTRIES, max_bytes=max_bytes)

    @property
    def held_bytes(self) -> int:
        """Of the arrays it keeps."""
        return int(self._entries.nbytes)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, tokens: Sequence[int]) -> tuple[list[Any] | None, int]:
        """A copy of the cache of the longest known beginning, and how many tokens that is.

        Never of all tokens: the last one has to be computed, since its logits are wanted.
        """
        if not len(self._entries) or len(tokens) <= LEAST_TOKENS:
            return None, 0
        known = list(tokens[:-1])
        cache, rest = self._entries.fetch_nearest_cache(MODEL, known)
        count = len(known) - len(rest)
        return (None, 0) if cache is None or count < LEAST_TOKENS else (cache, count)

    def keep(self, tokens: Sequence[int], cache: list[Any]) -> None:
        """Takes the cache that holds these tokens; nobody else may use it from now on."""
        if not self._max_bytes or len(tokens) < LEAST_TOKENS:
            return
        if sum(layer.nbytes for layer in cache) > self._max_bytes:
            return
        # Without this the arrays would hold on to those of the whole batch.
        evaluate_soon: Any = mx.async_eval
        evaluate_soon([layer.state for layer in cache])
        self._entries.insert_cache(MODEL, list(tokens), cache)

    def clear(self) -> None:
        """Gives everything back."""
        self._entries.trim_to(n_sequences=0)
