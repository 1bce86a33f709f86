"""What the layers of a loaded model keep for each row, read off the shapes of a row's caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlxsup.protocol.cache_layers import CacheLayers

from .caches import layers_of


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class _Kept:
    """What one layer keeps; as in `CacheLayers`, with 0 for no window."""

    token_bytes: int = 0
    row_bytes: int = 0
    window: int = 0


def measure_layers(row: Sequence[Any]) -> tuple[CacheLayers, ...]:
    """Groups of layers that keep the same; what keeps nothing is left out.

    Args:
        row: the caches of a row that has read at least one token.
    """
    kept = sorted(_measure(layer) for layer in layers_of(row) if not layer.empty())
    return tuple(
        CacheLayers(
            layers=len(list(equal)),
            token_bytes=one.token_bytes,
            row_bytes=one.row_bytes,
            window=one.window or None,
        )
        for one, equal in groupby(kept)
    )


def _measure(layer: Any) -> _Kept:
    if not isinstance(layer, KVCache | RotatingKVCache):
        return _Kept(row_bytes=int(layer.nbytes))
    token_bytes = int(layer.nbytes) // int(layer.keys.shape[2])
    window = int(layer.max_size) if isinstance(layer, RotatingKVCache) else 0
    return _Kept(token_bytes=token_bytes, window=window)
