"""A grammar's mask on one row's logits.

llguidance has its own kernel for Metal; plain array operations work everywhere.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ...text.grammar import Grammar


class GrammarProcessor:
    """Forbids the tokens that the grammar does not allow next.

    The batch has to give the grammar each token before the next can be drawn, which costs it its
    overlap of two steps: only batches with such a row pay for it.

    Args:
        grammar: its state after what was delivered in an earlier life.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar

    def __call__(self, logits: mx.array) -> mx.array:
        """Called once for each token, and once more after the last (then it changes nothing)."""
        if not self._grammar.has_begun:
            return self._lead_on(logits)
        mask = self._grammar.mask()
        if mask is None:
            return logits
        bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
        width = logits.shape[-1]
        allowed = np.zeros(width, dtype=bool)
        count = min(width, len(bits))
        allowed[:count] = bits[:count]
        return mx.where(mx.array(allowed), logits, -mx.inf)

    def _lead_on(self, logits: mx.array) -> mx.array:
        """Let a model that would end its answer in the reasoning end the reasoning instead: the
        answer is still owed."""
        ends = [token for token in self._grammar.early_ends if token < logits.shape[-1]]
        if not ends:
            return logits
        on = self._grammar.leads_on
        wanted = mx.max(logits[..., [*ends, on]], axis=-1)
        logits = logits + 0
        logits[..., ends] = -mx.inf
        logits[..., on] = wanted
        return logits
