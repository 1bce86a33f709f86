"""A llama that is made to copy: it goes on as its prompt did behind the same token.

Small models hardly copy, so what drafts gain would not show with one. Of this one, two heads are
set by hand and all other weights are random, so that a pass takes what it does for its size. The
first head writes the code of the token before into each place; the second looks for the place
behind an earlier copy of the latest token, and its code is the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from support.models.tiny_model import VOCABULARY_SIZE, as_bfloat16, make_tiny_model

HEAD = 64
ROPE_THETA = 1e9
CODE = 40
"""Features of a token's code; as many of a head's turn so slowly that places do not matter."""

OWN, BEFORE, NEXT = slice(0, CODE), slice(CODE, 2 * CODE), slice(2 * CODE, 3 * CODE)
ONE = 3 * CODE
"""The feature that is the same in every place; the random weights write the ones behind it."""

Array = NDArray[np.float64]


def make_copying_model(
    folder: Path, renamed: Mapping[int, int], *, layers: int, hidden: int
) -> Path:
    """Write a model folder in bfloat16; return it.

    Args:
        folder: created, with its parents.
        renamed: tokens of the prompt, and what the answer calls them instead.
        layers: at least 2.
        hidden: features, a multiple of 64 above 121.
    """
    heads = hidden // HEAD
    config = {
        "hidden_size": hidden, "intermediate_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": HEAD,
        "rope_theta": ROPE_THETA,
    }  # fmt: skip
    make_tiny_model(folder, config=config)
    rng = np.random.default_rng(0)
    codes = rng.choice([-1.0, 1.0], (VOCABULARY_SIZE, CODE))
    output = np.zeros((VOCABULARY_SIZE, hidden))
    output[:, NEXT] = codes
    for old, new in renamed.items():
        codes[new] = codes[old]
        output[new], output[old] = output[old].copy(), 0.0
    embedded = np.zeros((VOCABULARY_SIZE, hidden))
    embedded[:, OWN], embedded[:, ONE] = codes, 4.0
    # Of equal length, because a layer's norm would change the same feature otherwise.
    embedded[:, ONE + 1 :] = rng.choice([-0.5, 0.5], (VOCABULARY_SIZE, hidden - ONE - 1))
    weights = {
        "model.embed_tokens.weight": embedded,
        "lm_head.weight": output,
        "model.norm.weight": np.ones(hidden),
    }
    for layer in range(layers):
        own = _layer(rng, hidden)
        weights |= {f"model.layers.{layer}.{name}.weight": one for name, one in own.items()}
    _look_before(weights)
    _look_for_the_same(weights)
    arrays = {name: one.astype(np.float32) for name, one in weights.items()}
    save_file(arrays, folder / "model.safetensors")
    return as_bfloat16(folder)


def _layer(rng: np.random.Generator, hidden: int) -> dict[str, Array]:
    """Return random weights that write to the rest of the features alone."""
    square = [f"self_attn.{one}_proj" for one in "qkvo"]
    square += [f"mlp.{one}_proj" for one in ("gate", "up", "down")]
    weights = {name: rng.normal(0, hidden**-0.5, (hidden, hidden)) for name in square}
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[name][: ONE + 1] = 0.0
        weights[name] *= 0.1
    norms = ("input_layernorm", "post_attention_layernorm")
    return weights | {name: np.ones(hidden) for name in norms}


def _look_before(weights: dict[str, Array]) -> None:
    """Let the first head of the first layer copy the code of the place before."""
    query, key = _head(weights, 0, read=OWN, write=BEFORE)
    half = HEAD // 2
    angles = ROPE_THETA ** (-np.arange(half) / half)
    query[: half - CODE // 2, ONE] = 2.0
    key[:half, ONE], key[half:, ONE] = 2.0 * np.cos(angles), 2.0 * np.sin(angles)


def _look_for_the_same(weights: dict[str, Array]) -> None:
    """Let the first head of the second layer copy the code behind the same token."""
    query, key = _head(weights, 1, read=OWN, write=NEXT)
    half = HEAD // 2
    slow = [*range(half - CODE // 2, half), *range(HEAD - CODE // 2, HEAD)]
    query[slow, OWN] = key[slow, BEFORE] = 2.0 * np.eye(CODE)


def _head(
    weights: dict[str, Array], layer: int, *, read: slice, write: slice
) -> tuple[Array, Array]:
    """Let the first head of a layer move features; return its queries and keys, which are zeros."""
    query, key, value, out = (
        weights[f"model.layers.{layer}.self_attn.{one}_proj.weight"] for one in "qkvo"
    )
    query[:HEAD] = key[:HEAD] = value[:HEAD] = 0.0
    out[:, :HEAD] = 0.0
    value[:CODE, read] = np.eye(CODE)
    out[write, :CODE] = np.eye(CODE)
    return query[:HEAD], key[:HEAD]
