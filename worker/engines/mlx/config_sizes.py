"""Compares the sizes that config.json names with the shapes of the weight files, before a build.

mlx-lm builds what config.json describes, layer by layer, and looks at the weight files afterwards:
10^9 layers fill the memory of the machine. Only what is absurd is refused here, with the key, the
value and what the weight files say; mlx-lm itself refuses what differs a little. No MLX here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...engine import BadModelError

LAYER_KEYS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers",
    "num_kv_reuse_layers", "num_loops",
)  # fmt: skip
WIDTH_KEYS = (
    "hidden_size", "d_model", "n_embd", "dim", "intermediate_size", "moe_intermediate_size",
    "n_inner", "vocab_size", "num_attention_heads", "n_head", "n_heads", "num_key_value_heads",
    "num_kv_heads", "head_dim", "num_experts", "num_local_experts", "n_routed_experts",
    "moe_num_experts",
)  # fmt: skip
NESTED = ("text_config", "llm_config", "language_config")
"""Where a model for more than text keeps the sizes of its language model."""

PACKED = 32
"""Numbers of one bit that one stored number may hold: a stored side is so much shorter at most."""

LEAST_SIDE = 4096
"""What is no larger costs nothing to build, whatever the weight files hold."""

SPARE_LAYERS = 100
"""Some layers have no weights of their own, because they share those of others."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d{1,7})\.")
_NUMBERED = re.compile(r"\.(\d{1,7})\.")


def check_sizes(file: Path, config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise if a size in config.json is none, or cannot fit to the weight files.

    Args:
        file: config.json, for messages.
        config: its content.
        shapes: of the arrays, by name.

    Raises:
        BadModelError: names the key, its value and what the weight files say.
    """
    layers = _count(_LAYER, shapes) or max(len(shapes), _longest(shapes))
    side = max(LEAST_SIDE, PACKED * max(_longest(shapes), _count(_NUMBERED, shapes)))
    for place, sizes in _places(config):
        for key in LAYER_KEYS:
            for value in _values(file, place + key, sizes.get(key)):
                if value > 2 * layers + SPARE_LAYERS:
                    raise BadModelError(
                        f"{file}: {place}{key} is {value}; the weight files hold {layers} layers"
                    )
        for key in WIDTH_KEYS:
            for value in _values(file, place + key, sizes.get(key)):
                if value > side:
                    raise BadModelError(
                        f"{file}: {place}{key} is {value}; the longest side of an array in the"
                        f" weight files is {_longest(shapes)}"
                    )


def _places(config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    nested = [(f"{name}.", config[name]) for name in NESTED if isinstance(config.get(name), dict)]
    return [("", config), *nested]


def _values(file: Path, key: str, value: Any) -> list[int]:
    """Return the sizes under a key: one, or one for each layer; null stands for the usual one."""
    values = value if isinstance(value, list) else [value]
    given = [one for one in values if one is not None]
    for one in given:
        if type(one) not in (int, float) or not (one >= 0 and one == one // 1):
            shown = json.dumps(one)[:40]
            raise BadModelError(f"{file}: {key} is {shown}; it must be a whole number of 0 or more")
    return given


def _count(pattern: re.Pattern[str], names: Mapping[str, Any]) -> int:
    """Return how many are numbered in the names of arrays; 0 if none is."""
    found = (int(number) for name in names for number in pattern.findall(name))
    return max((number + 1 for number in found), default=0)


def _longest(shapes: Mapping[str, Sequence[int]]) -> int:
    return max((side for shape in shapes.values() for side in shape), default=0)
