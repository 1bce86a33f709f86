"""Configurations of tiny models: the types whose file in mlx_lm/models begins with l to z.

Each is the least that has every kind of layer of its type: both kinds of attention, a window that a
prompt of forty tokens outgrows, experts of which some are left out, states that are carried on.
"""

from __future__ import annotations

from typing import Any

from .model_type import ModelType

VOCABULARY_SIZE = 2048
WINDOW = 16
"""Tokens that a layer with a sliding window sees."""
CONTEXT_LENGTH = 4096

FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"


def _llama(**changes: Any) -> dict[str, Any]:
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


def _windowed(**changes: Any) -> dict[str, Any]:
    """Two layers with a window, one without, one with."""
    return (
        _llama(
            num_hidden_layers=4,
            head_dim=16,
            sliding_window=WINDOW,
            layer_types=[SLIDING, SLIDING, FULL, SLIDING],
        )
        | changes
    )


def _latent(**changes: Any) -> dict[str, Any]:
    """Attention over compressed keys and values."""
    return (
        _llama(
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


def _default_rope(base: float = 10000.0) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": base}


def _qwen3(**changes: Any) -> dict[str, Any]:
    return _llama(model_type="qwen3", head_dim=16) | changes


def _qwen3_moe(**changes: Any) -> dict[str, Any]:
    return (
        _qwen3(
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


_LINEAR_ATTENTION = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}


def _qwen3_5(**changes: Any) -> dict[str, Any]:
    return (
        _qwen3(
            model_type="qwen3_5",
            num_hidden_layers=4,
            full_attention_interval=2,
            rope_parameters={
                "type": "default",
                "mrope_section": [1, 1, 0],
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
            },
            **_LINEAR_ATTENTION,
        )
        | changes
    )


def _qwen3_5_moe(**changes: Any) -> dict[str, Any]:
    return (
        _qwen3_5(
            model_type="qwen3_5_moe",
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        )
        | changes
    )


def _lfm2(**changes: Any) -> dict[str, Any]:
    return (
        _llama(
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
        _latent(
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


def _phi3(**changes: Any) -> dict[str, Any]:
    return _llama(model_type="phi3", original_max_position_embeddings=64) | changes


_LONG_ROPE = {
    "type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + 0.5 * place for place in range(8)],
    "short_mscale": 1.0,
    "long_mscale": 1.1,
}

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def _nas_block(*, no_attention: bool = False, linear: bool = False) -> dict[str, Any]:
    attention = {"no_op": no_attention, "replace_with_linear": linear}
    if not no_attention and not linear:
        attention["n_heads_in_group"] = 2
    return {"attention": attention, "ffn": {"ffn_mult": 1.0}}


def _prism(**changes: Any) -> dict[str, Any]:
    """One linear layer is packed; its input is as wide as its rotation's block."""
    config = _qwen3_5(
        model_type="prism_hadamard_qwen35",
        hidden_size=128,
        intermediate_size=512,
        head_dim=32,
    )
    return {
        "model_type": "prism_hadamard_qwen35",
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "gdn_activation_layout": "grouped",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {
                "path": "model.layers.1.mlp.down_proj",
                "embedding": False,
                "dtype": "float16",
                "block": 512,
            }
        ],
        "vocab_size": VOCABULARY_SIZE,
        "max_position_embeddings": CONTEXT_LENGTH,
        "text_config": config,
    } | changes


MODEL_TYPES_L_TO_Z: list[ModelType] = [
    ModelType(
        name="laguna",
        config=_windowed(
            model_type="laguna",
            gating=True,
            rope_parameters={
                FULL: _YARN | {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
                SLIDING: _default_rope(),
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
    ModelType(name="llama", config=_llama()),
    ModelType(
        name="llama_llama3_rope",
        config=_llama(
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
    ModelType(name="llama_sliding", config=_windowed(model_type="mistral")),
    ModelType(
        name="llama4",
        config={
            "model_type": "llama4",
            "text_config": _llama(
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
        config=_llama(
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
        config=_windowed(
            model_type="mellum",
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            norm_topk_prob=True,
            rope_parameters={FULL: _YARN | {"rope_theta": 10000.0}, SLIDING: _default_rope()},
        ),
    ),
    ModelType(name="mimo", config=_llama(model_type="mimo")),
    ModelType(
        name="mimo_v2_flash",
        config=_llama(
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
        config=_llama(model_type="minicpm", dim_model_base=32, scale_depth=1.4, scale_emb=12.0),
    ),
    ModelType(
        name="minicpm3",
        config=_latent(
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
        config=_llama(
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
            "text_config": _llama(
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
        config=_windowed(
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
        config={"model_type": "mistral3", "text_config": _llama(model_type="mistral")},
    ),
    ModelType(
        name="mistral4",
        config=_latent(
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
            rope_parameters=_YARN
            | {"rope_theta": 10000.0, "llama_4_scaling_beta": 0.1, "mscale_all_dim": 1.0},
        ),
    ),
    ModelType(
        name="mixtral",
        config=_llama(model_type="mixtral", num_experts_per_tok=2, num_local_experts=4),
    ),
    ModelType(
        name="muse_glimmer",
        config=_windowed(model_type="muse_glimmer", post_norm_eps=1e-8),
    ),
    ModelType(
        name="muse_spark",
        config={
            "model_type": "muse_spark",
            "audio_config": {"out_hidden_size": 64},
            "text_config": _windowed(
                post_norm_eps=1e-8,
                rope_parameters=_default_rope(),
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
    ModelType(name="nanbeige", config=_llama(model_type="nanbeige", num_loops=2)),
    ModelType(name="nanochat", config=_llama(model_type="nanochat")),
    ModelType(
        name="nemotron",
        config=_llama(model_type="nemotron", hidden_act="relu2", norm_eps=1e-5),
    ),
    ModelType(
        name="nemotron-nas",
        config=_llama(
            model_type="nemotron-nas",
            num_hidden_layers=4,
            block_configs=[
                _nas_block(),
                _nas_block(no_attention=True),
                _nas_block(linear=True),
                _nas_block(),
            ],
        ),
    ),
    ModelType(
        name="nemotron_h",
        config=_llama(
            model_type="nemotron_h",
            hybrid_override_pattern=["M", "*", "-", "M", "E"],
            attention_bias=False,
            mamba_num_heads=8,
            mamba_head_dim=16,
            mamba_proj_bias=False,
            ssm_state_size=16,
            conv_kernel=4,
            n_groups=2,
            mlp_bias=False,
            layer_norm_epsilon=1e-5,
            use_bias=False,
            use_conv_bias=True,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=32,
            n_group=1,
            n_routed_experts=4,
            n_shared_experts=1,
            topk_group=1,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            routed_scaling_factor=1.0,
        ),
    ),
    ModelType(name="olmo2", config=_llama(model_type="olmo2")),
    ModelType(name="olmo3", config=_windowed(model_type="olmo3")),
    ModelType(
        name="olmo3_yarn",
        config=_windowed(model_type="olmo3", rope_scaling=_YARN),
    ),
    ModelType(
        name="olmo_hybrid",
        config=_llama(
            model_type="olmo_hybrid",
            num_hidden_layers=4,
            attention_bias=False,
            linear_allow_neg_eigval=True,
            layer_types=[LINEAR, LINEAR, FULL, LINEAR],
            **(_LINEAR_ATTENTION | {"linear_num_key_heads": 4}),
        ),
    ),
    ModelType(
        name="olmoe",
        config=_llama(model_type="olmoe", num_experts=4, num_experts_per_tok=2),
    ),
    ModelType(
        name="openelm",
        config={
            "model_type": "openelm",
            "head_dim": 16,
            "num_transformer_layers": 2,
            "model_dim": 64,
            "vocab_size": VOCABULARY_SIZE,
            "ffn_dim_divisor": 16,
            "num_query_heads": [4, 4],
            "num_kv_heads": [2, 2],
            "ffn_multipliers": [1.0, 2.0],
            "ffn_with_glu": True,
            "normalize_qk_projections": True,
            "share_input_output_layers": True,
            "max_position_embeddings": CONTEXT_LENGTH,
        },
    ),
    ModelType(name="phi", config=_llama(model_type="phi", layer_norm_eps=1e-5)),
    ModelType(name="phi3", config=_phi3()),
    ModelType(name="phi3_longrope", config=_phi3(rope_scaling=_LONG_ROPE)),
    ModelType(
        name="phi3small",
        # The model forbids tokens by fixed ids, the last of which is 100351.
        config=_llama(
            model_type="phi3small",
            vocab_size=100352,
            hidden_size=32,
            dense_attention_every_n_layers=2,
            ff_intermediate_size=64,
            gegelu_limit=20.0,
            layer_norm_epsilon=1e-5,
            blocksparse_block_size=32,
            blocksparse_num_local_blocks=1,
            blocksparse_vert_stride=2,
        ),
    ),
    ModelType(
        name="phimoe",
        config=_llama(
            model_type="phimoe",
            original_max_position_embeddings=64,
            rope_scaling=_LONG_ROPE,
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
    ),
    ModelType(
        name="phixtral",
        config={
            "model_type": "phixtral",
            "num_vocab": VOCABULARY_SIZE,
            "vocab_size": VOCABULARY_SIZE,
            "model_dim": 64,
            "num_heads": 4,
            "num_layers": 2,
            "rotary_dim": 8,
            "num_experts_per_tok": 2,
            "num_local_experts": 4,
            "max_position_embeddings": CONTEXT_LENGTH,
        },
    ),
    ModelType(
        name="pixtral",
        config={"model_type": "pixtral", "text_config": _llama(model_type="mistral")},
    ),
    ModelType(name="plamo", config=_llama(model_type="plamo", n_shared_head=2)),
    ModelType(
        name="plamo2",
        config=_llama(
            model_type="plamo2",
            num_hidden_layers=4,
            hidden_size_per_head=16,
            attention_window_size=WINDOW,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_num_heads=4,
            mamba_step=2,
            mamba_chunk_size=16,
        ),
    ),
    ModelType(
        name="plamo3",
        config=_llama(
            model_type="plamo3",
            num_hidden_layers=4,
            head_dim=16,
            window_size=WINDOW,
            sliding_window_pattern=4,
        ),
    ),
    ModelType(
        name="plamo3_full",
        config=_llama(model_type="plamo3", head_dim=16, sliding_window_pattern=1),
    ),
    ModelType(name="prism_hadamard_qwen35", config=_prism()),
    ModelType(
        name="qwen",
        config=_llama(model_type="qwen", kv_channels=16, layer_norm_epsilon=1e-6, no_bias=True),
    ),
    ModelType(name="qwen2", config=_llama(model_type="qwen2")),
    ModelType(
        name="qwen2_dynamic_rope",
        config=_llama(
            model_type="qwen2",
            rope_scaling={"rope_type": "dynamic", "factor": 2.0},
        ),
    ),
    ModelType(
        name="qwen2_moe",
        config=_llama(
            model_type="qwen2_moe",
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        ),
    ),
    ModelType(
        name="qwen2_vl",
        config={"model_type": "qwen2_vl", "text_config": _llama(model_type="qwen2")},
    ),
    ModelType(name="qwen3", config=_qwen3()),
    ModelType(name="qwen3_yarn", config=_qwen3(rope_scaling=_YARN)),
    ModelType(
        name="qwen3_5",
        config={"model_type": "qwen3_5", "text_config": _qwen3_5()},
    ),
    ModelType(
        name="qwen3_5_moe",
        config={"model_type": "qwen3_5_moe", "text_config": _qwen3_5_moe()},
    ),
    ModelType(name="qwen3_moe", config=_qwen3_moe()),
    ModelType(
        name="qwen3_next",
        config=_qwen3_moe(
            model_type="qwen3_next",
            num_hidden_layers=4,
            full_attention_interval=2,
            partial_rotary_factor=0.25,
            shared_expert_intermediate_size=32,
            **_LINEAR_ATTENTION,
        ),
    ),
    ModelType(
        name="qwen3_vl",
        config={"model_type": "qwen3_vl", "text_config": _qwen3()},
    ),
    ModelType(
        name="qwen3_vl_moe",
        config={"model_type": "qwen3_vl_moe", "text_config": _qwen3_moe()},
    ),
    ModelType(
        name="recurrent_gemma",
        config=_llama(
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
    ModelType(name="seed_oss", config=_llama(model_type="seed_oss", head_dim=16)),
    ModelType(
        name="smollm3",
        config=_llama(model_type="smollm3", num_hidden_layers=4, no_rope_layer_interval=2),
    ),
    ModelType(
        name="solar_open",
        config=_llama(
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
        config=_windowed(
            model_type="spark2_5",
            rope_parameters={
                FULL: _default_rope(100000.0) | {"partial_rotary_factor": 0.5},
                SLIDING: _default_rope(),
            },
        ),
    ),
    ModelType(
        name="stablelm",
        config=_llama(
            model_type="stablelm",
            use_qkv_bias=True,
            partial_rotary_factor=0.5,
            layer_norm_eps=1e-5,
        ),
    ),
    ModelType(
        name="stablelm_parallel",
        config=_llama(
            model_type="stablelm",
            use_qkv_bias=False,
            partial_rotary_factor=0.5,
            layer_norm_eps=1e-5,
            use_parallel_residual=True,
            qk_layernorm=True,
        ),
    ),
    ModelType(name="starcoder2", config=_llama(model_type="starcoder2", norm_epsilon=1e-5)),
    ModelType(
        name="step3p5",
        config=_windowed(
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
    ModelType(name="talkie", config=_llama(model_type="talkie", head_dim=16)),
    ModelType(name="telechat3", config=_llama(model_type="telechat3")),
    ModelType(name="youtu_llm", config=_latent(model_type="youtu_llm")),
]
