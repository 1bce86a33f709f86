"""A grammar's mask on one row's logits.

llguidance has its own kernel for Metal; plain array operations work everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ...text.grammar import RowGrammar


class GrammarProcessor:
    """Forbids the tokens that the grammar does not allow next.

    Args:
        grammar: its state after what was delivered in an earlier life.
    """

    def __init__(self, grammar: RowGrammar) -> None:
        self._grammar = grammar
        self._is_first = True

    def __call__(self, logits: mx.array, latest: int) -> mx.array:
        """See `Processor`; called once more after the last token (then it changes nothing)."""
        if not self._is_first:  # the one before the first is the prompt's, or was delivered
            self._grammar.accept(latest)
        self._is_first = False
        if self._grammar.lead is not None:
            return self._lead_on(logits, *self._grammar.lead)
        mask = self._grammar.mask()
        if mask is None:
            return logits
        bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
        width = logits.shape[-1]
        allowed = np.zeros(width, dtype=bool)
        count = min(width, len(bits))
        allowed[:count] = bits[:count]
        return mx.where(mx.array(allowed), logits, -mx.inf)

    @staticmethod
    def _lead_on(logits: mx.array, early_ends: Sequence[int], on: int) -> mx.array:
        """Let a model that would end its answer in the reasoning end the reasoning instead: the
        answer is still owed."""
        ends = [token for token in early_ends if token < logits.shape[-1]]
        if not ends:
            return logits
        wanted = mx.max(logits[..., [*ends, on]], axis=-1)
        logits = logits + 0
        logits[..., ends] = -mx.inf
        logits[..., on] = wanted
        return logits
