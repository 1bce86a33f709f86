"""What layers keep, from configurations and shapes of published models: figures by hand."""

from __future__ import annotations

from typing import Any

from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.supervisor.memory.folder import Tensor
from mlxsup.supervisor.memory.layout import NO_NAMES, UNKNOWN_STATE, UNKNOWN_TYPE, find_layout

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


def test_a_remark_about_the_type_goes_before_one_about_the_names() -> None:
    layers = tensors({n: {"attn.everything.weight": (9, 9)} for n in range(4)})
    found = find_layout(config("novel", 4, num_key_value_heads=8, head_dim=128), layers)
    assert found.layers == (CacheLayers(layers=4, token_bytes=2 * 8 * 128 * 2),)
    assert found.remark == UNKNOWN_TYPE.format("novel")
    mixer = tensors({0: {"mixer.A_log": (32,)}})
    assert find_layout(config("novel", 1), mixer).remark == UNKNOWN_TYPE.format("novel")


def test_the_remarks_are_as_documented() -> None:
    assert find_layout({}, []).remark == (
        "counted as if every layer kept all tokens: model type None is not known here"
    )
    assert find_layout(config("llama", 1), []).remark == (
        "counted from config.json: the names of its arrays do not say what a layer keeps"
    )
    assert find_layout(config("mamba2", 1), tensors({0: {"mixer.A_log": (32,)}})).remark == (
        "the state of some layers is left out: config.json does not say how large it is"
    )


# ---------------------------------------------------------------- which arrays count


def test_a_state_of_unknown_size_is_named_whatever_the_other_layers_say() -> None:
    mixer: Shapes = {"mixer.A_log": (32,), "mixer.conv1d.weight": (64, 1, 4)}
    for layers in ({0: mixer, 1: attention(8)}, {0: attention(8), 1: mixer}):
        assert find_layout(config("mamba2", 2), tensors(layers)).remark == UNKNOWN_STATE


def test_layers_that_share_keys_keep_none() -> None:
    layers = tensors({n: attention(8) for n in range(6)})
    found = find_layout(config("gemma4_text", 6, num_kv_shared_layers=2), layers)
    assert sum(one.layers for one in found.layers) == 4
    for nothing in (None, 0, "2"):
        found = find_layout(config("gemma4_text", 6, num_kv_shared_layers=nothing), layers)
        assert sum(one.layers for one in found.layers) == 6


def test_without_a_number_of_layers_all_of_them_count() -> None:
    layers = tensors({n: attention(8) for n in range(3)})
    found = find_layout({"model_type": "llama", "num_kv_shared_layers": 2}, layers)
    assert found.layers == (CacheLayers(layers=3, token_bytes=32),)


def test_arrays_outside_layers_and_those_without_a_shape_do_not_count() -> None:
    outside = [
        Tensor(name=name, shape=(8, 8), dtype="BF16", size_bytes=0)
        for name in ("lm_head.k_proj.weight", "k_proj.weight", "model.0", "model.x.0.k_proj")
    ]
    scalar = tensors({0: {"self_attn.k_proj.weight": ()}})
    layer = tensors({0: attention(8) | {"self_attn.k_proj.bias": (8,)}})
    assert find_layout(config("llama", 1), [*outside, *layer]).layers == (
        CacheLayers(layers=1, token_bytes=32),
    )
    assert find_layout(config("llama", 1), scalar).remark == NO_NAMES


def test_towers_that_are_not_loaded_keep_nothing() -> None:
    tower = [
        Tensor(name=f"vision_tower.layers.0.self_attn.{name}", shape=shape, dtype="F32",
               size_bytes=0)
        for name, shape in attention(64).items()
    ]  # fmt: skip
    found = find_layout(config("llama", 1), [*tower, *tensors({0: attention(8)})])
    assert found.layers == (CacheLayers(layers=1, token_bytes=32),)


def test_numbers_of_32_bits_take_twice_as_much() -> None:
    found = find_layout(config("llama", 1), tensors({0: attention(8)}, "F32"))
    assert found.layers == (CacheLayers(layers=1, token_bytes=64),)


