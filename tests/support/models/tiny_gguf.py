"""A tiny GGUF file of a llama model with random weights, as MLX itself writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx

TOKENS = ["<|end|>", "a", "b", "ab", "Ġ", "Ġab", "<pad>", "1", "2", "é", "<user>"]
KINDS = [3, 1, 1, 1, 1, 1, 3, 1, 1, 1, 4]
MERGES = ["a b", "Ġ ab"]
HEADS, HEAD_SIZE, INNER = 2, 32, 128
HIDDEN = HEADS * HEAD_SIZE


def tiny_gguf(path: Path) -> Path:
    """Write the file; the model knows the letters `a` and `b`."""
    mx.random.seed(5)

    def drawn(*shape: int) -> mx.array:
        return mx.random.normal(shape) * 0.1

    layer = {
        "attn_q": drawn(HIDDEN, HIDDEN), "attn_k": drawn(HIDDEN, HIDDEN),
        "attn_v": drawn(HIDDEN, HIDDEN), "attn_output": drawn(HIDDEN, HIDDEN),
        "ffn_gate": drawn(INNER, HIDDEN), "ffn_up": drawn(INNER, HIDDEN),
        "ffn_down": drawn(HIDDEN, INNER), "attn_norm": mx.ones(HIDDEN),
        "ffn_norm": mx.ones(HIDDEN),
    }  # fmt: skip
    arrays = {f"blk.0.{name}.weight": array for name, array in layer.items()}
    arrays["token_embd.weight"] = drawn(len(TOKENS), HIDDEN)
    arrays["output_norm.weight"] = mx.ones(HIDDEN)

    def count(value: int) -> mx.array:
        return mx.array(value, mx.uint32)

    entries: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.attention.head_count": count(HEADS),
        "llama.embedding_length": count(HIDDEN),
        "llama.feed_forward_length": count(INNER),
        "llama.block_count": count(1),
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5, mx.float32),
        "llama.context_length": count(512),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": mx.array(KINDS, mx.int32),
        "tokenizer.ggml.eos_token_id": count(0),
        "tokenizer.ggml.bos_token_id": count(1),
        "tokenizer.ggml.unknown_token_id": count(2),
        "tokenizer.ggml.padding_token_id": count(6),
    }
    mx.save_gguf(str(path), arrays, entries)
    return path
