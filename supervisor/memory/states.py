"""How many numbers a layer without keys and values keeps for each row: its state."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .settings import HIDDEN_SIZE, head_dim, number

CONVOLUTION = re.compile(r"([qkv]_)?conv(_?1d)?")
"""The name of a short convolution, whose last inputs are kept."""

STATE_MARKS = ("A_log", "g_norm", "rg_lru", "r_k")
"""Parts of names that only layers with a state have, besides convolutions."""

STATE_NUMBER_BYTES = 4
"""What mlx-lm computes most states in."""

DECAY_DIMS = (
    (("mamba_d_head",), ("mamba_d_state",)),
    (("mamba_head_dim",), ("ssm_state_size",)),
    (("hidden_size_per_head",), ("mamba_d_state",)),
    (("linear_value_head_dim",), ("linear_key_head_dim",)),
    (("head_dim",), ("ssm_state_size", "state_size")),
)
"""Names of the two dimensions of a head's state, one pair for each family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a layer keeps per row.

    Attributes:
        inputs: numbers in the model's own precision: the last inputs of convolutions.
        numbers: numbers of `STATE_NUMBER_BYTES`.
        is_known: whether that is all of it.
    """

    inputs: int = 0
    numbers: int = 0
    is_known: bool = True


def find_state(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> State | None:
    """The state of a part of a layer; None if it has none.

    Args:
        shapes: of the part's arrays, by name, with `.weight` where they have it.
        config: of the text model.
    """
    inputs = sum(_kept_inputs(shape) for name, shape in shapes.items() if _is_convolution(name))
    marks = {mark for mark in STATE_MARKS for name in shapes if mark in name.split(".")}
    if not inputs and not marks:
        return None
    if not marks:
        return State(inputs=inputs)
    if "rg_lru" in marks:
        width = shapes.get("rg_lru.recurrent_param", (0,))[0]
        return State(inputs=inputs, numbers=width, is_known=width > 0)
    if "r_k" in marks:
        return _time_mixing(config)
    decay = next((shape for name, shape in shapes.items() if name.endswith("A_log")), None)
    if decay is None:
        return _linear_attention(inputs, config)
    if len([length for length in decay if length > 1]) == 2:
        return State(inputs=inputs, numbers=math.prod(decay))
    per_head = _head_state(config)
    numbers = 0 if per_head is None else math.prod(decay) * per_head
    return State(inputs=inputs, numbers=numbers, is_known=per_head is not None)


def _is_convolution(name: str) -> bool:
    parts = name.split(".")
    is_weight = len(parts) > 1 and parts[-1] == "weight"
    return is_weight and CONVOLUTION.fullmatch(parts[-2]) is not None


def _kept_inputs(shape: tuple[int, ...]) -> int:
    """All inputs of a convolution but the newest, for each of its channels."""
    if len(shape) != 3:
        return 0
    kernel = max(shape[1:])
    return shape[0] * (kernel - 1)


def _time_mixing(config: Mapping[str, Any]) -> State:
    hidden, width = number(config, HIDDEN_SIZE), head_dim(config)
    if hidden is None or width is None:
        return State(is_known=False)
    return State(inputs=2 * hidden, numbers=hidden * width)


def _linear_attention(inputs: int, config: Mapping[str, Any]) -> State:
    heads, width = number(config, ("num_attention_heads",)), head_dim(config)
    if heads is None or width is None:
        return State(inputs=inputs, is_known=False)
    return State(inputs=inputs, numbers=heads * width * width)


def _head_state(config: Mapping[str, Any]) -> int | None:
    """How many numbers the state of one head has."""
    inner = config.get("linear_attn_config")
    if isinstance(inner, Mapping):
        width = number(inner, ("head_dim",))
        return None if width is None else width * width
    for first, second in DECAY_DIMS:
        one, other = number(config, first), number(config, second)
        if one is not None and other is not None:
            return one * other
    width = head_dim(config)
    return None if width is None else width * width
