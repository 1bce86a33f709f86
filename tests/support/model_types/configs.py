"""Configurations of tiny models: one for each model type of mlx-lm, or several.

Each is as small as its architecture allows while every kind of layer is there: dense before sparse
feed-forward layers, full beside windowed attention, windows that a prompt of forty tokens outgrows,
experts of which some are left out.
"""

from __future__ import annotations

from typing import Any

from support.models.tiny_model import CONTEXT_LENGTH, VOCABULARY_SIZE

Config = dict[str, Any]

WINDOW = 16
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"

# fmt: off
LLAMA: Config = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": VOCABULARY_SIZE,
    "max_position_embeddings": CONTEXT_LENGTH, "rope_theta": 10000.0, "tie_word_embeddings": False,
}
DENSE = LLAMA | {"intermediate_size": 96, "attention_bias": False, "mlp_bias": False}
GPT: Config = {
    "vocab_size": VOCABULARY_SIZE, "n_positions": CONTEXT_LENGTH, "n_embd": 64, "n_head": 4,
    "n_layer": 2,
}
MAMBA: Config = {
    "vocab_size": VOCABULARY_SIZE, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "state_size": 16, "conv_kernel": 4, "use_bias": False,
    "use_conv_bias": True, "tie_word_embeddings": False,
}

# ---------------------------------------------------------------- layers that types share
FOUR_LAYERS: Config = {"num_hidden_layers": 4, "head_dim": 16}
WINDOWED: Config = FOUR_LAYERS | {
    "sliding_window": WINDOW, "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
}
MIXED: Config = {
    "num_hidden_layers": 6, "head_dim": 16, "num_kv_shared_layers": 2, "sliding_window": WINDOW,
    "layer_types": [SLIDING, FULL] * 3, "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCABULARY_SIZE,
}
LATENT: Config = {
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "num_key_value_heads": 4,
}
WIDE_LATENT = LATENT | {"q_lora_rank": 32, "qk_nope_head_dim": 16, "attention_bias": False}
INDEXER: Config = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 24}
DELTA: Config = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
}
EXPERTS: Config = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED: Config = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL: Config = {"num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK: Config = ROUTED | {
    "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc",
}
BAILING: Config = EXPERTS | {
    "num_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, "n_group": 2,
    "topk_group": 1,
}
KDA: Config = {
    "linear_attn_config": {
        "kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 4, "head_dim": 16,
        "short_conv_kernel_size": 4,
    },
    "num_experts": 4, "num_experts_per_token": 2, "num_shared_experts": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}
