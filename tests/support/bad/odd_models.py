"""Tiny models of types whose rows may change each other in a batch, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes

from support.models.tiny_model import CONTEXT_LENGTH, VOCABULARY_SIZE, make_tiny_model

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "max_position_embeddings": CONTEXT_LENGTH,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "mamba": _COMMON
    | {
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 8,
    },
    "nemotron_h": _COMMON
    | {
        "attention_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "hybrid_override_pattern": ["M", "*", "-", "M"],
        "num_hidden_layers": 4,
    },
    "baichuan_m1": _COMMON
    | {
        "sliding_window": 16,
        "sliding_window_layers": [1],
        "conv_window": 2,
    },
    "recurrent_gemma": _COMMON
    | {
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": 16,
        "block_types": ["recurrent", "recurrent", "attention"],
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
    },
    "lfm2": _COMMON
    | {
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 128,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1],
    },
    "afm7": {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_dim": 64,
        "num_layers": 4,
        "num_kv_reuse_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
    },
    "gpt_bigcode": {
        "vocab_size": VOCABULARY_SIZE,
        "n_embd": 64,
        "n_layer": 2,
        "n_inner": 128,
        "n_head": 4,
        "n_positions": CONTEXT_LENGTH,
        "layer_norm_epsilon": 1e-5,
    },
    "internlm2": _COMMON | {"bias": False, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "gemma2": _COMMON
    | {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 16,
    },
    "gemma3_text": _COMMON | {"sliding_window": 16, "sliding_window_pattern": 2},
    "qwen3": _COMMON,
}
"""By model type."""


def make_odd_model(folder: Path, name: str) -> Path:
    """Writes a model folder of one of `CONFIGS` that mlx-lm loads, and returns it."""
    config = {"model_type": name} | CONFIGS[name]
    make_tiny_model(folder)
    (folder / "config.json").write_text(json.dumps(config))
    model_class, arguments_class = _get_classes(config)
    model: Any = model_class(arguments_class.from_dict(config))
    key = mx.random.key(0)
    weights: list[tuple[str, mx.array]] = []
    for number, (path, value) in enumerate(tree_flatten(model.parameters())):
        assert isinstance(value, mx.array)
        if value.ndim > 1 and path.endswith("weight"):
            noise = mx.random.normal(value.shape, key=mx.random.split(key, 2 + number)[number])
            scale = 1.5 / (value[0].size ** 0.5) if value.shape[0] < VOCABULARY_SIZE else 0.3
            value = noise * scale
        weights.append((path, value.astype(mx.float32)))
    model.update(tree_unflatten(weights))
    saved = dict(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), saved, metadata={"format": "mlx"})
    return folder
