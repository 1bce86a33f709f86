"""Which layers of a model keep no more than a window of tokens, as mlx-lm decides it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

SLIDING = "sliding_attention"

Config = Mapping[str, Any]
IsSliding = Callable[[Config, int], bool]


def _listed(config: Config, layer: int) -> bool:
    types = config.get("layer_types")
    return isinstance(types, list) and layer < len(types) and types[layer] == SLIDING


def _listed_or_each(period: int) -> IsSliding:
    """As listed; without a list, each layer but the last of a period."""

    def is_sliding(config: Config, layer: int) -> bool:
        if isinstance(config.get("layer_types"), list):
            return _listed(config, layer)
        return (layer + 1) % period != 0

    return is_sliding


def _patterned(default: int) -> IsSliding:
    """Each layer but the last of a period that config.json gives."""

    def is_sliding(config: Config, layer: int) -> bool:
        period = config.get("sliding_window_pattern", default)
        return type(period) is int and period > 0 and (layer + 1) % period != 0

    return is_sliding


def _gemma4(config: Config, layer: int) -> bool:
    listed = isinstance(config.get("layer_types"), list)
    return _listed(config, layer) if listed else _patterned(5)(config, layer)


def _spelled(config: Config, layer: int) -> bool:
    """exaone4: a text with L for each local layer of a period."""
    pattern = config.get("sliding_window_pattern")
    return isinstance(pattern, str) and pattern != "" and pattern[layer % len(pattern)] == "L"


def _alternating(config: Config, layer: int) -> bool:
    """gpt_oss and step3p5 without a list: every other layer, beginning with the first."""
    if config.get("layer_types"):
        return _listed(config, layer)
    return layer % 2 == 0


def _hybrid(config: Config, layer: int) -> bool:
    pattern = config.get("hybrid_layer_pattern")
    return isinstance(pattern, list) and layer < len(pattern) and pattern[layer] == 1


def _numbered(config: Config, layer: int) -> bool:
    layers = config.get("sliding_window_layers")
    return isinstance(layers, list) and layer in layers


def _always(config: Config, layer: int) -> bool:
    return True


WINDOWED: dict[str, tuple[IsSliding, tuple[str, ...], int]] = {
    "afmoe": (_listed, ("sliding_window",), 2048),
    "baichuan_m1": (_numbered, ("sliding_window",), 0),
    "cohere2": (_patterned(4), ("sliding_window",), 4096),
    "exaone4": (_spelled, ("sliding_window",), 0),
    "exaone_moe": (_listed, ("sliding_window",), 0),
    "gear": (_listed, ("sliding_window",), 512),
    "gemma3": (_patterned(6), ("sliding_window",), 512),
    "gemma3_text": (_patterned(6), ("sliding_window",), 512),
    "gemma3n": (_listed, ("sliding_window",), 0),
    "gemma4": (_gemma4, ("sliding_window",), 512),
    "gemma4_text": (_gemma4, ("sliding_window",), 512),
    "gemma4_unified": (_gemma4, ("sliding_window",), 512),
    "gpt_oss": (_alternating, ("sliding_window",), 128),
    "iquestcoder": (_listed, ("sliding_window",), 0),
    "laguna": (_listed, ("sliding_window",), 512),
    "llama": (_listed, ("sliding_window",), 0),
    "llava": (_listed, ("sliding_window",), 0),
    "mellum": (_listed, ("sliding_window",), 0),
    "mimo_v2_flash": (_hybrid, ("sliding_window_size",), 0),
    "ministral3": (_listed, ("sliding_window",), 0),
    "mistral": (_listed, ("sliding_window",), 0),
    "mistral3": (_listed, ("sliding_window",), 0),
    "muse_glimmer": (_listed_or_each(4), ("sliding_window",), 2048),
    "muse_spark": (_listed, ("sliding_window",), 0),
    "olmo3": (_listed_or_each(4), ("sliding_window",), 0),
    "pixtral": (_listed, ("sliding_window",), 0),
    "plamo3": (_patterned(8), ("sliding_window", "window_size"), 2048),
    "recurrent_gemma": (_always, ("attention_window_size",), 0),
    "spark2_5": (_listed_or_each(4), ("sliding_window",), 0),
    "step3p5": (_alternating, ("sliding_window",), 512),
    "xverse": (_listed, ("sliding_window",), 0),
}
"""By model type: which layers have a window, under which names its size is given, and the size if
it is not (0: mlx-lm needs one). Types that are not here keep all tokens, whatever they say about
windows."""

WIDENED = {"plamo3": 1}
"""Tokens that the worker keeps in addition; see `KNOWN_FAULTS` of the engine."""


def find_window(config: Config, layer: int) -> int | None:
    """How many tokens a layer keeps; None: all of them.

    Args:
        config: of the text model, with the model type of the whole.
        layer: the number of the layer.
    """
    model_type = str(config.get("model_type"))
    if model_type not in WINDOWED:
        return None
    is_sliding, names, default = WINDOWED[model_type]
    if not is_sliding(config, layer):
        return None
    given = (config.get(name) for name in names)
    window = next((value for value in given if type(value) is int and value > 0), default)
    return window + WIDENED.get(model_type, 0) if window else None