GRANITE: Config = {
    "logits_scaling": 1.0, "attention_multiplier": 0.25, "embedding_multiplier": 1.5,
    "residual_multiplier": 0.8,
}
LFM2: Config = {
    "num_hidden_layers": 4, "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3,
    "block_dim": 64, "block_ff_dim": 128, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "conv", FULL, "conv"],
}
LONGCAT: Config = {
    "attention_method": "MLA", "zero_expert_type": "identity", "zero_expert_num": 2,
    "n_routed_experts": 4, "moe_topk": 2, "ffn_hidden_size": 128, "expert_ffn_hidden_size": 32,
    "num_layers": 2, "routed_scaling_factor": 1.0, "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
MINICPM: Config = {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 12.0}
QWEN3_5: Config = FOUR_LAYERS | DELTA | {
    "full_attention_interval": 2,
    "rope_parameters": {
        "type": "default", "mrope_section": [1, 1, 0], "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}

# ---------------------------------------------------------------- positions
ROPE: Config = {"rope_type": "default", "rope_theta": 10000.0}
YARN: Config = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
HUNYUAN_ROPE: Config = {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}
LONG_ROPE: Config = {
    "type": "longrope", "short_factor": [1.0] * 8, "short_mscale": 1.0, "long_mscale": 1.1,
    "long_factor": [1.0 + 0.5 * place for place in range(8)],
}


def plain(*parts: Config, **settings: Any) -> Config:
    config: Config = {}
    for part in (*parts, settings):
        config |= part
    return config


def llama(*parts: Config, **settings: Any) -> Config:
    return plain(LLAMA, *parts, **settings)


def dense(*parts: Config, **settings: Any) -> Config:
    return plain(DENSE, *parts, **settings)


def nas_block(**attention: int) -> Config:
    attention = {"no_op": False, "replace_with_linear": False} | attention
    return {"attention": attention, "ffn": {"ffn_mult": 1.0}}


OWN: dict[str, Config] = {
    "afm7": plain(
        vocab_size=VOCABULARY_SIZE, max_position_embeddings=CONTEXT_LENGTH, hidden_dim=64,
        num_layers=4, num_kv_reuse_layers=2, num_heads=4, num_kv_heads=2,
        hidden_dim_scale_factor=2.0, rope_theta=10000.0,
    ),
    "afmoe": dense(
        EXPERTS, num_hidden_layers=3, layer_types=[SLIDING, FULL, SLIDING], head_dim=16,
        num_shared_experts=1, num_dense_layers=1, route_scale=1.0, sliding_window=WINDOW,
    ),
    "apertus": dense(post_norm=False, qk_norm=True),
    "baichuan_m1": dense(
        num_hidden_layers=3, sliding_window=WINDOW, sliding_window_layers=[1], conv_window=2,
        num_swa_attention_heads=4, num_swa_key_value_heads=2,
    ),
    "bailing_hybrid": dense(
        BAILING, LATENT, FOUR_LAYERS, layer_group_size=2, group_norm_size=2,
        routed_scaling_factor=1.0, moe_shared_expert_intermediate_size=32,
    ),
    "bailing_moe": dense(BAILING, use_qk_norm=True, score_function="sigmoid"),
    "bailing_moe_linear": dense(
        BAILING, FOUR_LAYERS, num_key_value_heads=4, layer_group_size=2, group_norm_size=2,
        use_qk_norm=True, score_function="sigmoid",
    ),
    "bailing_moe_v3": dense(
        BAILING, LATENT, FOUR_LAYERS, model_type="bailing_hybrid",
        architectures=["BailingMoeV3ForCausalLM"], layer_group_size=2, routed_scaling_factor=1.0,
        moe_shared_expert_intermediate_size=32,
    ),
    "bitnet": dense(tie_word_embeddings=True),
    "cohere": dense(layer_norm_eps=1e-5, logit_scale=1.0, use_qk_norm=True),
    "cohere2": dense(
        FOUR_LAYERS, layer_norm_eps=1e-5, logit_scale=1.0, sliding_window=WINDOW,
        sliding_window_pattern=2,
    ),
    "dbrx": plain(
        vocab_size=VOCABULARY_SIZE, max_seq_len=CONTEXT_LENGTH, d_model=64, n_layers=2, n_heads=4,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    "deepseek": dense(DEEPSEEK),
    "deepseek_v2": dense(
        DEEPSEEK, LATENT, topk_method="greedy",
        rope_scaling={
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    ),
    "deepseek_v3": dense(DEEPSEEK, LATENT),
    "deepseek_v32": dense(DEEPSEEK, LATENT, INDEXER),
    "deepseek_v41": dense(
        DEEPSEEK, num_hidden_layers=3, rms_norm_eps=1e-6, scoring_func="sqrtsoftplus", head_dim=32,
        q_lora_rank=32, qk_rope_head_dim=8, o_groups=2, o_lora_rank=16, sliding_window=WINDOW,
        compress_ratios=[0, 4, 4], kv_source_layer_ids=[1], index_source_layer_ids=[1],
        candidate_source_layer_id=1, candidate_topk_blocks=2, candidate_block_size=4,
        index_n_heads=2, index_head_dim=32, index_topk=8, hc_mult=2, hc_sinkhorn_iters=4,
    ),
    "dots1": dense(DEEPSEEK, head_dim=16),
    "ernie4_5": dense(head_dim=16, use_bias=False),
    "ernie4_5_moe": dense(
        head_dim=16, use_bias=False, moe_num_experts=4, moe_k=2, moe_layer_start_index=1,
        moe_layer_interval=1, moe_intermediate_size=32, moe_num_shared_experts=1,
    ),
    "exaone": dense(num_layers=2, layer_norm_epsilon=1e-5),
    "exaone4": dense(
        WINDOWED, rope_scaling=None, sliding_window_pattern="LG",
        layer_types=[SLIDING, FULL, SLIDING, FULL],
    ),
    "exaone_moe": dense(
        EXPERTS, num_hidden_layers=3, head_dim=16, num_shared_experts=1, sliding_window=WINDOW,
        layer_types=[SLIDING, FULL, SLIDING], is_moe_layer=[False, True, True],
        routed_scaling_factor=1.0,
    ),
    "falcon_h1": dense(
        head_dim=16, attention_out_multiplier=1.0, embedding_multiplier=1.0, key_multiplier=1.0,
        lm_head_multiplier=1.0, mamba_d_conv=4, mamba_d_head=16, mamba_d_ssm=64, mamba_d_state=16,
        mamba_n_groups=1, mamba_n_heads=4, mlp_multipliers=[1.0, 1.0], ssm_in_multiplier=1.0,
        ssm_multipliers=[1.0] * 5, ssm_out_multiplier=1.0,
    ),
    "falcon_mamba": plain(MAMBA, time_step_rank=4),
    "gear": dense(
        WINDOWED, layer_types=["conv_mixer", SLIDING, "conv_mixer", FULL], conv_L_cache=3,
    ),
    "gemma": dense(head_dim=16),
    "gemma2": dense(FOUR_LAYERS, query_pre_attn_scalar=16),
    "gemma3_text": dense(
        FOUR_LAYERS, num_key_value_heads=1, rope_theta=1000000.0, query_pre_attn_scalar=16,
        rope_local_base_freq=10000.0, sliding_window=WINDOW, sliding_window_pattern=2,
    ),
    "gemma3n": plain(
        vocab_size=VOCABULARY_SIZE,
        text_config=dense(
            MIXED, model_type="gemma3n_text", rope_local_base_freq=10000.0,
            final_logit_softcapping=30.0,
            activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0, 0.0, 0.0], altup_num_inputs=2,
            altup_coef_clip=120.0, altup_correct_scale=True, altup_active_idx=0, laurel_rank=8,
        ),
    ),
    "gemma4_text": dense(MIXED, num_key_value_heads=1, global_head_dim=32),
    "glm": dense(head_dim=16),
    "glm4": dense(head_dim=16, partial_rotary_factor=0.5),
    "glm4_moe": dense(
        DEEPSEEK, head_dim=16, rope_scaling=None, use_qk_norm=True, partial_rotary_factor=0.5,
    ),
    "glm4_moe_lite": dense(DEEPSEEK, LATENT),
    "glm_moe_dsa": dense(DEEPSEEK, LATENT, INDEXER, rope_parameters=ROPE),
    "gpt2": plain(GPT, n_ctx=CONTEXT_LENGTH, layer_norm_epsilon=1e-5),
    "gpt_bigcode": plain(GPT, n_inner=96, layer_norm_epsilon=1e-5),
    "gpt_neox": dense(layer_norm_eps=1e-5, rotary_emb_base=10000, rotary_pct=0.5),
    "gpt_oss": dense(
        WINDOWED, LOCAL, intermediate_size=32, layer_types=[SLIDING, FULL, SLIDING, FULL],
    ),
    "gptj": plain(GPT, rotary_dim=8),
    "granite": dense(GRANITE),
    "granitemoe": dense(GRANITE, LOCAL),
    "granitemoehybrid": dense(
        GRANITE, LOCAL, num_hidden_layers=4,
        layer_types=["mamba", "attention", "mamba", "attention"], shared_intermediate_size=32,
        mamba_n_heads=8, mamba_d_head=16, mamba_proj_bias=False, mamba_d_state=16, mamba_d_conv=4,
        mamba_n_groups=1, mamba_conv_bias=True,
    ),
    "helium": dense(head_dim=16),
    "hunyuan": dense(
        num_hidden_layers=4, moe_topk=2, num_experts=4, num_shared_expert=1, use_mixed_mlp_moe=True,
        use_qk_norm=True, use_cla=True, cla_share_factor=2, moe_intermediate_size=32,
        rope_scaling=HUNYUAN_ROPE,
    ),
    "hunyuan_v1_dense": dense(head_dim=16, rope_scaling=HUNYUAN_ROPE),
    "internlm2": dense(bias=False),
    "internlm2_dynamic": dense(
        model_type="internlm2", rope_scaling={"type": "dynamic", "factor": 2.0},
    ),
    "internlm3": dense(),
    "internlm3_dynamic": dense(
        model_type="internlm3", rope_scaling={"rope_type": "dynamic", "factor": 6.0},
    ),
    "iquestloopcoder": dense(head_dim=16, loop_num=2, loop_window_size=WINDOW),
    "jamba": dense(
        num_hidden_layers=4, attn_layer_offset=1, attn_layer_period=2, expert_layer_offset=1,
        expert_layer_period=2, mamba_d_conv=4, mamba_d_state=16, mamba_expand=2, num_experts=4,
        num_experts_per_tok=2,
    ),
    "kimi_k3": plain(
        vocab_size=VOCABULARY_SIZE, max_position_embeddings=CONTEXT_LENGTH,
        text_config=dense(
            LATENT, KDA, num_hidden_layers=4, model_type="kimi_linear", hidden_act="situ",
            activation_situ_beta=1.0, attn_res_block_size=2, mla_use_nope=True,
            mla_use_output_gate=True,
        ),
    ),
    "kimi_linear": dense(
        KDA, FOUR_LAYERS, num_key_value_heads=4, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=16, model_max_length=CONTEXT_LENGTH,
    ),
    "Klear": dense(
        EXPERTS, mlp_only_layers=[0], decoder_sparse_step=1, n_shared_experts=1,
        norm_topk_prob=True,
    ),
    "laguna": llama(
        WINDOWED, EXPERTS, gating=True,
        rope_parameters={
            FULL: YARN | {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}, SLIDING: ROPE,
        },
        shared_expert_intermediate_size=32,
    ),
    "lfm2": llama(LFM2),
    "lfm2_moe": llama(LFM2, EXPERTS, norm_topk_prob=True, use_expert_bias=True, num_dense_layers=1),
    "lille-130m": plain(
        block_size=CONTEXT_LENGTH, layer_norm_eps=1e-5, n_embd=64, n_head=4, n_kv_heads=2,
        n_layer=2, rope_theta=10000.0, vocab_size=VOCABULARY_SIZE,
    ),
    "llama": llama(),
    "llama4": plain(
        text_config=llama(
            FOUR_LAYERS, model_type="llama4_text", attention_bias=False, attention_chunk_size=32,
            interleave_moe_layer_step=2, intermediate_size_mlp=128, num_experts_per_tok=1,
            num_local_experts=4, rope_scaling=None, use_qk_norm=True,
        ),
    ),
    "llama4_text": llama(
        FOUR_LAYERS, intermediate_size_mlp=128, no_rope_layers=[1, 1, 1, 0], use_qk_norm=True,
    ),
    "llama_llama3_rope": llama(
        model_type="llama", tie_word_embeddings=True,
        rope_scaling={
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        attention_bias=True, mlp_bias=True,
    ),
    "llama_sliding": llama(WINDOWED, model_type="mistral"),
    "longcat_flash": llama(LONGCAT, WIDE_LATENT),
    "longcat_flash_ngram": llama(
        LONGCAT, WIDE_LATENT, ngram_vocab_size_ratio=2, emb_neighbor_num=3, emb_split_num=2,
    ),
    "mamba": plain(MAMBA, time_step_rank=4),
    "mamba2": plain(
        MAMBA, num_heads=8, head_dim=16, layer_norm_epsilon=1e-5, n_groups=2,
        time_step_limit=[0.001, 10.0], time_step_rank="auto",
        max_position_embeddings=CONTEXT_LENGTH,
    ),
    "mellum": llama(
        WINDOWED, EXPERTS, norm_topk_prob=True,
        rope_parameters={FULL: YARN | {"rope_theta": 10000.0}, SLIDING: ROPE},
    ),
    "mimo": llama(),
    "mimo_v2_flash": llama(
        ROUTED, FOUR_LAYERS, hybrid_layer_pattern=[1, 1, 0, 1], moe_layer_freq=[0, 1, 1, 1],
        add_swa_attention_sink_bias=True, add_full_attention_sink_bias=False,
        sliding_window_size=WINDOW, n_shared_experts=None, routed_scaling_factor=None,
        topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True, n_group=1,
        topk_group=1, layernorm_epsilon=1e-5, swa_rope_theta=10000.0, swa_num_attention_heads=4,
        swa_num_key_value_heads=2, v_head_dim=16, swa_head_dim=16, swa_v_head_dim=16,
        partial_rotary_factor=0.5,
    ),
    "minicpm": llama(MINICPM),
    "minicpm3": llama(
        WIDE_LATENT, MINICPM,
        rope_scaling={
            "type": "longrope", "original_max_position_embeddings": 1024, "short_factor": [1.0] * 4,
            "long_factor": [1.0, 1.5, 2.0, 2.5],
        },
    ),
    "minimax": llama(LOCAL, head_dim=16, rotary_dim=8, shared_intermediate_size=0),
    "minimax_m3_vl": plain(
        text_config=llama(
            LOCAL, model_type="llama", intermediate_size=32, num_hidden_layers=3,
            dense_intermediate_size=128, shared_intermediate_size=32, head_dim=16,
            moe_layer_freq=[0, 1, 1], layer_types=[FULL, "minimax_m3_sparse", "minimax_m3_sparse"],
            index_n_heads=2, index_head_dim=16, index_block_size=4, index_topk_blocks=2,
        ),
    ),
    "ministral3": llama(
        WINDOWED,
        rope_parameters=ROPE | {
            "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16,
        },
    ),
    "mistral3": plain(text_config=llama(model_type="mistral")),
    "mistral4": llama(
        WIDE_LATENT, ROUTED, n_shared_experts=1, routed_scaling_factor=1.0, norm_topk_prob=True,
        n_group=1, topk_group=1, first_k_dense_replace=1, rope_interleave=True,
        rope_parameters=YARN | {
            "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1, "mscale_all_dim": 1.0,
        },
    ),
    "mixtral": llama(LOCAL),
    "muse_glimmer": llama(WINDOWED, post_norm_eps=1e-8),
    "muse_spark": plain(
        audio_config={"out_hidden_size": 64},
        text_config=llama(
            WINDOWED, LOCAL, model_type="llama", post_norm_eps=1e-8, rope_parameters=ROPE,
            layer_rope_theta=[10000.0, 10000.0, 0, 10000.0], final_logit_softcapping=20.0,
            output_multiplier=0.2, moe_hidden_size=32, moe_intermediate_size=32,
        ),
    ),
    "nanbeige": llama(num_loops=2),
    "nanochat": llama(),
    "nemotron": llama(hidden_act="relu2", norm_eps=1e-5),
    "nemotron-nas": llama(
        num_hidden_layers=4, block_configs=[
            nas_block(n_heads_in_group=2), nas_block(no_op=True),
            nas_block(replace_with_linear=True), nas_block(n_heads_in_group=2),
        ],
    ),
    "nemotron_h": dense(
        ROUTED, intermediate_size=128, hybrid_override_pattern=["M", "*", "-", "M", "E"],
        mamba_num_heads=8, mamba_head_dim=16, mamba_proj_bias=False, ssm_state_size=16,
        conv_kernel=4, n_groups=2, layer_norm_epsilon=1e-5, use_bias=False, use_conv_bias=True,
        moe_shared_expert_intermediate_size=32, n_group=1, n_shared_experts=1, topk_group=1,
        norm_topk_prob=True, routed_scaling_factor=1.0,
    ),
    "olmo2": llama(),
    "olmo3": llama(WINDOWED),
    "olmo3_yarn": llama(WINDOWED, model_type="olmo3", rope_scaling=YARN),
    "olmo_hybrid": llama(
        DELTA, num_hidden_layers=4, attention_bias=False, linear_allow_neg_eigval=True,
        layer_types=[LINEAR, LINEAR, FULL, LINEAR], linear_num_key_heads=4,
    ),
    "olmoe": llama(num_experts=4, num_experts_per_tok=2),
    "openelm": plain(
        head_dim=16, num_transformer_layers=2, model_dim=64, vocab_size=VOCABULARY_SIZE,
        ffn_dim_divisor=16, num_query_heads=[4, 4], num_kv_heads=[2, 2], ffn_multipliers=[1.0, 2.0],
        ffn_with_glu=True, normalize_qk_projections=True, share_input_output_layers=True,
        max_position_embeddings=CONTEXT_LENGTH,
    ),
    "phi": llama(layer_norm_eps=1e-5),
    "phi3": llama(original_max_position_embeddings=64),
    "phi3_longrope": llama(
        model_type="phi3", original_max_position_embeddings=64, rope_scaling=LONG_ROPE,
    ),
    # The model forbids tokens by fixed ids, the last of which is 100351.
    "phi3small": llama(
        hidden_size=32, vocab_size=100352, dense_attention_every_n_layers=2,
        ff_intermediate_size=64, gegelu_limit=20.0, layer_norm_epsilon=1e-5,
        blocksparse_block_size=32, blocksparse_num_local_blocks=1, blocksparse_vert_stride=2,
    ),
    "phimoe": llama(LOCAL, original_max_position_embeddings=64, rope_scaling=LONG_ROPE),
    "phixtral": plain(
        LOCAL, num_vocab=VOCABULARY_SIZE, vocab_size=VOCABULARY_SIZE, model_dim=64, num_heads=4,
        num_layers=2, rotary_dim=8, max_position_embeddings=CONTEXT_LENGTH,
    ),
    "pixtral": plain(text_config=llama(model_type="mistral")),
    "plamo": llama(n_shared_head=2),
    "plamo2": llama(
        num_hidden_layers=4, hidden_size_per_head=16, attention_window_size=WINDOW,
        mamba_d_state=16, mamba_d_conv=4, mamba_num_heads=4, mamba_step=2, mamba_chunk_size=16,
    ),
    "plamo3": llama(FOUR_LAYERS, window_size=WINDOW, sliding_window_pattern=4),
    "plamo3_full": llama(model_type="plamo3", head_dim=16, sliding_window_pattern=1),
    "prism_hadamard_qwen35": plain(
        schema_version=1, tensor_namespace="mlx-lm-text", gdn_activation_layout="grouped",
        quantization={"bits": 2, "group_size": 128, "mode": "affine"},
        modules=[
            {
                "path": "model.layers.1.mlp.down_proj", "embedding": False, "dtype": "float16",
                "block": 512,
            },
        ],
        vocab_size=VOCABULARY_SIZE, max_position_embeddings=CONTEXT_LENGTH,
        text_config=llama(
            QWEN3_5, model_type="prism_hadamard_qwen35", hidden_size=128, intermediate_size=512,
            head_dim=32,
        ),
    ),
    "qwen": llama(kv_channels=16, layer_norm_epsilon=1e-6, no_bias=True),
    "qwen2": llama(),
    "qwen2_dynamic_rope": llama(
        model_type="qwen2", rope_scaling={"rope_type": "dynamic", "factor": 2.0},
    ),
    "qwen2_moe": llama(EXPERTS, shared_expert_intermediate_size=32),
    "qwen3": llama(head_dim=16),
    "qwen3_5": plain(text_config=llama(QWEN3_5, model_type="qwen3_5")),
    "qwen3_5_moe": plain(
        text_config=llama(
            QWEN3_5, EXPERTS, model_type="qwen3_5_moe", shared_expert_intermediate_size=32,
        ),
    ),
    "qwen3_moe": llama(
        EXPERTS, head_dim=16, decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True,
    ),
    "qwen3_next": llama(
        DELTA, EXPERTS, FOUR_LAYERS, decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True,
        full_attention_interval=2, partial_rotary_factor=0.25, shared_expert_intermediate_size=32,
    ),
    "qwen3_yarn": llama(model_type="qwen3", head_dim=16, rope_scaling=YARN),
    "recurrent_gemma": llama(
        num_hidden_layers=3, num_key_value_heads=1, attention_bias=False, conv1d_width=4,
        logits_soft_cap=30.0, attention_window_size=WINDOW,
        block_types=["recurrent", "recurrent", "attention"],
    ),
    "rwkv7": plain(
        vocab_size=VOCABULARY_SIZE, hidden_size=64, intermediate_size=128, norm_eps=1e-5,
        head_dim=16, num_hidden_layers=2, a_low_rank_dim=8, v_low_rank_dim=8, gate_low_rank_dim=8,
        decay_low_rank_dim=8, max_position_embeddings=CONTEXT_LENGTH,
    ),
    "seed_oss": llama(head_dim=16),
    "smollm3": llama(num_hidden_layers=4, no_rope_layer_interval=2),
    "solar_open": llama(
        ROUTED, head_dim=16, n_shared_experts=1, routed_scaling_factor=1.0, first_k_dense_replace=1,
        norm_topk_prob=True, partial_rotary_factor=1.0,
    ),
    "spark2_5": llama(
        WINDOWED,
        rope_parameters={
            FULL: {"rope_type": "default", "rope_theta": 100000.0, "partial_rotary_factor": 0.5},
            SLIDING: ROPE,
        },
    ),
    "stablelm": llama(use_qkv_bias=True, partial_rotary_factor=0.5, layer_norm_eps=1e-5),
    "stablelm_parallel": llama(
        model_type="stablelm", use_qkv_bias=False, partial_rotary_factor=0.5, layer_norm_eps=1e-5,
        use_parallel_residual=True, qk_layernorm=True,
    ),
    "starcoder2": llama(norm_epsilon=1e-5),
    "step3p5": llama(
        WINDOWED, num_attention_groups=2, partial_rotary_factors=[1.0, 1.0, 0.5, 1.0],
        attention_other_setting={"num_attention_heads": 8, "num_attention_groups": 2},
        moe_num_experts=4, moe_top_k=2, moe_intermediate_size=32, share_expert_dim=32,
        moe_layers_enum="1,2,3", swiglu_limits=[0.0, 7.0, 7.0, 7.0],
    ),
    "talkie": llama(head_dim=16),
    "telechat3": llama(),
    "youtu_llm": llama(WIDE_LATENT),
}
"""By name of the row in build/models.md: the model type, unless the configuration has another."""

TEXT_PARTS: dict[str, tuple[str, Config]] = {
    "gemma3": ("gemma3_text", {"vocab_size": VOCABULARY_SIZE}),
    "gemma4": ("gemma4_text", {"vocab_size": VOCABULARY_SIZE}),
    "kimi_k25": ("deepseek_v3", {"vocab_size": VOCABULARY_SIZE}),
    "kimi_vl": ("deepseek_v3", {"vocab_size": VOCABULARY_SIZE}),
    "lfm2-vl": ("lfm2", {}), "qwen2_vl": ("qwen2", {}), "qwen3_vl": ("qwen3", {}),
    "qwen3_vl_moe": ("qwen3_moe", {}),
}
"""Types for images too: the type whose configuration is that of their text part."""
# fmt: on

CONFIGS: dict[str, Config] = {name: {"model_type": name} | own for name, own in OWN.items()}
for name, (inner, settings) in TEXT_PARTS.items():
    CONFIGS[name] = {"model_type": name, "text_config": CONFIGS[inner]} | settings
