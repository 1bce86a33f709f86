"""All model types, and the model files of mlx-lm that are none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_lm.utils import MODEL_ARCHITECTURE_REMAPPING, MODEL_REMAPPING

from .configs_a_to_f import MODEL_TYPES_A_TO_F
from .configs_g_to_k import MODEL_TYPES_G_TO_K
from .configs_l_to_m import MODEL_TYPES_L_TO_M
from .configs_n_to_p import MODEL_TYPES_N_TO_P
from .configs_q_to_z import MODEL_TYPES_Q_TO_Z
from .model_type import ModelType

MODEL_TYPES: list[ModelType] = [
    *MODEL_TYPES_A_TO_F,
    *MODEL_TYPES_G_TO_K,
    *MODEL_TYPES_L_TO_M,
    *MODEL_TYPES_N_TO_P,
    *MODEL_TYPES_Q_TO_Z,
]

NO_MODEL = {
    "activations": "functions that models share",
    "base": "what models share",
    "bitlinear_layers": "layers of bitnet",
    "cache": "caches",
    "gated_delta": "a layer that models share",
    "mla": "a layer that models share",
    "pipeline": "a model over several machines",
    "rope_utils": "position embeddings",
    "ssm": "a layer that models share",
    "switch_layers": "layers of experts",
}
"""Files of mlx_lm/models that hold no model type, and what they hold."""

NOT_TRIED = {"olmo": "refused, see below; olmo2 and olmo3 are tried"}
"""Files of mlx_lm/models with a model type that has no row, and why."""


def model_file(config: dict[str, Any]) -> str:
    """The file of mlx_lm/models, without its ending, that a config.json is served by."""
    model_type = config["model_type"]
    for architecture in config.get("architectures") or ():
        if (model_type, architecture) in MODEL_ARCHITECTURE_REMAPPING:
            return str(MODEL_ARCHITECTURE_REMAPPING[model_type, architecture])
    return str(MODEL_REMAPPING.get(model_type, model_type))


def model_types(names: Sequence[str] = ()) -> list[ModelType]:
    """Those of these names, or all.

    Raises:
        ValueError: there is none of a name.
    """
    known = {model_type.name: model_type for model_type in MODEL_TYPES}
    missing = [name for name in names if name not in known]
    if missing:
        raise ValueError(f"no model type is called {', '.join(missing)}")
    return [known[name] for name in names] if names else MODEL_TYPES
