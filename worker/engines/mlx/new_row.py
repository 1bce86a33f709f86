"""A row on its way into the passes, and what is left of it when it comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.generate import StopSequences

from .sampling import Processor, Sampler

KeptCaches = dict[int, tuple[list[Any], list[int]]]
"""By uid: a row's cache, and the tokens that it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRow:
    """What the passes need of a row.

    Attributes:
        tokens: still to be read; at least one.
        known: those before them, which `cache` holds.
        cache: the row's own from now on; None: nothing is known.
        max_tokens: at least 1.
        sampler: draws its tokens.
        processors: change its logits.
        stops: what ends its answer.
        checkpoints: when so many tokens are in its cache, a copy is taken; ascending.
    """

    tokens: list[int]
    known: list[int]
    cache: list[Any] | None
    max_tokens: int
    sampler: Sampler
    processors: Sequence[Processor]
    stops: StopSequences
    checkpoints: tuple[int, ...] = ()
