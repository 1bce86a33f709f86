"""One tiny random model for each kind of cache that mlx-lm's models have."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from support.models.tiny_model import CONTEXT_LENGTH, VOCABULARY_SIZE, make_tiny_model

WINDOW = 24

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": CONTEXT_LENGTH,
    "tie_word_embeddings": False,
}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2},
    "gemma3_text": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
    },
    "lfm2": {
        "num_hidden_layers": 4,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 128,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3],
    },
    "mamba": {
        "num_hidden_layers": 2,
        "state_size": 16,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 8,
    },
    "qwen3_next": {
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "partial_rotary_factor": 0.5,
        "head_dim": 16,
        "norm_topk_prob": True,
    },
    "deepseek_v32": {
        "num_hidden_layers": 2,
        "index_head_dim": 16,
        "index_n_heads": 4,
        "index_topk": 32,
        "moe_intermediate_size": 64,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "qk_nope_head_dim": 8,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "rope_scaling": None,
    },
    "falcon_h1": {
        "num_hidden_layers": 2,
        "head_dim": 16,
        "mamba_d_conv": 4,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_expand": 1,
        "mamba_n_groups": 1,
        "mamba_n_heads": 4,
        "mamba_norm_before_gate": False,
        "mamba_rms_norm": False,
        "mamba_chunk_size": 16,
    },
}


def make_cache_model(folder: Path, model_type: str) -> Path:
    """Writes a folder of one of `CONFIGURATIONS`, with the tokenizer of the tiny llama."""
    make_tiny_model(folder)
    config = _COMMON | CONFIGURATIONS[model_type] | {"model_type": model_type}
    (folder / "config.json").write_text(json.dumps(config))
    module = import_module(f"mlx_lm.models.{model_type}")
    model = module.Model(module.ModelArgs.from_dict(config))
    numbers = np.random.default_rng(7)
    weights: dict[str, mx.array] = {}
    leaves: list[tuple[str, mx.array]] = tree_flatten(model.parameters())
    for name, value in leaves:
        noise = mx.array(numbers.standard_normal(value.shape), dtype=mx.float32)
        # Norms, biases and decays stay near what mlx-lm makes them.
        is_matrix = value.ndim > 1 and "A_log" not in name
        weights[name] = noise * 0.2 if is_matrix else value.astype(mx.float32) + 0.05 * noise
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder
