"""Configurations of the model types whose file in mlx-lm begins with l or m."""

from __future__ import annotations

from typing import Any

from .llama_configs import (
    CONTEXT_LENGTH,
    FULL,
    SLIDING,
    VOCABULARY_SIZE,
    WINDOW,
    YARN,
    default_rope,
    latent,
    llama,
    windowed,
)
from .model_type import ModelType


def _lfm2(**changes: Any) -> dict[str, Any]:
    return (
        llama(
            model_type="lfm2",
            num_hidden_layers=4,
            norm_eps=1e-5,
            conv_bias=False,
            conv_L_cache=3,
            block_dim=64,
            block_ff_dim=128,
            block_multiple_of=16,
            block_ffn_dim_multiplier=1.0,
            block_auto_adjust_ff_dim=False,
            layer_types=["conv", "conv", FULL, "conv"],
        )
        | changes
    )


def _longcat(**changes: Any) -> dict[str, Any]:
    return (
        latent(
            model_type="longcat_flash",
            attention_method="MLA",
            zero_expert_type="identity",
            zero_expert_num=2,
            n_routed_experts=4,
            moe_topk=2,
            ffn_hidden_size=128,
            expert_ffn_hidden_size=32,
            num_layers=2,
            routed_scaling_factor=1.0,
            mla_scale_q_lora=True,
            mla_scale_kv_lora=True,
        )
        | changes
    )


def _mamba(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "mamba",
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "state_size": 16,
        "num_hidden_layers": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
        "tie_word_embeddings": False,
    } | changes


