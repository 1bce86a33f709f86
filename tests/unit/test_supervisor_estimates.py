"""What a model folder needs in memory, by its files: one table of configurations, and bad files."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from mlxsup.supervisor.memory.estimator import estimate
from mlxsup.supervisor.memory.folder import (
    MAX_HEADERS_BYTES,
    FolderError,
    fingerprint,
    read_bytes,
    read_folder,
    stamp,
)

from support.safetensors_files import Arrays, llama_arrays, llama_config, write_folder

Shapes = Mapping[str, tuple[int, ...]]
Kept = tuple[int, int, int, int | None]
"""Layers, bytes per token, bytes per row, window."""

KV: Shapes = {"self_attn.k_proj.weight": (8, 8), "self_attn.v_proj.weight": (8, 8)}
"""32 bytes per token in BF16."""

CONVOLUTION: Shapes = {"mixer.conv1d.weight": (10, 4, 1)}
"""60 bytes per row: three inputs for each of ten channels."""

DECAY: Shapes = {"mixer.A_log": (6,)}
S, F = "sliding_attention", "full_attention"


def attention(keys: int, values: int = 0) -> Shapes:
    return {
        "self_attn.q_proj.weight": (4096, 4096),
        "self_attn.k_proj.weight": (keys, 4096),
        "self_attn.v_proj.weight": (values or keys, 4096),
    }


def arrays_of(layers: Mapping[int, Shapes], dtype: str = "BF16") -> dict[str, Any]:
    return {
        f"model.layers.{layer}.{name}": (dtype, shape)
        for layer, shapes in layers.items()
        for name, shape in shapes.items()
    }


def kept_by(folder: Path, config: Mapping[str, Any], arrays: Arrays) -> tuple[list[Kept], str]:
    """What the estimate says of the layers, and its remark."""
    write_folder(folder, config, arrays)
    found = estimate(read_bytes(folder))
    kept = [(one.layers, one.token_bytes, one.row_bytes, one.window) for one in found.layers]
    return kept, found.remark


NAMES = "counted from config.json: the names of its arrays do not say what a layer keeps"
STATE = "the state of some layers is left out: config.json does not say how large it is"
NOVEL = "counted as if every layer kept all tokens: model type novel is not known here"

HEADS_16 = {"num_attention_heads": 16}
WIDTHS = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
LATENT: Shapes = {"self_attn.kv_a_proj_with_mqa.weight": (576, 64)}
LINEAR: Shapes = {"linear_attn.conv1d.weight": (8192, 4, 1), "linear_attn.A_log": (32,)}
QUERIES = {"num_attention_heads": 6, "head_dim": 10}
MAMBA = {"mamba_d_head": 5, "mamba_d_state": 7}

# Type, the rest of config.json, the arrays of each layer, what the layers keep, and the remark.
# tests/mlx/test_memory_layout.py holds every type that is known against mlx-lm itself.
LAYERS: dict[str, tuple[str, dict[str, Any], list[Shapes], list[Kept], str]] = {
    "llama": ("llama", {}, [attention(1024)] * 32, [(32, 4096, 0, None)], ""),
    "keys and values of other names": (
        "gpt_neox", {}, [{"a.attn_key.weight": (8, 8), "a.attn_value.weight": (5, 8)}],
        [(1, 26, 0, None)], ""),
    "two attentions in a layer": (
        "longcat_flash", {}, [{"a.k_proj.weight": (8, 8), "a.v_proj.weight": (8, 8),
                               "b.k_proj.weight": (4, 8), "b.v_proj.weight": (2, 8)}],
        [(1, 12, 0, None), (1, 32, 0, None)], ""),
    "fused": ("phi3", {"num_attention_heads": 24, "hidden_size": 3072},
              [{"self_attn.qkv_proj.weight": (3072 + 2 * 1024, 3072)}], [(1, 4096, 0, None)], ""),
    "fused with a gate": ("llama", QUERIES, [{"a.qkvg_proj.weight": (60 + 60 + 16, 64)}],
                          [(1, 32, 0, None)], ""),
    "fused without the width of queries": ("llama", {}, [{"a.Wqkv.weight": (90, 64)}],
                                           [(1, 120, 0, None)], ""),
    "gpt2 has its outputs last": ("gpt2", {}, [{"attn.c_attn.weight": (64, 192)}],
                                  [(1, 256, 0, None)], ""),
    "query heads for each layer": (
        "openelm", {**QUERIES, "num_query_heads": [2, 3]},
        [{"attn.qkv_proj.weight": (76, 64)}] * 3,
        [(1, 112, 0, None), (1, 32, 0, None), (1, 92, 0, None)], ""),
    "compressed; the last layer is not loaded": (
        "deepseek_v3", {"num_hidden_layers": 2, **HEADS_16, **WIDTHS}, [LATENT] * 3,
        [(2, 1152, 0, None)], ""),
    "compressed, kept for all heads": ("deepseek_v2", {**HEADS_16, **WIDTHS}, [LATENT] * 2,
                                       [(2, 16 * 320 * 2, 0, None)], ""),
    "compressed, of unknown width": ("deepseek_v2", WIDTHS, [LATENT], [(1, 1152, 0, None)], ""),
    "compressed, with a width missing": (
        "deepseek_v2", {**HEADS_16, "qk_nope_head_dim": 128}, [LATENT], [(1, 1152, 0, None)], ""),
    "an indexer with values": ("deepseek_v32", {}, [{**LATENT, "indexer.wk.weight": (7, 64)}],
                               [(1, 1152, 0, None), (1, 28, 0, None)], ""),
    "keys that are values": ("gemma4", {"attention_k_eq_v": True},
                             [{"self_attn.k_proj.weight": (8, 64)}] * 5,
                             [(1, 32, 0, None), (4, 32, 0, 512)], ""),
    "keys beside values": ("llama", {"attention_k_eq_v": True}, [KV], [(1, 32, 0, None)], ""),
    "layers that share keys": ("gemma3n", {"num_kv_shared_layers": 2}, [KV] * 5,
                               [(3, 32, 0, None)], ""),
    "other spellings of the number of layers": ("gpt2", {"num_hidden_layers": None, "n_layer": 2},
                                                [KV] * 3, [(2, 32, 0, None)], ""),
    "spelled layers": ("nemotron_h", {"hybrid_override_pattern": "M*"}, [KV] * 3,
                       [(2, 32, 0, None)], ""),
    # windows: which layers have one, and how large it is
    "windows in every other layer": ("gpt_oss", {"sliding_window": 128}, [KV] * 4,
                                     [(2, 32, 0, None), (2, 32, 0, 128)], ""),
    "windows of a type's own size": ("gemma3_text", {}, [KV] * 6,
                                     [(1, 32, 0, None), (5, 32, 0, 512)], ""),
    "windows by a period": ("cohere2", {"sliding_window": 8, "sliding_window_pattern": 2},
                            [KV] * 6, [(3, 32, 0, None), (3, 32, 0, 8)], ""),
    "windows by a list": ("mistral", {"sliding_window": 8, "layer_types": [S, F, F]}, [KV] * 4,
                          [(3, 32, 0, None), (1, 32, 0, 8)], ""),
    "a list before the period": ("olmo3", {"sliding_window": 8, "layer_types": [F, S, F, F]},
                                 [KV] * 4, [(3, 32, 0, None), (1, 32, 0, 8)], ""),
    "windows of a type's own period": ("olmo3", {"sliding_window": 8}, [KV] * 4,
                                       [(1, 32, 0, None), (3, 32, 0, 8)], ""),
    "windows spelled": ("exaone4", {"sliding_window": 8, "sliding_window_pattern": "LLG"},
                        [KV] * 6, [(2, 32, 0, None), (4, 32, 0, 8)], ""),
    "windows by number": ("mimo_v2_flash", {"sliding_window_size": 8,
                                            "hybrid_layer_pattern": [1, 0, 2]},
                          [KV] * 4, [(3, 32, 0, None), (1, 32, 0, 8)], ""),
    "a window that is widened": ("plamo3", {"window_size": 64, "sliding_window_pattern": 3},
                                 [KV] * 3, [(1, 32, 0, None), (2, 32, 0, 65)], ""),
    "windows everywhere": ("recurrent_gemma", {"attention_window_size": 9}, [KV], [(1, 32, 0, 9)],
                           ""),
    "a window that a type does not use": ("qwen2", {"sliding_window": 8, "layer_types": [S]},
                                          [KV] * 2, [(2, 32, 0, None)], ""),
    "a window that is no size": ("mistral", {"sliding_window": True, "layer_types": [S]}, [KV],
                                 [(1, 32, 0, None)], ""),
    "a period that is none": ("gemma3", {"sliding_window": 8, "sliding_window_pattern": 0},
                              [KV] * 6, [(6, 32, 0, None)], ""),
    # states
    "a state in three of four layers": (
        "qwen3_next", {"linear_value_head_dim": 128, "linear_key_head_dim": 128, "head_dim": 256},
        [KV if n % 4 == 3 else LINEAR for n in range(8)],
        [(2, 32, 0, None), (6, 0, 8192 * 3 * 2 + 32 * 128 * 128 * 4, None)], ""),
    "a state beside keys": (
        "falcon_h1", {"mamba_d_head": 4, "mamba_d_state": 2},
        [{**KV, "mamba.A_log": (32,), "mamba.conv1d.weight": (64, 1, 4)}] * 2,
        [(2, 32, 0, None), (2, 0, 64 * 3 * 2 + 32 * 8 * 4, None)], ""),
    "a convolution": ("lfm2", {}, [CONVOLUTION], [(1, 0, 60, None)], ""),
    "three convolutions": ("kimi_linear", {},
                           [{f"a.{kind}_conv1d.weight": (size, 4, 1)
                             for kind, size in (("q", 1), ("k", 2), ("v", 3))}],
                           [(1, 0, 3 * 6 * 2, None)], ""),
    "a recurrent unit": ("recurrent_gemma", {},
                         [{**CONVOLUTION, "mixer.rg_lru.recurrent_param": (20,)}],
                         [(1, 0, 60 + 20 * 4, None)], ""),
    "time mixing": ("rwkv7", {"hidden_size": 64, "head_dim": 16}, [{"attn.r_k": (4, 16)}],
                    [(1, 0, 2 * 64 * 2 + 64 * 16 * 4, None)], ""),
    "linear attention": ("bailing_moe_linear", {"num_attention_heads": 4, "head_dim": 16},
                         [{"attn.g_norm.weight": (64,)}], [(1, 0, 4 * 16 * 16 * 4, None)], ""),
    "a decay as large as the state": ("mamba", MAMBA, [{**CONVOLUTION, "mixer.A_log": (20, 16)}],
                                      [(1, 0, 60 + 20 * 16 * 4, None)], ""),
    "a decay for each head": ("mamba2", {"head_dim": 5, "state_size": 7},
                              [{**CONVOLUTION, **DECAY}], [(1, 0, 60 + 6 * 35 * 4, None)], ""),
    "a mixer's dimensions before an attention's": (
        "falcon_h1", {**MAMBA, "head_dim": 100, "state_size": 100}, [DECAY],
        [(1, 0, 6 * 35 * 4, None)], ""),
    "half of a mixer's dimensions": (
        "mamba2", {"mamba_d_head": 5, "hidden_size": 64, "num_attention_heads": 4}, [DECAY],
        [(1, 0, 6 * 256 * 4, None)], ""),
    "dimensions in a table of their own": (
        "kimi_linear", {"linear_attn_config": {"head_dim": 8}, "head_dim": 5}, [DECAY],
        [(1, 0, 6 * 64 * 4, None)], ""),
    "a state of unknown size": ("mamba2", {}, [{**CONVOLUTION, **DECAY}], [(1, 0, 60, None)],
                                STATE),
    # types that run their layers otherwise than once each
    "layers in loops": ("nanbeige", {"num_loops": 4}, [KV] * 3, [(12, 32, 0, None)], ""),
    "a window besides": ("iquestloopcoder", {"loop_window_size": 9}, [KV] * 3,
                         [(3, 32, 0, None), (3, 32, 0, 9)], ""),
    "keys of the layer before": ("hunyuan", {}, [KV, {}, KV, {"self_attn.q_proj.weight": (8, 8)}],
                                 [(4, 32, 0, None)], ""),
    "keys before a convolution": (
        "baichuan_m1", {"num_attention_heads": 8, "head_dim": 8, "sliding_window": 4,
                        "sliding_window_layers": [1]},
        [{"self_attn.W_pack.weight": (80, 64), "self_attn.conv_k": (1, 1, 8, 1, 2)}] * 2,
        [(1, 32, 0, None), (1, 32, 0, 4), (2, 0, 32, None)], ""),
    # what is not known
    "an unknown type": ("novel", {"sliding_window": 64}, [attention(512)] * 4,
                        [(4, 2048, 0, None)], NOVEL),
    "unknown names of arrays": ("llama", {"num_key_value_heads": 8, "head_dim": 128},
                                [{"attn.everything.weight": (9, 9)}] * 4, [(4, 4096, 0, None)],
                                NAMES),
    "an unknown type with unknown names": ("novel", {"n_kv_heads": 8, "head_dim": 128},
                                           [{"attn.everything.weight": (9, 9)}] * 4,
                                           [(4, 4096, 0, None)], NOVEL),
    "heads of unknown width": ("llama", {"hidden_size": 100, "num_key_value_heads": 8},
                               [{"attn.everything.weight": (9, 9)}], [(1, 400, 0, None)], NAMES),
    "nothing at all": ("llama", {}, [{"attn.everything.weight": (9, 9)}], [], NAMES),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_estimate_of_layers(tmp_path: Path, name: str) -> None:
    model_type, more, layers, expected, remark = LAYERS[name]
    config = {"model_type": model_type, "num_hidden_layers": len(layers), **more}
    found, its_remark = kept_by(tmp_path, config, arrays_of(dict(enumerate(layers))))
    assert sorted(found, key=str) == sorted(expected, key=str)
    assert its_remark == remark


NARROW: Arrays = {
    "model.layers.0.self_attn.k_proj.weight": ("F8_E4M3", (10, 10)),
    "model.layers.0.self_attn.k_proj.weight_scale_inv": ("F32", (1, 1)),
}
PACKED: Arrays = {
    **{f"model.layers.0.self_attn.{p}_proj.weight": ("U32", (16, 4)) for p in "kv"},
    **{f"model.layers.0.self_attn.{p}_proj.scales": ("F16", (16, 1)) for p in "kv"},
}
TOWER: Arrays = {"vision_tower.layers.0.self_attn.k_proj.weight": ("F32", (64, 64))}

# Arrays, the rest of config.json, the bytes of the weights once loaded, and of a token.
WEIGHTS: dict[str, tuple[Arrays, dict[str, Any], int, int]] = {
    "bf16": (arrays_of({0: KV}), {}, 256, 32),
    "32 bits": (arrays_of({0: KV}, "F32"), {}, 512, 64),
    "packed: the scales say the precision": (PACKED, {}, 2 * (256 + 32), 64),
    "most arrays say it": ({**arrays_of({0: KV}), "router": ("F64", (1000,))}, {}, 8256, 32),
    "eight bits are widened": (NARROW, {}, 204, 20),
    "eight bits compute in what config.json says": (NARROW, {"torch_dtype": "float32"}, 204, 40),
    "the newer name goes first": (
        NARROW, {"dtype": "float16", "torch_dtype": "float32"}, 204, 20),
    "towers are not loaded": ({**arrays_of({0: KV}), **TOWER}, {}, 256, 32),
    "a tower says nothing about the precision": (
        {**arrays_of({0: KV}), "visual.a": ("F8_E4M3", (8,))}, {"dtype": "float32"}, 256, 32),
    "what is outside of a layer keeps nothing": (
        {**arrays_of({0: KV}), "lm_head.k_proj.weight": ("BF16", (8, 8)),
         "model.x.0.k_proj": ("BF16", (8, 8)), "model.layers.0.self_attn.k_proj.bias":
         ("BF16", (8,))}, {}, 256 + 128 + 128 + 16, 32),
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTS)
def test_estimate_of_weights(tmp_path: Path, name: str) -> None:
    arrays, more, weight_bytes, token_bytes = WEIGHTS[name]
    write_folder(tmp_path, {"model_type": "llama", "num_hidden_layers": 1, **more}, arrays)
    found = estimate(read_bytes(tmp_path))
    assert (found.weight_bytes, sum(one.token_bytes for one in found.layers)) == (
        weight_bytes, token_bytes,
    )  # fmt: skip


def test_estimate_adds_up_all_shards(tmp_path: Path) -> None:
    arrays = list(llama_arrays(layers=3).items())
    shards = dict(arrays[:2]), dict(arrays[2:5]), dict(arrays[5:])
    size = write_folder(tmp_path, llama_config(), *shards)
    assert estimate(read_bytes(tmp_path)).weight_bytes == size


def test_estimate_of_a_nested_text_model(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", "hidden_size": 1, "text_config": llama_config()}
    write_folder(tmp_path, config, llama_arrays())
    found = estimate(read_bytes(tmp_path))
    assert ([one.window for one in found.layers], found.context_length) == ([512], 8192)


def test_fingerprint_follows_name_size_and_time_of_each_model_file(tmp_path: Path) -> None:
    write_folder(tmp_path, llama_config(), llama_arrays())
    path = tmp_path / "model.safetensors"

    def seen() -> str:
        os.utime(path, ns=(1, 1))
        os.utime(tmp_path / "config.json", ns=(1, 1))
        return fingerprint(stamp(tmp_path))

    found = [fingerprint(stamp(tmp_path)), seen()]
    os.truncate(path, path.stat().st_size + 1)
    found.append(seen())
    path = path.rename(tmp_path / "model-1.safetensors")
    found.append(seen())
    (tmp_path / "config.json").write_text("{}")
    found.append(seen())
    assert len(set(found)) == 5
    (tmp_path / "notes.txt").touch()
    assert seen() == found[-1]


# ---------------------------------------------------------------- wrong files


def header(text: bytes) -> Callable[[Path], object]:
    data = struct.pack("<Q", len(text)) + text
    return lambda folder: (folder / "model.safetensors").write_bytes(data)


def tensor(shape: list[Any], offsets: list[Any]) -> Callable[[Path], object]:
    name = "model.layers.0.self_attn.k_proj.weight"
    values = {name: {"dtype": "F32", "shape": shape, "data_offsets": offsets}}
    return header(json.dumps(values).encode())


def text(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def size(change: int | None) -> Callable[[Path], None]:
    def resize(folder: Path) -> None:
        path = folder / "model.safetensors"
        os.truncate(path, 0 if change is None else path.stat().st_size + change)

    return resize


def many_headers(folder: Path) -> None:
    content = b" " * (MAX_HEADERS_BYTES // 2 - 1) + b"{}"
    for number in (1, 2):
        path = folder / f"model-{number}.safetensors"
        path.write_bytes(struct.pack("<Q", len(content)) + content)
    (folder / "model.safetensors").unlink()


INDEX = "model.safetensors.index.json"
WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda f: f.rename(f.with_name("gone")),
                  "the model folder {folder} does not exist"),
    "no config": (lambda f: (f / "config.json").unlink(),
                  "{folder}/config.json: No such file or directory"),
    "config is no JSON": (text("config.json", "{"), "{folder}/config.json is not JSON"),
    "config is a list": (text("config.json", "[]"),
                         "{folder}/config.json does not hold a JSON object"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(),
                   "{folder}/model.safetensors does not exist, nor any shard"),
    "cut short": (size(-1), "{folder}/model.safetensors is cut short: {less} bytes of {whole}"),
    "empty": (size(None), "{folder}/model.safetensors is not a safetensors file"),
    "another format": (lambda f: (f / "model.safetensors").write_bytes(b"GGUF" * 8),
                       "{folder}/model.safetensors is not a safetensors file"),
    "header is a list": (header(b"[]"), "{folder}/model.safetensors has a header that cannot"),
    "header without offsets": (header(b'{"a": {"dtype": "F32", "shape": [1]}}'),
                               "{folder}/model.safetensors has a header that cannot"),
    "negative size": (tensor([1], [10, 0]), "{folder}: config.json or a header names sizes that"),
    "huge shape": (tensor([10**30, 10**30], [0, 0]), "{folder}: config.json or a header names"),
    "infinite shape": (tensor([float("inf")], [0, 0]),
                       "{folder}/model.safetensors has a header that cannot be read"),
    "many headers": (many_headers,
                     "{folder}: the headers of its weight files have more than the 64 MiB"),
    "missing shard": (text(INDEX, '{"weight_map": {"a": "model-2.safetensors"}}'),
                      "{folder}/model-2.safetensors does not exist; " + INDEX + " names it"),
    "index without a map": (text(INDEX, "{}"), "{folder}/" + INDEX + " has no weight_map"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_estimate_names_the_wrong_file(tmp_path: Path, what: str) -> None:
    damage, message = WRONG[what]
    folder = tmp_path / "model"
    write_folder(folder, llama_config(), llama_arrays())
    whole = (folder / "model.safetensors").stat().st_size
    damage(folder)
    with pytest.raises(FolderError) as raised:
        estimate(read_bytes(folder))
    expected = message.format(folder=folder, less=whole - 1, whole=whole)
    assert str(raised.value).startswith(expected)


def test_a_weight_file_may_be_without_arrays(tmp_path: Path) -> None:
    write_folder(tmp_path, llama_config(), {})
    assert read_folder(tmp_path).tensors == ()
    header(b"{}")(tmp_path)
    assert read_folder(tmp_path).tensors == ()
