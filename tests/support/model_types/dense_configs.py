"""What the configurations of several model types share; those of the files up to k are made of it.

Each is as small as the architecture allows while every kind of layer is there, dense before sparse
feed-forward layers and full beside windowed attention; windows hold 16 tokens.
"""

from __future__ import annotations

from typing import Any

from .model_type import ModelType
from support.models.tiny_model import CONTEXT_LENGTH, VOCABULARY_SIZE

WINDOW = 16
SLIDING = "sliding_attention"
FULL = "full_attention"

DENSE: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "max_position_embeddings": CONTEXT_LENGTH,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
"""The names that most architectures share; those that one does not know are ignored by it."""

LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
"""Multi-head latent attention."""

DEEPSEEK_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}

BAILING_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "n_group": 2,
    "topk_group": 1,
}

INDEXER: dict[str, Any] = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 24}
"""Sparse attention: what a token attends to is chosen among those before it, 24 at most."""


def dense(model_type: str, name: str = "", **changes: Any) -> ModelType:
    """An entry with the usual names; a value of `...` leaves the entry out."""
    config = DENSE | {"model_type": model_type} | changes
    return ModelType(
        name=name or model_type,
        config={key: value for key, value in config.items() if value is not ...},
    )


def only(model_type: str, name: str = "", **config: Any) -> ModelType:
    """An entry with its own names."""
    return ModelType(name=name or model_type, config={"model_type": model_type} | config)


DEEPSEEK_V3: dict[str, Any] = DENSE | LATENT | DEEPSEEK_EXPERTS | {"model_type": "deepseek_v3"}
