"""Everything that a load imports whatever its model is, for a process that has no model yet."""

from __future__ import annotations

import importlib

MODULES = (
    "mlx.core",
    "mlx.nn",
    "mlx_lm.generate",
    "mlx_lm.models.llama",
    "mlx_lm.tokenizer_utils",
    "mlx_lm.utils",
    "jinja2.ext",
    "jinja2.sandbox",
    "transformers.convert_slow_tokenizer",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.configuration_llama",
    "transformers.tokenization_utils_tokenizers",
    "transformers.utils.chat_template_utils",
)
"""Of others. Most architectures of mlx-lm share what the one of Llama imports."""

OWN_MODULES = (
    "batch",
    "batch_modes",
    "caches",
    "capability_probe",
    "engine",
    "kernels",
    "limits",
    "loader",
    "logits",
    "prefix_cache",
    "text",
    "warm_up",
)


def import_everything() -> None:
    """Imports it, on the thread that will load the model.

    Raises:
        ImportError: MLX is not installed, or not for this machine.
    """
    for name in MODULES:
        importlib.import_module(name)
    for name in OWN_MODULES:
        importlib.import_module(f".{name}", __package__)
