"""Numbers of a config.json, which architectures call by different names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LAYER_COUNT = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_transformer_layers",
)
HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model", "model_dim", "hidden_dim", "dim")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "n_head_kv")
HEAD_DIM = ("head_dim", "kv_channels")


def number(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """A positive integer, under the first of the names that has one."""
    for name in names:
        value = config.get(name)
        if type(value) is int and value > 0:
            return value
    return None


def layer_count(config: Mapping[str, Any]) -> int | None:
    """How many layers there are; a type that spells its layers goes by the spelling."""
    spelled = config.get("hybrid_override_pattern")
    if isinstance(spelled, str | list) and spelled:
        return len(spelled)
    return number(config, LAYER_COUNT)


def head_dim(config: Mapping[str, Any]) -> int | None:
    """The width of a head."""
    given = number(config, HEAD_DIM)
    if given is not None:
        return given
    hidden, heads = number(config, HIDDEN_SIZE), number(config, HEADS)
    return hidden // heads if hidden is not None and heads is not None else None


def query_width(config: Mapping[str, Any], layer: int) -> int | None:
    """How many numbers the queries of one token have, in one layer."""
    width = head_dim(config)
    per_layer = config.get("num_query_heads")
    if isinstance(per_layer, list) and layer < len(per_layer) and width is not None:
        return int(per_layer[layer]) * width
    heads = number(config, HEADS)
    return heads * width if heads is not None and width is not None else None
