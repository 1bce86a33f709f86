"""Finds out what models take in memory by asking mlx-lm, without loading them.

The supervisor starts `python -m mlxsup.worker.engines.mlx.estimate PARENT`, writes a line for each
folder to its standard input, and reads a line for each answer. mlx-lm builds the model as for a
worker, but lazily: no weight is read and nothing is computed, because the shapes of arrays are
known without that. A folder is somebody else's: it never runs code of its own (`trust_remote_code`
stays off), and the limits below end this process if a folder makes mlx-lm take too long or too
much.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from mlxsup.protocol.codec import to_map
from mlxsup.protocol.context_length import find_context_length
from mlxsup.protocol.estimate import ModelMemory, estimates_folder, find_kept, keep
from mlxsup.protocol.launch import lower_limit
from mlxsup.protocol.pooling import find_pooling

from ...engine import BadModelError, ModelMissingError
from . import limit_memory
from .imports import stay_offline

MEMORY_BYTES = 3 * 2**30
"""What the process may allocate, on Linux; a model of 400 layers takes a tenth of a GiB."""

CPU_S = 30
"""Time of a processor for each folder, the import included; the largest models take three."""

LIMIT_S = 60
"""Time for each folder by the clock."""

PARENT_LOOK_S = 1.0
MAX_TEXT = 300
"""Letters of a sentence, which may name what a file has made up."""


def main() -> None:
    """Answer every question of standard input in order."""
    limit_memory(MEMORY_BYTES)
    threading.Thread(target=_end_with, args=(int(sys.argv[-1]),), daemon=True).start()
    stay_offline()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # model files print
    for line in sys.stdin.buffer:
        _limit_time()
        print(json.dumps(answer_to(json.loads(line))), file=answers, flush=True)
    os._exit(0)  # to take the interpreter and MLX apart takes long on a busy machine


def answer_to(question: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a question: `number`, `memory` or None, and `problem`.

    Args:
        question: has `number`, `path` and the `key` under which the answer is kept.
    """
    folder = estimates_folder()
    memory, problem = find_kept(question["key"], folder), ""
    if memory is None:
        try:
            memory = estimate(Path(question["path"]))
            keep(question["key"], memory, folder)
        except (BadModelError, ModelMissingError) as error:
            problem = str(error)
        except MemoryError:
            problem = "mlx-lm takes too much memory to build it"
        except Exception as error:  # noqa: BLE001  a model type's own code may raise anything
            problem = f"{type(error).__name__}: {error}"
    value = None if memory is None else to_map(memory)
    return {"number": question["number"], "memory": value, "problem": _readable(problem)}


def estimate(path: Path) -> ModelMemory:
    """Return the memory of the model in a folder, as a worker that loads it would report it.

    Raises:
        ModelMissingError, BadModelError: a worker would refuse the folder.
        Exception: a model type's own code fails.
    """
    import mlx.core as mx

    from .caches import measure_layers
    from .embedding import pass_memory
    from .folder import check_folder
    from .loader import iterate_arrays, load_lazily
    from .pictures import has_vision_tower, is_installed

    if not mx.metal.is_available():
        mx.set_default_device(mx.cpu)  # a context of CUDA takes half a GiB of the GPU
    folder = check_folder(path, lambda share: None)
    if (pooling := find_pooling(path, folder.config)) is not None:
        from .pooled import load_pooled

        pooled = load_pooled(folder, pooling)
        limit = find_context_length(folder.config, 0).tokens
        limit = min(limit, pooling.max_tokens or limit)
        backend = "cpu" if mx.default_device() == mx.cpu else "gpu"
        return ModelMemory(
            weight_bytes=sum(array.nbytes for array in iterate_arrays(pooled)),
            layers=pass_memory(pooled, folder.config, backend, limit),
        )
    model: Any
    if has_vision_tower(folder) and is_installed():
        from .vision import VisionModel, load_vision

        model = VisionModel(load_lazily(folder, load=load_vision)[0])
    else:
        model, _ = load_lazily(folder)
    # Before the pass, which may leave masks and tables of positions in the model.
    weight_bytes = sum(array.nbytes for array in iterate_arrays(model))
    return ModelMemory(weight_bytes=weight_bytes, layers=measure_layers(model))


def _limit_time() -> None:
    """Let the next folder end the process by a signal if it takes too long."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    lower_limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + CPU_S)
    signal.alarm(LIMIT_S)


def _end_with(parent: int) -> None:
    """End the process once its parent is gone, which may be before this begins."""
    while os.getppid() == parent:
        time.sleep(PARENT_LOOK_S)
    os._exit(0)


def _readable(text: str) -> str:
    return " ".join(text.split())[:MAX_TEXT].encode(errors="replace").decode()


if __name__ == "__main__":
    main()
