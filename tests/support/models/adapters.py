"""LoRA adapters with random matrices, for a model folder of the tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_model

SCALE = 4.0


def linear_layers(model_folder: Path) -> dict[str, tuple[int, int]]:
    """Return the inputs and outputs of the linear layers of a model, by name."""
    found = {}
    for name, module in load_model(model_folder)[0].named_modules():
        if not name.startswith("model.layers"):
            continue
        if isinstance(module, nn.QuantizedLinear):
            outputs, packed = module.weight.shape
            found[name] = (packed * 32 // module.bits, outputs)
        elif isinstance(module, nn.Linear):
            found[name] = (module.weight.shape[1], module.weight.shape[0])
    return found


def make_adapter(
    folder: Path,
    model_folder: Path,
    *,
    seed: int = 1,
    rank: int = 4,
    layers: Sequence[str] = (),
    is_peft: bool = False,
    size: float = 0.3,
) -> Path:
    """Write an adapter that changes answers; return its folder.

    Args:
        folder: created, with its parents.
        model_folder: of the model that it is for.
        seed: of its matrices.
        rank: of its matrices.
        layers: ends of the names of the layers that it changes; none: all linear layers.
        is_peft: whether it has peft's layout, with the same matrices.
        size: of the values, about.
    """
    folder.mkdir(parents=True)
    arrays: dict[str, mx.array] = {}
    shapes = linear_layers(model_folder)
    wanted = {n: s for n, s in shapes.items() if not layers or n.endswith(tuple(layers))}
    for nth, (name, (inputs, outputs)) in enumerate(wanted.items()):
        a = size * mx.random.normal((inputs, rank), key=mx.random.key(1000 * seed + 2 * nth))
        b = size * mx.random.normal((rank, outputs), key=mx.random.key(1000 * seed + 2 * nth + 1))
        if is_peft:
            arrays[f"base_model.model.{name}.lora_A.weight"] = mx.contiguous(a.T)
            arrays[f"base_model.model.{name}.lora_B.weight"] = mx.contiguous(b.T)
        else:
            arrays[f"{name}.lora_a"], arrays[f"{name}.lora_b"] = a, b
    config: dict[str, Any]
    if is_peft:
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": SCALE * rank}
    else:
        parameters = {"rank": rank, "scale": SCALE, "dropout": 0.0, "keys": list(_keys(wanted))}
        config = {"fine_tune_type": "lora", "num_layers": 64, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    name = "adapter_model.safetensors" if is_peft else "adapters.safetensors"
    mx.save_safetensors(str(folder / name), arrays)
    return folder


def _keys(names: Sequence[str] | dict[str, Any]) -> set[str]:
    return {name.split(".", 3)[3] for name in names}
