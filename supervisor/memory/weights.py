"""How large a model's arrays are once they are loaded, and in what precision it computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from .folder import Tensor

FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Types of numbers that MLX computes with, and their sizes in bytes."""

NARROW_PREFIX = "F8_"
"""Types of eight bits: mlx-lm widens them to 16 when it loads them."""

WIDENED_BYTES = 2

DTYPE_NAMES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""As config.json calls them."""

OTHER_PARTS = ("vision", "visual", "audio", "multi_modal", "mm_projector", "patch_merge", "mtp")
"""In the names of arrays that mlx-lm leaves out: it only serves the text model."""


def is_of_text_model(name: str) -> bool:
    """Whether an array of this name is loaded."""
    return not any(part in name for part in OTHER_PARTS)


def loaded_bytes(tensors: Iterable[Tensor]) -> int:
    """What the arrays take in memory."""
    return sum(_loaded_bytes(tensor) for tensor in tensors if is_of_text_model(tensor.name))


def _loaded_bytes(tensor: Tensor) -> int:
    is_narrow = tensor.dtype.startswith(NARROW_PREFIX)
    return tensor.size_bytes * (WIDENED_BYTES if is_narrow else 1)


def number_bytes(config: Mapping[str, Any], tensors: Iterable[Tensor]) -> int:
    """How many bytes a number takes that the model computes, such as one of a key.

    The precision is that of most arrays; those of packed weights are their scales. A model in
    eight bits has scales of 32 and computes in what its config.json says.
    """
    kept = [tensor for tensor in tensors if is_of_text_model(tensor.name)]
    if any(tensor.dtype.startswith(NARROW_PREFIX) for tensor in kept):
        named = config.get("dtype") or config.get("torch_dtype")
        return DTYPE_NAMES.get(str(named), WIDENED_BYTES)
    counts = Counter(tensor.dtype for tensor in kept if tensor.dtype in FLOAT_BYTES)
    return FLOAT_BYTES[counts.most_common(1)[0][0]] if counts else WIDENED_BYTES
