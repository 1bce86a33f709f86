"""Makes logits leave the model as float32, no matter what it computes in.

Log-probabilities are differences of logits: taken in bfloat16, which has eight bits, they are wrong
by up to 0.1.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx


class FloatLogits:
    """A model whose logits are float32; everything else of it is the model's own.

    A prefill that evaluates only the caches never computes the conversion, as it never computes
    the logits.

    Attributes:
        own_dtype: dtype of the model's own logits; None before the first call.
        width: how many ids they are for; 0 before the first call.
        group: the ranks that compute the model together; None: it is not divided.

    Args:
        model: called with ids (rows, tokens) and `cache`, gives logits (rows, tokens, vocabulary).
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.own_dtype: mx.Dtype | None = None
        self.width = 0
        self.group: mx.distributed.Group | None = None

    def __call__(self, tokens: mx.array, *args: Any, **named: Any) -> mx.array:
        """Return the model's logits for these tokens, as float32."""
        logits: mx.array = self._model(tokens, *args, **named)
        self.own_dtype, self.width = logits.dtype, logits.shape[-1]
        return logits.astype(mx.float32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