def test_each_mixer_and_attention_of_a_layer_is_counted() -> None:
    layer: Shapes = {
        **attention(8), "mamba.A_log": (32,), "mamba.conv1d.weight": (64, 1, 4),
    }  # fmt: skip
    sizes = {"mamba_d_head": 4, "mamba_d_state": 2}
    found = find_layout(config("falcon_h1", 2, **sizes), tensors({0: layer, 1: layer}))
    assert sorted(found.layers, key=lambda one: one.row_bytes) == [
        CacheLayers(layers=2, token_bytes=32),
        CacheLayers(layers=2, row_bytes=64 * 3 * 2 + 32 * 8 * 4),
    ]


def test_stacks_of_layers_are_told_apart() -> None:
    both = [
        Tensor(name=f"{stack}.0.self_attn.{name}_proj.weight", shape=(8, 8), dtype="BF16",
               size_bytes=0)
        for stack in ("model.layers", "model.more_layers") for name in "kv"
    ]  # fmt: skip
    assert find_layout(config("llama", 1), both).layers == (CacheLayers(layers=2, token_bytes=32),)


# ---------------------------------------------------------------- types that run otherwise


def test_baichuan_keeps_the_last_keys_before_their_convolution_without_a_window() -> None:
    layer: Shapes = {
        "self_attn.W_pack.weight": (64 + 16, 64), "self_attn.conv_k": (1, 1, 8, 1, 2),
    }  # fmt: skip
    settings = {"num_attention_heads": 8, "head_dim": 8, "sliding_window": 4}
    found = find_layout(
        config("baichuan_m1", 2, sliding_window_layers=[1], **settings),
        tensors({0: layer, 1: layer}),
    )
    assert sorted(found.layers, key=lambda one: (one.row_bytes, one.window or 0)) == [
        CacheLayers(layers=1, token_bytes=32),
        CacheLayers(layers=1, token_bytes=32, window=4),
        CacheLayers(layers=2, row_bytes=32),
    ]


def test_nanbeige_keeps_keys_for_each_of_its_loops() -> None:
    layers = tensors({n: attention(8) for n in range(3)})
    assert find_layout(config("nanbeige", 3, num_loops=4), layers).layers == (
        CacheLayers(layers=12, token_bytes=32),
    )
    assert find_layout(config("nanbeige", 3), layers).layers == (
        CacheLayers(layers=3, token_bytes=32),
    )
    assert find_layout(config("llama", 3, num_loops=4), layers).layers == (
        CacheLayers(layers=3, token_bytes=32),
    )


def test_iquestloopcoder_keeps_all_tokens_and_those_of_a_window_again() -> None:
    layers = tensors({n: attention(8) for n in range(3)})
    for given, window in (({"loop_window_size": 9}, 9), ({}, 64)):
        found = find_layout(config("iquestloopcoder", 3, **given), layers)
        assert sorted(found.layers, key=lambda one: one.window or 0) == [
            CacheLayers(layers=3, token_bytes=32),
            CacheLayers(layers=3, token_bytes=32, window=window),
        ]


def test_hunyuan_keeps_keys_again_in_layers_that_take_those_of_the_one_before() -> None:
    own = attention(8)
    none: Shapes = {"self_attn.q_proj.weight": (8, 8)}
    layers = tensors({0: own, 1: none, 2: own, 3: none, 4: none})
    assert find_layout(config("hunyuan", 5), layers).layers == (
        CacheLayers(layers=5, token_bytes=32),
    )
    assert find_layout({"model_type": "hunyuan"}, layers).layers == (
        CacheLayers(layers=2, token_bytes=32),
    )
    assert find_layout(config("llama", 5), layers).layers == (
        CacheLayers(layers=2, token_bytes=32),
    )


# ---------------------------------------------------------------- config.json alone


def test_without_heads_of_keys_they_are_as_wide_as_the_model() -> None:
    for given in ({}, {"num_key_value_heads": 8}, {"head_dim": 128}):
        found = find_layout(config("llama", 4, hidden_size=100, **given), [])
        assert found.layers == (CacheLayers(layers=4, token_bytes=2 * 100 * 2),)


def test_heads_of_keys_have_four_names() -> None:
    names = ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "n_head_kv")
    found = [find_layout(config("llama", 4, head_dim=5, **{name: 3}), []).layers for name in names]
    assert found == [(CacheLayers(layers=4, token_bytes=2 * 15 * 2),)] * 4


def test_nothing_is_counted_from_a_config_that_says_too_little() -> None:
    assert find_layout({"model_type": "llama", "hidden_size": 64}, []).layers == ()
    assert find_layout(config("llama", 4), []).layers == ()
