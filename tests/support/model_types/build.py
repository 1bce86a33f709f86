"""Tiny random weights for any configuration that mlx-lm can build.

The model is made by mlx-lm's own classes, so that a configuration is all that a model type needs.
Attention and state matter to the answers: queries and keys are large enough that a token attends
to few others, and the embeddings are small beside what the layers add.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, load_model
from numpy.typing import NDArray

from .listed import ModelType, model_types
from support.models.tiny_model import VOCABULARY_SIZE, write_tokenizer

Floats = NDArray[np.floating[Any]]

_GAIN = 1.5
"""Of the layers: the deviation of what comes out, if that of what goes in is 1."""
_LOGITS_DEVIATION = 2.5
_TIED_DEVIATION = 1.25
"""As above if the output layer is the embedding: with a larger one, every answer would repeat its
last token."""
_NOISE = 0.1
"""Around the value that mlx-lm itself gives to a norm or a bias."""
_SLOW_DECAY = {
    "dt_bias": -4.0,
    "dt_proj.bias": -4.0,
    "recurrent_param": -5.0,
    "w_lora.lora.2.bias": -4.0,
}
"""What lets a state remember hundreds of tokens, by the end of the parameter's name: with the
values that mlx-lm gives it, it forgets within ten."""
_ATTENTION_NORMS = ("q_norm", "k_norm", "query_norm", "key_norm", "q_layernorm", "k_layernorm")


def make_model(folder: Path, model: ModelType | str) -> Path:
    """Write a model folder that mlx-lm loads with exactly the weights made here; return it.

    Args:
        folder: created, with its parents.
        model: whose config.json it gets, or its name.

    Raises:
        ValueError: mlx-lm loads other weights than those that were saved.
    """
    if isinstance(model, str):
        [model] = model_types([model])
    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps(model.config)
    (folder / "config.json").write_text(config, encoding="utf-8")
    write_tokenizer(folder)
    model_class, arguments_class = _get_classes(json.loads(config))
    mx.random.seed(0)
    made = model_class(arguments_class.from_dict(json.loads(config)))
    _set_weights(made)
    weights = dict(tree_flatten(made.parameters()))
    if hasattr(made, "sanitize"):
        # Some loaders normalise a weight: what was normalised once stays as it is.
        weights = made.sanitize(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    _check_loads_back(folder, weights)
    return folder


def _set_weights(model: nn.Module) -> None:
    for path, module in model.named_modules():
        for name, value in list(module.items()):
            if name.startswith("_") or not isinstance(value, mx.array):
                continue
            full_name = f"{path}.{name}"
            random = np.random.default_rng([0, zlib.crc32(full_name.encode())])
            if value.dtype == mx.uint32:
                # Packed weights: any bits are some numbers.
                packed = random.integers(0, 2**32, value.shape, dtype=np.uint32)
                module[name] = mx.array(packed)
            elif mx.issubdtype(value.dtype, mx.floating):
                numbers = mx.array(_values(random, full_name, module, value))
                module[name] = numbers.astype(mx.float32)
    outputs = [
        module
        for _, module in model.named_modules()
        if "weight" in module and module.weight.shape[0] >= VOCABULARY_SIZE
    ]
    if all(isinstance(module, nn.Embedding) for module in outputs):
        for module in outputs:
            module.weight = module.weight * (_TIED_DEVIATION / _LOGITS_DEVIATION)


def _values(random: np.random.Generator, name: str, module: nn.Module, value: mx.array) -> Floats:
    shape = value.shape
    slow = [number for end, number in _SLOW_DECAY.items() if name.endswith(end)]
    if slow:
        return slow[0] + _NOISE * random.standard_normal(shape).astype(np.float32)
    if name.endswith(".signs"):
        return random.choice(np.array([-1.0, 1.0], np.float32), shape)
    noise: Floats = random.standard_normal(shape).astype(np.float32)
    is_weight = name.endswith(".weight") and value.ndim > 1
    if is_weight and shape[0] >= VOCABULARY_SIZE:
        # Embeddings, the output layer, or both in one.
        return noise * np.float32(_LOGITS_DEVIATION / math.sqrt(shape[-1]))
    made: Floats = np.array(value.astype(mx.float32))
    if is_weight or (value.ndim > 1 and np.all(made == made.flat[0])):
        return noise * np.float32(_GAIN / math.sqrt(_inputs(module, shape)))
    if value.ndim > 1:
        # State-space layers start with a table that has a meaning.
        return made
    if any(part in name for part in _ATTENTION_NORMS):
        made = made * _GAIN
    return made + _NOISE * noise


def _inputs(module: nn.Module, shape: tuple[int, ...]) -> int:
    if isinstance(module, nn.Conv1d):
        return math.prod(shape[1:])
    return shape[-1]


def _check_loads_back(folder: Path, weights: dict[str, mx.array]) -> None:
    loaded = dict(tree_flatten(load_model(folder)[0].parameters()))
    other = sorted(set(loaded) ^ set(weights))
    changed = [
        name
        for name, value in weights.items()
        if name in loaded
        and (loaded[name].shape != value.shape or not mx.allclose(loaded[name], value, rtol=1e-5))
    ]
    if other or changed:
        raise ValueError(f"{folder}: not loaded as saved: {(other + changed)[:5]}")
