"""What a worker's process takes besides the arrays of its engine."""

from __future__ import annotations

import psutil

from .engine import EngineBytes


def own_bytes(backend: str, held: EngineBytes) -> int | None:
    """Interpreter, libraries, tokenizer and threads; None if this cannot be told apart.

    On a CPU, arrays are memory of the process like everything else. What a GPU's driver keeps for a
    process is not in the process's own account, and the fake engine only claims to hold memory.

    Args:
        backend: `cpu`, `cuda`, `metal` or `fake`.
        held: by the engine's arrays.
    """
    if backend != "cpu":
        return None
    return max(0, int(psutil.Process().memory_info().rss) - held.active - held.cache)
