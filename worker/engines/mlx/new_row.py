"""A row on its way into the passes, and what is left of it afterwards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mlx_lm.generate import StopSequences

from .logprobs import PromptLogprobs
from .sampling import RowDraws

KeptCaches = dict[int, tuple[list[Any], list[int]]]
"""By uid: a row's cache, and the tokens that it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRow:
    """What the passes need to know about a row.

    Attributes:
        tokens: tokens still to be read; at least one.
        known: the tokens before them, which `cache` holds.
        cache: belongs to the row from now on; None: nothing is known.
        max_tokens: at least 1.
        draws: how its tokens are drawn.
        stops: what ends its answer.
        checkpoints: numbers of tokens in its cache at which a copy is taken; ascending.
        prompt: collects how likely the tokens are, if that is asked for.
    """

    tokens: list[int]
    known: list[int]
    cache: list[Any] | None
    max_tokens: int
    draws: RowDraws
    stops: StopSequences
    checkpoints: tuple[int, ...] = ()
    prompt: PromptLogprobs | None = None

    def after(self, known: list[int], cache: list[Any]) -> NewRow:
        """Return the same row, these first tokens of which `cache` holds."""
        tokens = (self.known + self.tokens)[len(known) :]
        ends = tuple(count for count in self.checkpoints if count > len(known))
        return replace(self, tokens=tokens, known=known, cache=cache, checkpoints=ends)
