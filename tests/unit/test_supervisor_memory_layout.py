"""What layers keep, from configurations and shapes of published models: figures by hand."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.supervisor.memory.folder import Tensor
from mlxsup.supervisor.memory.layout import NO_NAMES, UNKNOWN_STATE, UNKNOWN_TYPE, find_layout
from mlxsup.supervisor.memory.windows import find_window

Shapes = dict[str, tuple[int, ...]]


def tensors(layers: dict[int, Shapes], dtype: str = "BF16") -> list[Tensor]:
    """The arrays of layers, by name within the layer."""
    return [
        Tensor(name=f"model.layers.{layer}.{name}", shape=shape, dtype=dtype, size_bytes=0)
        for layer, shapes in layers.items()
        for name, shape in shapes.items()
    ]


def attention(keys: int, values: int = 0) -> Shapes:
    return {
        "self_attn.q_proj.weight": (4096, 4096),
        "self_attn.k_proj.weight": (keys, 4096),
        "self_attn.v_proj.weight": (values or keys, 4096),
        "mlp.up_proj.weight": (14336, 4096),
    }


def config(model_type: str, layers: int, **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, "num_hidden_layers": layers} | more


def test_llama_3_8b_keeps_128_kib_per_token() -> None:
    found = find_layout(config("llama", 32), tensors({n: attention(1024) for n in range(32)}))
    assert found.layers == (CacheLayers(layers=32, token_bytes=2 * 1024 * 2),)
    assert found.remark == ""


def test_packed_weights_count_by_their_outputs_and_scales() -> None:
    packed = [
        Tensor(name="model.layers.0.self_attn.k_proj.weight", shape=(1024, 512), dtype="U32",
               size_bytes=0),
        Tensor(name="model.layers.0.self_attn.v_proj.weight", shape=(1024, 512), dtype="U32",
               size_bytes=0),
        *(Tensor(name=f"model.layers.0.self_attn.{p}_proj.scales", shape=(1024, 64), dtype="F16",
                 size_bytes=0) for p in "kv"),
    ]  # fmt: skip
    assert find_layout(config("qwen3", 1), packed).layers == (
        CacheLayers(layers=1, token_bytes=2 * 1024 * 2),
    )


def test_gpt_oss_has_windows_in_every_other_layer() -> None:
    layers = tensors({n: attention(512) for n in range(24)})
    found = find_layout(config("gpt_oss", 24, sliding_window=128), layers)
    assert sorted(found.layers, key=lambda one: one.window or 0) == [
        CacheLayers(layers=12, token_bytes=2048),
        CacheLayers(layers=12, token_bytes=2048, window=128),
    ]


def test_deepseek_v3_keeps_what_is_compressed() -> None:
    layer: Shapes = {
        "self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
        "self_attn.kv_b_proj.weight": (32768, 512),
        "self_attn.q_b_proj.weight": (24576, 1536),
    }
    # The last layer predicts several tokens and is not loaded.
    found = find_layout(config("deepseek_v3", 61), tensors(dict.fromkeys(range(62), layer)))
    assert found.layers == (CacheLayers(layers=61, token_bytes=576 * 2),)


def test_deepseek_v2_keeps_the_keys_and_values_of_all_heads() -> None:
    layer: Shapes = {"self_attn.kv_a_proj_with_mqa.weight": (576, 2048)}
    heads = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    found = find_layout(
        config("deepseek_v2", 27, num_attention_heads=16, **heads),
        tensors(dict.fromkeys(range(27), layer)),
    )
    assert found.layers == (CacheLayers(layers=27, token_bytes=16 * 320 * 2),)


def test_a_fused_projection_is_keys_and_values_besides_the_queries() -> None:
    layer: Shapes = {"self_attn.qkv_proj.weight": (3072 + 2 * 1024, 3072)}
    found = find_layout(
        config("phi3", 1, num_attention_heads=24, hidden_size=3072), tensors({0: layer})
    )
    assert found.layers == (CacheLayers(layers=1, token_bytes=2 * 1024 * 2),)


def test_qwen3_next_keeps_a_state_in_three_of_four_layers() -> None:
    linear: Shapes = {
        "linear_attn.conv1d.weight": (8192, 4, 1),
        "linear_attn.A_log": (32,),
        "linear_attn.in_proj_qkvz.weight": (12288, 2048),
    }
    layers = {n: attention(512) if n % 4 == 3 else linear for n in range(48)}
    heads = {"linear_value_head_dim": 128, "linear_key_head_dim": 128, "head_dim": 256}
    found = find_layout(config("qwen3_next", 48, **heads), tensors(layers))
    assert sorted(found.layers, key=lambda one: one.row_bytes) == [
        CacheLayers(layers=12, token_bytes=2 * 512 * 2),
        CacheLayers(layers=36, row_bytes=8192 * 3 * 2 + 32 * 128 * 128 * 4),
    ]
    assert found.remark == ""


def test_a_state_of_unknown_size_is_named() -> None:
    layer: Shapes = {"mixer.A_log": (32,), "mixer.conv1d.weight": (64, 1, 4)}
    found = find_layout(config("mamba2", 1), tensors({0: layer}))
    assert found.layers == (CacheLayers(layers=1, row_bytes=64 * 3 * 2),)
    assert found.remark == UNKNOWN_STATE


def test_an_unknown_type_counts_as_if_all_layers_kept_everything() -> None:
    layers = tensors({n: attention(512) for n in range(4)})
    found = find_layout(config("novel", 4, sliding_window=64), layers)
    assert found.layers == (CacheLayers(layers=4, token_bytes=2048),)
    assert found.remark == UNKNOWN_TYPE.format("novel")


def test_without_known_names_the_heads_of_config_json_count() -> None:
    layers = tensors({n: {"attn.everything.weight": (9, 9)} for n in range(4)})
    found = find_layout(config("llama", 4, num_key_value_heads=8, head_dim=128), layers)
    assert found.layers == (CacheLayers(layers=4, token_bytes=2 * 8 * 128 * 2),)
    assert found.remark == NO_NAMES


@pytest.mark.parametrize(
    ("settings", "windows"),
    [
        ({"model_type": "gemma3_text", "sliding_window": 512}, [512] * 5 + [None]),
        ({"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 2},
         [512, None] * 3),
        ({"model_type": "cohere2"}, [4096, 4096, 4096, None, 4096, 4096]),
        ({"model_type": "exaone4", "sliding_window": 64, "sliding_window_pattern": "LLG"},
         [64, 64, None] * 2),
        ({"model_type": "olmo3", "sliding_window": 64}, [64, 64, 64, None, 64, 64]),
        ({"model_type": "plamo3", "window_size": 64, "sliding_window_pattern": 3},
         [65, 65, None] * 2),
        ({"model_type": "baichuan_m1", "sliding_window": 8, "sliding_window_layers": [1]},
         [None, 8, None, None, None, None]),
        ({"model_type": "mimo_v2_flash", "sliding_window_size": 8,
          "hybrid_layer_pattern": [1, 0, 1]}, [8, None, 8, None, None, None]),
        ({"model_type": "mistral", "sliding_window": 4096}, [None] * 6),
        ({"model_type": "mistral", "sliding_window": 4096,
          "layer_types": ["sliding_attention", "full_attention"] * 3}, [4096, None] * 3),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True}, [None] * 6),
    ],
)  # fmt: skip
def test_windows_are_where_mlx_lm_makes_them(
    settings: dict[str, Any], windows: list[int | None]
) -> None:
    assert [find_window(settings, layer) for layer in range(6)] == windows
