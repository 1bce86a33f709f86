"""Configurations of the model types whose file in mlx-lm begins with q to z."""

from __future__ import annotations

from .llama_configs import (
    CONTEXT_LENGTH,
    FULL,
    LINEAR_ATTENTION,
    SLIDING,
    VOCABULARY_SIZE,
    WINDOW,
    YARN,
    default_rope,
    latent,
    llama,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    windowed,
)
from .model_type import ModelType

MODEL_TYPES_Q_TO_Z: list[ModelType] = [
    ModelType(
        name="qwen",
        config=llama(model_type="qwen", kv_channels=16, layer_norm_epsilon=1e-6, no_bias=True),
    ),
    ModelType(name="qwen2", config=llama(model_type="qwen2")),
    ModelType(
        name="qwen2_dynamic_rope",
        config=llama(
            model_type="qwen2",
            rope_scaling={"rope_type": "dynamic", "factor": 2.0},
        ),
    ),
    ModelType(
        name="qwen2_moe",
        config=llama(
            model_type="qwen2_moe",
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        ),
    ),
    ModelType(
        name="qwen2_vl",
        config={"model_type": "qwen2_vl", "text_config": llama(model_type="qwen2")},
    ),
    ModelType(name="qwen3", config=qwen3()),
    ModelType(name="qwen3_yarn", config=qwen3(rope_scaling=YARN)),
    ModelType(
        name="qwen3_5",
        config={"model_type": "qwen3_5", "text_config": qwen3_5()},
    ),
    ModelType(
        name="qwen3_5_moe",
        config={"model_type": "qwen3_5_moe", "text_config": qwen3_5_moe()},
    ),
    ModelType(name="qwen3_moe", config=qwen3_moe()),
    ModelType(
        name="qwen3_next",
        config=qwen3_moe(
            model_type="qwen3_next",
            num_hidden_layers=4,
            full_attention_interval=2,
            partial_rotary_factor=0.25,
            shared_expert_intermediate_size=32,
            **LINEAR_ATTENTION,
        ),
    ),
    ModelType(
        name="qwen3_vl",
        config={"model_type": "qwen3_vl", "text_config": qwen3()},
    ),
    ModelType(
        name="qwen3_vl_moe",
        config={"model_type": "qwen3_vl_moe", "text_config": qwen3_moe()},
    ),
    ModelType(
        name="recurrent_gemma",
        config=llama(
            model_type="recurrent_gemma",
            num_hidden_layers=3,
            num_key_value_heads=1,
            attention_bias=False,
            conv1d_width=4,
            logits_soft_cap=30.0,
            attention_window_size=WINDOW,
            block_types=["recurrent", "recurrent", "attention"],
        ),
    ),
    ModelType(
        name="rwkv7",
        config={
            "model_type": "rwkv7",
            "vocab_size": VOCABULARY_SIZE,
            "hidden_size": 64,
            "intermediate_size": 128,
            "norm_eps": 1e-5,
            "head_dim": 16,
            "num_hidden_layers": 2,
            "a_low_rank_dim": 8,
            "v_low_rank_dim": 8,
            "gate_low_rank_dim": 8,
            "decay_low_rank_dim": 8,
            "max_position_embeddings": CONTEXT_LENGTH,
        },
    ),
    ModelType(name="seed_oss", config=llama(model_type="seed_oss", head_dim=16)),
    ModelType(
        name="smollm3",
        config=llama(model_type="smollm3", num_hidden_layers=4, no_rope_layer_interval=2),
    ),
    ModelType(
        name="solar_open",
        config=llama(
            model_type="solar_open",
            head_dim=16,
            moe_intermediate_size=32,
            n_shared_experts=1,
            n_routed_experts=4,
            num_experts_per_tok=2,
            routed_scaling_factor=1.0,
            first_k_dense_replace=1,
            norm_topk_prob=True,
            partial_rotary_factor=1.0,
        ),
    ),
    ModelType(
        name="spark2_5",
        config=windowed(
            model_type="spark2_5",
            rope_parameters={
                FULL: default_rope(100000.0) | {"partial_rotary_factor": 0.5},
                SLIDING: default_rope(),
            },
        ),
    ),
    ModelType(
        name="stablelm",
        config=llama(
            model_type="stablelm",
            use_qkv_bias=True,
            partial_rotary_factor=0.5,
            layer_norm_eps=1e-5,
        ),
    ),
    ModelType(
        name="stablelm_parallel",
        config=llama(
            model_type="stablelm",
            use_qkv_bias=False,
            partial_rotary_factor=0.5,
            layer_norm_eps=1e-5,
            use_parallel_residual=True,
            qk_layernorm=True,
        ),
    ),
    ModelType(name="starcoder2", config=llama(model_type="starcoder2", norm_epsilon=1e-5)),
    ModelType(
        name="step3p5",
        config=windowed(
            model_type="step3p5",
            num_attention_groups=2,
            partial_rotary_factors=[1.0, 1.0, 0.5, 1.0],
            attention_other_setting={"num_attention_heads": 8, "num_attention_groups": 2},
            moe_num_experts=4,
            moe_top_k=2,
            moe_intermediate_size=32,
            share_expert_dim=32,
            moe_layers_enum="1,2,3",
            swiglu_limits=[0.0, 7.0, 7.0, 7.0],
        ),
    ),
    ModelType(name="talkie", config=llama(model_type="talkie", head_dim=16)),
    ModelType(name="telechat3", config=llama(model_type="telechat3")),
    ModelType(name="youtu_llm", config=latent(model_type="youtu_llm")),
]