MODEL_TYPES_L_TO_M: list[ModelType] = [
    ModelType(
        name="laguna",
        config=windowed(
            model_type="laguna",
            gating=True,
            rope_parameters={
                FULL: YARN | {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
                SLIDING: default_rope(),
            },
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        ),
    ),
    ModelType(name="lfm2", config=_lfm2()),
    ModelType(
        name="lfm2-vl",
        config={"model_type": "lfm2-vl", "text_config": _lfm2()},
    ),
    ModelType(
        name="lfm2_moe",
        config=_lfm2(
            model_type="lfm2_moe",
            moe_intermediate_size=32,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            use_expert_bias=True,
            num_dense_layers=1,
        ),
    ),
    ModelType(
        name="lille-130m",
        config={
            "model_type": "lille-130m",
            "block_size": CONTEXT_LENGTH,
            "layer_norm_eps": 1e-5,
            "n_embd": 64,
            "n_head": 4,
            "n_kv_heads": 2,
            "n_layer": 2,
            "rope_theta": 10000.0,
            "vocab_size": VOCABULARY_SIZE,
        },
    ),
    ModelType(name="llama", config=llama()),
    ModelType(
        name="llama_llama3_rope",
        config=llama(
            rope_scaling={
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
        ),
    ),
    ModelType(name="llama_sliding", config=windowed(model_type="mistral")),
    ModelType(
        name="llama4",
        config={
            "model_type": "llama4",
            "text_config": llama(
                model_type="llama4_text",
                num_hidden_layers=4,
                head_dim=16,
                attention_bias=False,
                attention_chunk_size=32,
                interleave_moe_layer_step=2,
                intermediate_size_mlp=128,
                num_experts_per_tok=1,
                num_local_experts=4,
                rope_scaling=None,
                use_qk_norm=True,
            ),
        },
    ),
    ModelType(
        name="llama4_text",
        config=llama(
            model_type="llama4_text",
            num_hidden_layers=4,
            head_dim=16,
            intermediate_size_mlp=128,
            no_rope_layers=[1, 1, 1, 0],
            use_qk_norm=True,
        ),
    ),
    ModelType(name="longcat_flash", config=_longcat()),
    ModelType(
        name="longcat_flash_ngram",
        config=_longcat(
            model_type="longcat_flash_ngram",
            ngram_vocab_size_ratio=2,
            emb_neighbor_num=3,
            emb_split_num=2,
        ),
    ),
    ModelType(name="mamba", config=_mamba()),
    ModelType(name="falcon_mamba", config=_mamba(model_type="falcon_mamba")),
    ModelType(
        name="mamba2",
        config={
            "model_type": "mamba2",
            "num_heads": 8,
            "head_dim": 16,
            "vocab_size": VOCABULARY_SIZE,
            "hidden_size": 64,
            "intermediate_size": 128,
            "state_size": 16,
            "num_hidden_layers": 2,
            "layer_norm_epsilon": 1e-5,
            "conv_kernel": 4,
            "n_groups": 2,
            "use_bias": False,
            "use_conv_bias": True,
            "tie_word_embeddings": False,
            "time_step_limit": [0.001, 10.0],
            "time_step_rank": "auto",
            "max_position_embeddings": CONTEXT_LENGTH,
        },
    ),
    ModelType(
        name="mellum",
        config=windowed(
            model_type="mellum",
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            norm_topk_prob=True,
            rope_parameters={FULL: YARN | {"rope_theta": 10000.0}, SLIDING: default_rope()},
        ),
    ),
    ModelType(name="mimo", config=llama(model_type="mimo")),
    ModelType(
        name="mimo_v2_flash",
        config=llama(
            model_type="mimo_v2_flash",
            num_hidden_layers=4,
            hybrid_layer_pattern=[1, 1, 0, 1],
            moe_layer_freq=[0, 1, 1, 1],
            add_swa_attention_sink_bias=True,
            add_full_attention_sink_bias=False,
            sliding_window_size=WINDOW,
            moe_intermediate_size=32,
            n_shared_experts=None,
            n_routed_experts=4,
            num_experts_per_tok=2,
            routed_scaling_factor=None,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            norm_topk_prob=True,
            n_group=1,
            topk_group=1,
            layernorm_epsilon=1e-5,
            swa_rope_theta=10000.0,
            swa_num_attention_heads=4,
            swa_num_key_value_heads=2,
            head_dim=16,
            v_head_dim=16,
            swa_head_dim=16,
            swa_v_head_dim=16,
            partial_rotary_factor=0.5,
        ),
    ),
    ModelType(
        name="minicpm",
        config=llama(model_type="minicpm", dim_model_base=32, scale_depth=1.4, scale_emb=12.0),
    ),
    ModelType(
        name="minicpm3",
        config=latent(
            model_type="minicpm3",
            dim_model_base=32,
            scale_depth=1.4,
            scale_emb=12.0,
            rope_scaling={
                "type": "longrope",
                "original_max_position_embeddings": 1024,
                "short_factor": [1.0] * 4,
                "long_factor": [1.0, 1.5, 2.0, 2.5],
            },
        ),
    ),
    ModelType(
        name="minimax",
        config=llama(
            model_type="minimax",
            head_dim=16,
            rotary_dim=8,
            num_experts_per_tok=2,
            num_local_experts=4,
            shared_intermediate_size=0,
        ),
    ),
    ModelType(
        name="minimax_m3_vl",
        config={
            "model_type": "minimax_m3_vl",
            "text_config": llama(
                num_hidden_layers=3,
                intermediate_size=32,
                dense_intermediate_size=128,
                shared_intermediate_size=32,
                head_dim=16,
                num_local_experts=4,
                num_experts_per_tok=2,
                moe_layer_freq=[0, 1, 1],
                layer_types=[FULL, "minimax_m3_sparse", "minimax_m3_sparse"],
                index_n_heads=2,
                index_head_dim=16,
                index_block_size=4,
                index_topk_blocks=2,
            ),
        },
    ),
    ModelType(
        name="ministral3",
        config=windowed(
            model_type="ministral3",
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 16,
            },
        ),
    ),
    ModelType(
        name="mistral3",
        config={"model_type": "mistral3", "text_config": llama(model_type="mistral")},
    ),
    ModelType(
        name="mistral4",
        config=latent(
            model_type="mistral4",
            moe_intermediate_size=32,
            n_shared_experts=1,
            n_routed_experts=4,
            num_experts_per_tok=2,
            routed_scaling_factor=1.0,
            norm_topk_prob=True,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            rope_interleave=True,
            rope_parameters=YARN
            | {"rope_theta": 10000.0, "llama_4_scaling_beta": 0.1, "mscale_all_dim": 1.0},
        ),
    ),
    ModelType(
        name="mixtral",
        config=llama(model_type="mixtral", num_experts_per_tok=2, num_local_experts=4),
    ),
    ModelType(
        name="muse_glimmer",
        config=windowed(model_type="muse_glimmer", post_norm_eps=1e-8),
    ),
    ModelType(
        name="muse_spark",
        config={
            "model_type": "muse_spark",
            "audio_config": {"out_hidden_size": 64},
            "text_config": windowed(
                post_norm_eps=1e-8,
                rope_parameters=default_rope(),
                layer_rope_theta=[10000.0, 10000.0, 0, 10000.0],
                final_logit_softcapping=20.0,
                output_multiplier=0.2,
                num_local_experts=4,
                num_experts_per_tok=2,
                moe_hidden_size=32,
                moe_intermediate_size=32,
            ),
        },
    ),
]
