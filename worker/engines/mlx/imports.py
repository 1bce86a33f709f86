"""Everything that a load imports whatever its model is: for a process that has no model yet, or
while the weights are read."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ...engine import NoDeviceError

LIBRARY = "libmlx.so"
"""In a package of its own on Linux, one for CPUs and one for CUDA, which pip leaves out unasked."""

LIBRARIES = (
    "jinja2.ext",
    "jinja2.sandbox",
    "transformers.convert_slow_tokenizer",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.configuration_llama",
    "transformers.tokenization_utils_tokenizers",
    "transformers.utils.chat_template_utils",
)
"""Others' modules that do not use MLX, so any thread may import them: two thirds of the time."""

MODULES = (
    "mlx.core",
    "mlx.nn",
    "mlx_lm.generate",
    "mlx_lm.models.llama",
    "mlx_lm.tokenizer_utils",
    "mlx_lm.utils",
)
"""Others' modules. Most architectures of mlx-lm share what the one of Llama imports."""

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
    stay_offline()
    for name in (*MODULES, *LIBRARIES):
        importlib.import_module(name)
    for name in OWN_MODULES:
        importlib.import_module(f".{name}", __package__)


def stay_offline() -> None:
    """Keep the libraries from the network and from advice; before they are imported."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"


@contextmanager
def importing_libraries() -> Iterator[None]:
    """Import what does not use MLX on another thread, until both that and the block are over.

    The block must import nothing: of two threads that wait for each other's modules, Python lets
    one go on with half a module.
    """
    thread = threading.Thread(target=_import_libraries, name="imports", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _import_libraries() -> None:
    with suppress(ImportError):  # the load imports them as well, and says what is missing
        for name in LIBRARIES:
            importlib.import_module(name)


@contextmanager
def naming_what_is_missing() -> Iterator[None]:
    """Say what is missing if MLX or mlx-lm cannot be imported.

    Raises:
        NoDeviceError: that is so.
    """
    try:
        yield
    except ImportError as error:
        raise NoDeviceError(f"MLX cannot be imported here: {_missing(error)}") from error


def _missing(error: ImportError) -> str:
    """Return what to install if MLX's library is not there: for Linux it is a package of its own;
    else what the system says."""
    if LIBRARY in str(error) and "No such file" in str(error):
        return "its build for Linux is missing; pip install 'mlxsup[cpu]', or 'mlxsup[cuda]'"
    return str(error)
