"""Model folders whose weight files have a header and, instead of arrays, a hole of their size."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NUMBER_BYTES = {"F64": 8, "F32": 4, "U32": 4, "BF16": 2, "F16": 2, "U8": 1, "F8_E4M3": 1}

Arrays = Mapping[str, tuple[str, tuple[int, ...]]]
"""Type and shape by name."""


def write_weights(path: Path, arrays: Arrays) -> int:
    """Write a weight file; return the size of its arrays in bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for name, (dtype, shape) in arrays.items():
        begin, end = end, end + NUMBER_BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return end


def write_folder(folder: Path, config: Mapping[str, Any], *shards: Arrays) -> int:
    """Write the files of a model, a tokenizer too; return the size of all arrays."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")  # for mlx-lm, which is asked about whole models
    if len(shards) == 1:
        return write_weights(folder / "model.safetensors", shards[0])
    names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    index = {array: name for name, arrays in zip(names, shards, strict=True) for array in arrays}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return sum(write_weights(folder / name, a) for name, a in zip(names, shards, strict=True))


def llama_arrays(
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocabulary: int = 1000,
    dtype: str = "BF16",
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the arrays of a llama, as mlx-lm wants them."""
    width = hidden // heads
    arrays: dict[str, tuple[str, tuple[int, ...]]] = {
        "model.embed_tokens.weight": (dtype, (vocabulary, hidden)),
        "model.norm.weight": (dtype, (hidden,)),
    }
    for layer in range(layers):
        shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (heads * width, hidden),
            "self_attn.k_proj": (kv_heads * width, hidden),
            "self_attn.v_proj": (kv_heads * width, hidden),
            "self_attn.o_proj": (hidden, heads * width),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (2 * hidden, hidden),
            "mlp.up_proj": (2 * hidden, hidden),
            "mlp.down_proj": (hidden, 2 * hidden),
        }
        for name, shape in shapes.items():
            arrays[f"model.layers.{layer}.{name}.weight"] = (dtype, shape)
    return arrays


def llama_config(**changes: Any) -> dict[str, Any]:
    """Return its config.json."""
    return {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "rms_norm_eps": 1e-5,
        "vocab_size": 1000,
        "tie_word_embeddings": True,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
    } | changes
