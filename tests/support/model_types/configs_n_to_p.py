"""Configurations of the model types whose file in mlx-lm begins with n to p."""

from __future__ import annotations

from typing import Any

from .llama_configs import (
    CONTEXT_LENGTH,
    FULL,
    LINEAR,
    LINEAR_ATTENTION,
    VOCABULARY_SIZE,
    WINDOW,
    YARN,
    llama,
    qwen3_5,
    windowed,
)
from .model_type import ModelType


def _phi3(**changes: Any) -> dict[str, Any]:
    return llama(model_type="phi3", original_max_position_embeddings=64) | changes


_LONG_ROPE = {
    "type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + 0.5 * place for place in range(8)],
    "short_mscale": 1.0,
    "long_mscale": 1.1,
}


def _nas_block(*, no_attention: bool = False, linear: bool = False) -> dict[str, Any]:
    attention: dict[str, bool | int] = {"no_op": no_attention, "replace_with_linear": linear}
    if not no_attention and not linear:
        attention["n_heads_in_group"] = 2
    return {"attention": attention, "ffn": {"ffn_mult": 1.0}}


def _prism(**changes: Any) -> dict[str, Any]:
    """One linear layer is packed; its input is as wide as its rotation's block."""
    config = qwen3_5(
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


MODEL_TYPES_N_TO_P: list[ModelType] = [
    ModelType(name="nanbeige", config=llama(model_type="nanbeige", num_loops=2)),
    ModelType(name="nanochat", config=llama(model_type="nanochat")),
    ModelType(
        name="nemotron",
        config=llama(model_type="nemotron", hidden_act="relu2", norm_eps=1e-5),
    ),
    ModelType(
        name="nemotron-nas",
        config=llama(
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
        config=llama(
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
    ModelType(name="olmo2", config=llama(model_type="olmo2")),
    ModelType(name="olmo3", config=windowed(model_type="olmo3")),
    ModelType(
        name="olmo3_yarn",
        config=windowed(model_type="olmo3", rope_scaling=YARN),
    ),
    ModelType(
        name="olmo_hybrid",
        config=llama(
            model_type="olmo_hybrid",
            num_hidden_layers=4,
            attention_bias=False,
            linear_allow_neg_eigval=True,
            layer_types=[LINEAR, LINEAR, FULL, LINEAR],
            **(LINEAR_ATTENTION | {"linear_num_key_heads": 4}),
        ),
    ),
    ModelType(
        name="olmoe",
        config=llama(model_type="olmoe", num_experts=4, num_experts_per_tok=2),
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
    ModelType(name="phi", config=llama(model_type="phi", layer_norm_eps=1e-5)),
    ModelType(name="phi3", config=_phi3()),
    ModelType(name="phi3_longrope", config=_phi3(rope_scaling=_LONG_ROPE)),
    ModelType(
        name="phi3small",
        # The model forbids tokens by fixed ids, the last of which is 100351.
        config=llama(
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
        config=llama(
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
        config={"model_type": "pixtral", "text_config": llama(model_type="mistral")},
    ),
    ModelType(name="plamo", config=llama(model_type="plamo", n_shared_head=2)),
    ModelType(
        name="plamo2",
        config=llama(
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
        config=llama(
            model_type="plamo3",
            num_hidden_layers=4,
            head_dim=16,
            window_size=WINDOW,
            sliding_window_pattern=4,
        ),
    ),
    ModelType(
        name="plamo3_full",
        config=llama(model_type="plamo3", head_dim=16, sliding_window_pattern=1),
    ),
    ModelType(name="prism_hadamard_qwen35", config=_prism()),
]
