"""All model types, the model files of mlx-lm that are none, and what is known of some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.utils import MODEL_ARCHITECTURE_REMAPPING, MODEL_REMAPPING

from .configs import CONFIGS


@dataclass(frozen=True, slots=True)
class ModelType:
    """A configuration that makes a tiny model.

    Attributes:
        name: the model type, with a suffix if it is tried in several ways.
        config: what config.json holds.
    """

    name: str
    config: dict[str, Any]


MODEL_TYPES = [ModelType(name, config) for name, config in sorted(CONFIGS.items())]

NO_MODEL = {
    "activations", "base", "bitlinear_layers", "cache", "gated_delta", "mla", "pipeline",
    "rope_utils", "ssm", "switch_layers",
}  # fmt: skip
"""Files of mlx_lm/models that hold layers, caches and functions, and no model type."""

NOT_TRIED = {"olmo"}
"""Files of mlx_lm/models with a model type that is refused; olmo2 and olmo3 are tried."""

UNLOADABLE = {
    "bitnet": "needs Metal",
    "muse_spark": "needs Metal",
    "phi3small": "refused: every answer would be wrong",
}
"""Model types that do not load on MLX's CPU build."""

UNEQUAL_ALONE = {"plamo3": "past its window mlx-lm's own answers depend on the chunks"}
"""Model types whose answers are not those of mlx-lm, even alone."""


def model_file(config: dict[str, Any]) -> str:
    """Return the file of mlx_lm/models, without its ending, that serves a config.json."""
    model_type = config["model_type"]
    for architecture in config.get("architectures") or ():
        if (model_type, architecture) in MODEL_ARCHITECTURE_REMAPPING:
            return str(MODEL_ARCHITECTURE_REMAPPING[model_type, architecture])
    return str(MODEL_REMAPPING.get(model_type, model_type))


def model_types(names: Sequence[str] = ()) -> list[ModelType]:
    """Return those of these names, or all.

    Raises:
        ValueError: there is none of a name.
    """
    known = {model_type.name: model_type for model_type in MODEL_TYPES}
    missing = [name for name in names if name not in known]
    if missing:
        raise ValueError(f"no model type is called {', '.join(missing)}")
    return [known[name] for name in names] if names else MODEL_TYPES
