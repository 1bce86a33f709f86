"""Llamas of a real size with random weights, for machines that no model hub reaches."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from support.models.tiny_model import VOCABULARY_SIZE, make_tiny_model

WRITE = """
import sys
from pathlib import Path
import mlx.core as mx

folder, dtype, *numbers = sys.argv[1:]
layers, hidden, intermediate, queries, key_values, *rest = map(int, numbers)
vocabulary, known, bits, seed = rest
dtype = getattr(mx, dtype)
mx.random.seed(seed)

def normal(rows, columns):
    return (mx.random.normal((rows, columns)) * columns**-0.5).astype(dtype)

def padded(rows, columns):
    # The logits of ids that the tokenizer does not know are 0: others are always above them.
    zeros = mx.zeros((rows - known, columns), dtype)
    return mx.concatenate([normal(known, columns), zeros])

def packed(weights):
    if not bits:
        return weights
    found = {}
    for name, array in weights.items():
        parts = [array] if array.ndim == 1 else mx.quantize(array, group_size=64, bits=bits)
        names = ("weight", "scales", "biases")
        found |= {name.replace("weight", n): part for n, part in zip(names, parts)}
    return found

for layer in range(layers):
    prefix = f"model.layers.{layer}."
    weights = {
        prefix + "self_attn.q_proj.weight": normal(queries, hidden),
        prefix + "self_attn.k_proj.weight": normal(key_values, hidden),
        prefix + "self_attn.v_proj.weight": normal(key_values, hidden),
        prefix + "self_attn.o_proj.weight": normal(hidden, queries),
        prefix + "mlp.gate_proj.weight": normal(intermediate, hidden),
        prefix + "mlp.up_proj.weight": normal(intermediate, hidden),
        prefix + "mlp.down_proj.weight": normal(hidden, intermediate),
        prefix + "input_layernorm.weight": mx.ones(hidden, dtype),
        prefix + "post_attention_layernorm.weight": mx.ones(hidden, dtype),
    }
    if layer == 0:
        weights["model.embed_tokens.weight"] = normal(vocabulary, hidden)
        weights["lm_head.weight"] = padded(vocabulary, hidden)
        weights["model.norm.weight"] = mx.ones(hidden, dtype)
    mx.save_safetensors(str(Path(folder) / f"model-{layer:03}.safetensors"), packed(weights))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The size of a llama.

    Attributes:
        head: features of each head; 0 for the heads' equal share of `hidden`.
        dtype: of the weights.
        vocabulary: ids; those that the tokenizer does not know are never the likeliest.
        bits: of each weight in groups of 64; 0: as `dtype` has.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    head: int = 0
    dtype: str = "bfloat16"
    vocabulary: int = VOCABULARY_SIZE
    bits: int = 0


SHAPES = {
    "middle": Shape(layers=12, hidden=512, intermediate=1376, heads=8, key_value_heads=8),
    "03b": Shape(layers=16, hidden=1024, intermediate=4096, heads=16, key_value_heads=8),
    "7b": Shape(layers=32, hidden=4096, intermediate=11008, heads=32, key_value_heads=32),
    "8b": Shape(layers=32, hidden=4096, intermediate=14336, heads=32, key_value_heads=8),
}


def make_shaped_model(folder: Path, shape: Shape, *, seed: int, context_length: int) -> Path:
    """Writes a model of that shape, with the tiny model's vocabulary, that ends no answer."""
    head = shape.head or shape.hidden // shape.heads
    make_tiny_model(
        folder,
        config={
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.key_value_heads,
            "head_dim": head,
            "max_position_embeddings": context_length,
            "torch_dtype": shape.dtype,
            "vocab_size": shape.vocabulary,
            **({"quantization": {"group_size": 64, "bits": shape.bits}} if shape.bits else {}),
        },
    )
    (folder / "model.safetensors").unlink()
    numbers = (
        *(shape.layers, shape.hidden, shape.intermediate),
        *(head * shape.heads, head * shape.key_value_heads),
        *(shape.vocabulary, VOCABULARY_SIZE, shape.bits, seed),
    )
    # In a separate process: the benchmark itself never touches MLX.
    command = [sys.executable, "-c", WRITE, str(folder), shape.dtype, *map(str, numbers)]
    subprocess.run(command, check=True)
    return folder
