"""What MLX for CUDA keeps: the kernels that it compiles, so that they survive a reboot, and the
graphs and plans that it makes of them, so that it does not give up; no MLX.

MLX counts how often a graph or a plan was not in its cache, and never forgets: when a process has
missed twice as many as its cache holds (512 shapes of attention, 800 graphs), it raises. A prompt
of a length that the process has not read is such a miss, so every worker would end that way.

By itself it keeps kernels in the folder for temporary files. It reads whatever it finds there, so
a kernel that was only half written when its process was killed would end every later one.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from mlxsup.protocol.text import log_line

VARIABLE = "MLX_PTX_CACHE_DIR"
FOLDER_NAME = "kernels"
MARK = "made-by-mlxsup"
"""The name of an empty file: only a folder that has it is ever cleared."""

_PARTS = (".txt", ".cu")
"""MLX writes these after the kernel itself, in this order."""

_UNLOADABLE = re.compile(r"failed to load compiled|there is no kernel named", re.IGNORECASE)
"""How MLX says that a kernel that it has read is not what it compiled."""

CACHES = {
    "MLX_CUDA_GRAPH_CACHE_SIZE": "4096",
    "MLX_CUDA_SDPA_CACHE_SIZE": "4096",
    "MLX_CUDA_CONV_CACHE_SIZE": "4096",
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
}
"""How much is kept; an entry takes memory only once it is there."""

logger = logging.getLogger(__name__)


def keep_plans() -> None:
    """Has MLX keep more graphs and plans, unless the user has said how many; before anything is
    computed."""
    for name, value in CACHES.items():
        os.environ.setdefault(name, value)


def use_kernel_folder(learned_dir: str | None, *, model: str, version: str) -> None:
    """Has MLX keep its kernels there, unless the user has said where; before anything is computed.

    A folder that cannot be used is ignored, which is logged once; so is what is damaged in it.

    Args:
        learned_dir: where what was learned of the model is kept; None: nothing is.
        model: the model's name, for the log.
        version: of MLX and of the device; kernels of others are deleted.
    """
    if learned_dir is None or VARIABLE in os.environ:
        return
    parent = Path(learned_dir) / FOLDER_NAME
    folder = parent / re.sub(r"[^\w.-]", "_", version)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARK).touch()
        for other in parent.iterdir():
            if other != folder:
                shutil.rmtree(other)
        damaged = remove_damaged(folder)
    except OSError as error:
        logger.warning(log_line("compiled kernels not kept", model=model, cause=error.strerror))
        return
    if damaged:
        logger.warning(log_line("damaged kernels deleted", model=model, kernels=damaged))
    os.environ[VARIABLE] = str(folder)


def remove_damaged(folder: Path) -> int:
    """Deletes each kernel that was not written to its end; returns how many those were.

    Raises:
        OSError: the folder cannot be read, or nothing can be deleted in it.
    """
    damaged = [
        kernel
        for kernel in folder.glob("*.ptx")
        if not all(_has_content(path) for path in (kernel, *map(kernel.with_suffix, _PARTS)))
    ]
    for kernel in damaged:
        kernel.unlink()
    return len(damaged)


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def discard_if_unloadable(error: Exception) -> None:
    """Deletes what is in the folder if an error says that a kernel from it cannot be used, so that
    the next process compiles its kernels anew; a folder that the user has chosen stays."""
    folder = os.environ.get(VARIABLE)
    is_about_kernels = _UNLOADABLE.search(str(error)) is not None
    if folder and is_about_kernels and (Path(folder) / MARK).exists():
        shutil.rmtree(folder, ignore_errors=True)
        logger.warning(log_line("unusable kernels deleted", folder=folder))
