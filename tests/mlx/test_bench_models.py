"""The shaped models of benchmarks: an id that their tokenizer does not know is never an answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from bench.shaped_model import Shape, make_shaped_model
from support.tiny_model import VOCABULARY_SIZE

pytestmark = pytest.mark.mlx

SHAPE = Shape(
    layers=1, hidden=128, intermediate=128, heads=2, key_value_heads=1, dtype="float32",
    vocabulary=2 * VOCABULARY_SIZE,
)  # fmt: skip


@pytest.mark.parametrize("bits", [0, 4])
def test_ids_beyond_the_tokenizer_are_never_the_likeliest(tmp_path: Path, bits: int) -> None:
    shape = replace(SHAPE, bits=bits)
    model: Any = load_model(make_shaped_model(tmp_path, shape, seed=1, context_length=64))[0]
    assert hasattr(model.model.layers[0].mlp.up_proj, "scales") == bool(bits)
    logits = model(mx.array([[300, 2047, 4095, 7]]))[0]
    assert logits.shape == (4, 2 * VOCABULARY_SIZE)
    assert not mx.any(logits[:, VOCABULARY_SIZE:]).item()
    assert mx.all(mx.argmax(logits, axis=-1) < VOCABULARY_SIZE).item()
