"""How many numbers a layer keeps for each token, from the shapes of what makes keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .settings import HEADS, number, query_width

SEPARATE = frozenset({"k_proj", "v_proj", "c_k", "c_v", "attn_key", "attn_value"})
"""Make the keys or the values: as many numbers as they have outputs."""

FUSED = {
    "qkv_proj": 1,
    "q_k_v_proj": 1,
    "query_key_value": 1,
    "Wqkv": 1,
    "wqkv": 1,
    "W_pack": 1,
    "c_attn": 1,
    "qkvg_proj": 2,
}
"""Make keys and values, and how many outputs besides that are as wide as the queries."""

LATENT = "kv_a_proj_with_mqa"
"""Makes compressed keys and values. Most types keep them as they are, and the positions' part."""

EXPANDED_TYPES = frozenset({"deepseek_v2", "minicpm3", "youtu_llm"})
"""These types keep the keys and values of all heads instead."""

INDEXERS = {"wk": 2, "index_k_proj": 1}
"""Make the keys of an indexer; mlx-lm keeps values of the same width with the first."""

SHARED_KEY = "attention_k_eq_v"
"""In config.json: a layer without `v_proj` takes its keys for values."""


def token_numbers(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], layer: int
) -> list[int]:
    """What the attentions of a layer keep per token, one entry for each cache.

    Args:
        shapes: of the layer's weights, by name within the layer, without the final `.weight`.
        config: of the text model.
        layer: the number of the layer.
    """
    caches: dict[str, int] = {}
    for name, shape in shapes.items():
        parent, _, own = name.rpartition(".")
        count = _numbers(own, shape, config, layer)
        if count:
            place = name if own in INDEXERS else parent
            caches[place] = caches.get(place, 0) + count
            if own == "k_proj" and _takes_keys_for_values(shapes, parent, config):
                caches[place] += count
    return list(caches.values())


def _numbers(own: str, shape: tuple[int, ...], config: Mapping[str, Any], layer: int) -> int | None:
    outputs = max(shape) if own == "c_attn" else shape[0]
    if own in SEPARATE:
        return outputs
    if own in INDEXERS:
        return outputs * INDEXERS[own]
    if own in FUSED:
        queries = query_width(config, layer)
        return outputs * 2 // 3 if queries is None else outputs - FUSED[own] * queries
    if own == LATENT:
        return _latent_numbers(outputs, config)
    return None


def _latent_numbers(outputs: int, config: Mapping[str, Any]) -> int:
    heads = number(config, HEADS)
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    widths = [number(config, (name,)) for name in names]
    if config.get("model_type") not in EXPANDED_TYPES or heads is None or None in widths:
        return outputs
    return heads * sum(width for width in widths if width is not None)


def _takes_keys_for_values(
    shapes: Mapping[str, tuple[int, ...]], parent: str, config: Mapping[str, Any]
) -> bool:
    values = f"{parent}.v_proj" if parent else "v_proj"
    return config.get(SHARED_KEY) is True and values not in shapes
