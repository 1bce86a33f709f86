"""mlx-lm's batch of prompts, without the copy of all caches when every prompt in it is read.

mlx-lm takes the rows that begin to answer out of the batch of prompts by index, which copies the
cache of each of them, layer by layer, in one graph with the first token's pass. Of a prompt that is
read alone that is the whole cache, once more, for nothing: 16 GiB of a 7B model with 32,768 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_lm.generate import PromptProcessingBatch
from mlx_lm.models.cache import BatchKVCache


class PromptBatch(PromptProcessingBatch):  # type: ignore[misc]
    """Hands its caches over if all of its rows begin to answer at once."""

    def split(self, indices: Sequence[int]) -> PromptProcessingBatch:
        """Takes rows out, into their own batch."""
        if len(indices) < len(self.uids):
            return super().split(indices)
        caches: list[Any] = self.prompt_cache
        self.prompt_cache: list[Any] = []
        leaving = self._copy()
        leaving.prompt_cache = caches
        for layer in caches:
            if not _is_whole(layer):
                layer.filter(sorted(indices))
        self.filter([])
        return leaving


def _is_whole(layer: Any) -> bool:
    """Whether taking all rows of a layer's cache leaves it as it is: no padding can go."""
    return type(layer) is BatchKVCache and min(layer.left_padding.tolist()) == 0
