"""What the layers of a model keep for each row, by its config.json and the shapes of its arrays.

The outputs of `k_proj`, `v_proj` or a fused projection are the numbers that a layer keeps for each
token, whatever an architecture calls its heads.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mlxsup.protocol.cache_layers import CacheLayers

from .attention import token_numbers
from .folder import Tensor
from .known_types import KNOWN_TYPES
from .settings import HIDDEN_SIZE, KV_HEADS, head_dim, layer_count, number
from .states import STATE_NUMBER_BYTES, find_state
from .weights import is_of_text_model, number_bytes
from .windows import find_window

_IN_LAYER = re.compile(r"(?P<stack>.*?)\.(?P<layer>\d+)\.(?P<rest>.+)")

Shapes = dict[str, tuple[int, ...]]
Kept = Counter[tuple[int, int, int | None]]
"""How many caches have the same bytes per token, bytes per row and window."""

UNKNOWN_TYPE = "counted as if every layer kept all tokens: model type {} is not known here"
NO_NAMES = "counted from config.json: the names of its arrays do not say what a layer keeps"
UNKNOWN_STATE = "the state of some layers is left out: config.json does not say how large it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What the layers keep.

    Attributes:
        layers: in groups of equal ones.
        remark: why the model may take another amount; empty if nothing is known.
    """

    layers: tuple[CacheLayers, ...]
    remark: str = ""


def find_layout(config: Mapping[str, Any], tensors: Iterable[Tensor]) -> Layout:
    """What the layers of a model keep for each row.

    Args:
        config: of the text model, with the model type of the whole.
        tensors: of all weight files.
    """
    kept = [tensor for tensor in tensors if is_of_text_model(tensor.name)]
    size = number_bytes(config, kept)
    model_type = str(config.get("model_type"))
    remark = "" if model_type in KNOWN_TYPES else UNKNOWN_TYPE.format(model_type)
    counts: Kept = Counter()
    is_complete = True
    for layer, parts in _parts(config, kept).items():
        for shapes in parts.values():
            is_complete &= _count(counts, shapes, config, layer, size)
    if not counts:
        return Layout(layers=_from_config(config, size), remark=remark or NO_NAMES)
    counts = _as_run(counts, config, model_type)
    layers = tuple(
        CacheLayers(layers=many, token_bytes=token, row_bytes=row, window=window)
        for (token, row, window), many in sorted(counts.items(), key=str)
    )
    return Layout(layers=layers, remark=remark or ("" if is_complete else UNKNOWN_STATE))


def _parts(config: Mapping[str, Any], tensors: Iterable[Tensor]) -> dict[int, dict[str, Shapes]]:
    """The shapes of each layer's parts: of its attention, of its mixer."""
    total = layer_count(config)
    shared = config.get("num_kv_shared_layers")
    if total is not None and type(shared) is int:
        total -= shared
    parts: dict[int, dict[str, Shapes]] = defaultdict(lambda: defaultdict(dict))
    for tensor in tensors:
        found = _IN_LAYER.fullmatch(tensor.name)
        if found is None or not tensor.shape:
            continue
        layer = int(found["layer"])
        if total is None or layer < total:
            part, _, rest = found["rest"].partition(".")
            parts[layer][f"{found['stack']}.{part}"][rest] = tensor.shape
    return parts


def _count(counts: Kept, shapes: Shapes, config: Mapping[str, Any], layer: int, size: int) -> bool:
    """Counts what a part of a layer keeps; returns whether that is all of it."""
    state = find_state(shapes, config)
    if state is not None:
        row = state.inputs * size + state.numbers * STATE_NUMBER_BYTES
        counts[0, row, None] += 1
        return state.is_known
    weights = {
        name.removesuffix(".weight"): shape
        for name, shape in shapes.items()
        if name.endswith(".weight")
    }
    for numbers in token_numbers(weights, config, layer):
        counts[numbers * size, 0, find_window(config, layer)] += 1
        if "conv_k" in shapes:  # the last keys and values are kept before their convolution, too
            counts[0, numbers * size, None] += 1
    return True


def _as_run(counts: Kept, config: Mapping[str, Any], model_type: str) -> Kept:
    """What is kept by types that run their layers otherwise than once each."""
    if model_type == "nanbeige":
        loops = number(config, ("num_loops",)) or 1
        return Counter({kept: many * loops for kept, many in counts.items()})
    if model_type == "iquestloopcoder":
        window = number(config, ("loop_window_size",)) or 64
        again = Counter({(token, row, window): many for (token, row, _), many in counts.items()})
        return counts + again
    if model_type == "hunyuan":
        # Layers that take the keys of the one before keep them again.
        total = layer_count(config) or 0
        kept = max(counts)
        counts[kept] += max(0, total - sum(counts.values()))
    return counts


def _from_config(config: Mapping[str, Any], size: int) -> tuple[CacheLayers, ...]:
    """Full attention in every layer, with as many heads of keys as config.json says."""
    total = layer_count(config)
    hidden = number(config, HIDDEN_SIZE)
    heads, width = number(config, KV_HEADS), head_dim(config)
    numbers = heads * width if heads is not None and width is not None else hidden
    if total is None or numbers is None:
        return ()
    return (CacheLayers(layers=total, token_bytes=2 * numbers * size),)
