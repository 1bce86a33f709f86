"""mlx-lm's batch of prompts, without the copy of all caches when every prompt in it is read.

mlx-lm takes the rows that begin to answer out of the batch of prompts by index, which copies the
cache of each of them, layer by layer, in one graph with the first token's pass. Of a prompt that is
read alone that is the whole cache, once more, for nothing: 16 GiB of a 7B model with 32,768 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import PromptProcessingBatch
from mlx_lm.models.cache import BatchKVCache

from .logprobs import PromptLogprobs, pass_tokens


class PromptBatch(PromptProcessingBatch):  # type: ignore[misc]
    """Hands its caches over if all of its rows begin to answer at once.

    Attributes:
        logprobs: what collects how likely the tokens of a prompt are, by uid.
    """

    model: Any
    prefill_step_size: int

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.logprobs: dict[int, PromptLogprobs] = {}

    def prompt(self, tokens: list[list[int]]) -> None:
        """Reads the next tokens of each row; in shorter passes, if logits are needed of any."""
        wanted = {
            nth: self.logprobs[uid] for nth, uid in enumerate(self.uids) if uid in self.logprobs
        }
        if not wanted:
            super().prompt(tokens)
            return
        model: Any = self.model
        size: int = self.prefill_step_size
        lengths = {nth: len(tokens[nth]) for nth in wanted}
        done = 0

        def reading(chunk: mx.array, cache: list[Any]) -> None:
            nonlocal done
            logits = model(chunk, cache=cache)
            for nth, prompt in wanted.items():
                if done < lengths[nth]:
                    prompt.read(logits[nth, : lengths[nth] - done])  # the rest is padding
            done += chunk.shape[1]

        self.model, self.prefill_step_size = reading, pass_tokens(model, rows=len(tokens))
        try:
            super().prompt(tokens)
        finally:
            self.model, self.prefill_step_size = model, size

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
