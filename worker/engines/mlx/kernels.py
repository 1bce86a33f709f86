"""What MLX for CUDA keeps: the kernels that it compiles, so that they survive a reboot and serve
other models, too, and the graphs and plans that it makes of them, so that it does not give up; no
MLX.

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
from contextlib import suppress
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

    It begins with those that the daemon's other models have had compiled: most models need the
    same ones, and compiling them takes a first load a minute. A folder that cannot be used is
    ignored, which is logged once; so is what is damaged in it.

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
        copy_missing(folder)
        damaged = remove_damaged(folder)
    except OSError as error:
        logger.warning(log_line("compiled kernels not kept", model=model, cause=error.strerror))
        return
    if damaged:
        logger.warning(log_line("damaged kernels deleted", model=model, kernels=damaged))
    os.environ[VARIABLE] = str(folder)


def copy_missing(folder: Path) -> None:
    """Copy the whole kernels of the other models that this folder lacks; their workers may go on
    writing, or delete them meanwhile.

    Raises:
        OSError: nothing can be written to the folder.
    """
    for kernel in (kernel for one in _of_all_models(folder) for kernel in one.glob("*.ptx")):
        if not (folder / kernel.name).exists() and _is_whole(kernel):
            for part in _parts(kernel):
                with suppress(FileNotFoundError):
                    shutil.copyfile(part, folder / part.name)


def remove_damaged(folder: Path) -> int:
    """Deletes each kernel that was not written to its end; returns how many those were.

    Raises:
        OSError: the folder cannot be read, or nothing can be deleted in it.
    """
    damaged = [kernel for kernel in folder.glob("*.ptx") if not _is_whole(kernel)]
    for kernel in damaged:
        kernel.unlink()
    return len(damaged)


def _parts(kernel: Path) -> list[Path]:
    return [kernel, *map(kernel.with_suffix, _PARTS)]


def _is_whole(kernel: Path) -> bool:
    return all(part.is_file() and part.stat().st_size > 0 for part in _parts(kernel))


def discard_if_unloadable(error: Exception) -> None:
    """Deletes the kernels of all models if an error says that one cannot be used, so that the next
    process compiles its own anew; a folder that the user has chosen stays."""
    folder = Path(os.environ.get(VARIABLE) or "/")
    if _UNLOADABLE.search(str(error)) is None or not (folder / MARK).exists():
        return
    kernels = [kernel for one in _of_all_models(folder) for kernel in one.glob("*.ptx")]
    for kernel in kernels:
        kernel.unlink(missing_ok=True)
    logger.warning(log_line("unusable kernels deleted", folder=folder, kernels=len(kernels)))


def _of_all_models(folder: Path) -> list[Path]:
    """Return the folders of this version of all models of the daemon, this one included."""
    return list(folder.parents[2].glob(f"*/{FOLDER_NAME}/{folder.name}"))
