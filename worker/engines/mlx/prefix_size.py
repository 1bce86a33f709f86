"""How much the prefix cache of a loaded model may keep, and what its caches are like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import psutil
from mlx_lm.models.cache import make_prompt_cache

from mlxsup.protocol.launch import LaunchSpec

from ...engine import EngineFacts
from .caches import row_after, row_bytes, tokens_that_can_be_cut

FREE_SHARE = 10
"""Divides the free memory: the cache gets one part, if a row of the whole context needs no more."""

MOST_SHARE = 2
"""Divides the free memory: the cache never gets more than one part, whatever a row needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRoom:
    """What a prefix cache needs to know of a model and its machine.

    Attributes:
        max_bytes: the most to keep; 0: nothing.
        row_tokens: the longest row that is kept whole; at most the context.
        cuttable_tokens: up to this length a row's cache can be cut back; None: at any length.
    """

    max_bytes: int = 0
    row_tokens: int = 0
    cuttable_tokens: int | None = None


def find_room(model: Any, spec: LaunchSpec, facts: EngineFacts) -> PrefixRoom:
    """The room for a model that is loaded and has run; on the current stream."""
    # Cached prefixes were computed in other chunks.
    if spec.deterministic or spec.prefix_cache_bytes == 0:
        return PrefixRoom()
    row = row_after(model, 1)
    max_bytes = spec.prefix_cache_bytes
    if max_bytes is None:
        max_bytes = automatic_bytes(
            free_bytes=free_memory_bytes(facts.backend, spec.memory_limit_bytes),
            row_bytes=row_bytes(row, facts.context_length),
        )
    return PrefixRoom(
        max_bytes=max_bytes,
        row_tokens=tokens_that_fit(max_bytes, row, facts.context_length),
        cuttable_tokens=tokens_that_can_be_cut(make_prompt_cache(model)),
    )


def automatic_bytes(*, free_bytes: int, row_bytes: int) -> int:
    """A share of the free memory that holds at least one row, but not most of the memory."""
    return min(max(free_bytes // FREE_SHARE, row_bytes), free_bytes // MOST_SHARE)


def free_memory_bytes(backend: str, memory_limit_bytes: int | None) -> int:
    """How much memory this process may still take, once the weights are loaded.

    Args:
        backend: `cpu`, `cuda` or `metal`; the latter's memory is the machine's.
        memory_limit_bytes: this process's limit; None: none.
    """
    if backend == "cuda":
        info = mx.device_info()
        free = int(info.get("free_memory", info.get("total_memory", 0)))
    else:
        free = psutil.virtual_memory().available
    if memory_limit_bytes is not None:
        free = min(free, memory_limit_bytes - mx.get_active_memory())
    return max(free, 0)


def tokens_that_fit(max_bytes: int, row: Sequence[Any], context_length: int) -> int:
    """The longest row that can be kept; at most the whole context.

    Args:
        row: the caches of a row of at least one token.
    """
    fits, too_long = 0, context_length + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if row_bytes(row, middle) <= max_bytes:
            fits = middle
        else:
            too_long = middle
    return fits
