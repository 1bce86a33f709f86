"""What the configurations of several model types share; those of the files from l are made of it.

Each is the least that has every kind of layer of its type: both kinds of attention, a window that a
prompt of forty tokens outgrows, experts of which some are left out, states that are carried on.
"""

from __future__ import annotations

from typing import Any

VOCABULARY_SIZE = 2048
WINDOW = 16
"""Tokens that a layer with a sliding window sees."""
CONTEXT_LENGTH = 4096

FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"


def llama(**changes: Any) -> dict[str, Any]:
    """What most decoders call their sizes, in the manner of llama."""
    return {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY_SIZE,
        "max_position_embeddings": CONTEXT_LENGTH,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    } | changes


def windowed(**changes: Any) -> dict[str, Any]:
    """Two layers with a window, one without, one with."""
    return (
        llama(
            num_hidden_layers=4,
            head_dim=16,
            sliding_window=WINDOW,
            layer_types=[SLIDING, SLIDING, FULL, SLIDING],
        )
        | changes
    )


def latent(**changes: Any) -> dict[str, Any]:
    """Attention over compressed keys and values."""
    return (
        llama(
            num_key_value_heads=4,
            q_lora_rank=32,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
            attention_bias=False,
        )
        | changes
    )


def default_rope(base: float = 10000.0) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": base}


def qwen3(**changes: Any) -> dict[str, Any]:
    return llama(model_type="qwen3", head_dim=16) | changes


def qwen3_moe(**changes: Any) -> dict[str, Any]:
    return (
        qwen3(
            model_type="qwen3_moe",
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            norm_topk_prob=True,
        )
        | changes
    )


LINEAR_ATTENTION = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}


def qwen3_5(**changes: Any) -> dict[str, Any]:
    return (
        qwen3(
            model_type="qwen3_5",
            num_hidden_layers=4,
            full_attention_interval=2,
            rope_parameters={
                "type": "default",
                "mrope_section": [1, 1, 0],
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
            },
            **LINEAR_ATTENTION,
        )
        | changes
    )


def qwen3_5_moe(**changes: Any) -> dict[str, Any]:
    return (
        qwen3_5(
            model_type="qwen3_5_moe",
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        )
        | changes
    )


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
