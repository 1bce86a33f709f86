"""The budget as a command finds it, next to a daemon that may run."""

from __future__ import annotations

from pathlib import Path

from ..core.memory.budget import Budget
from .machine import find_budget, held_on_device


def command_budget(given_bytes: int | None, backend: str, runtime_dir: Path) -> Budget:
    """The budget that a daemon with this runtime folder has, or would have.

    What the workers of that folder hold on a GPU is not others'.

    Args:
        given_bytes: the key `memory_budget`; None: automatic.
        backend: that MLX uses: `cpu`, `cuda` or `metal`.
        runtime_dir: has the record of the workers that live.

    Raises:
        NoDeviceMemoryError: as of `find_budget`.
    """
    if backend != "cuda" or given_bytes is not None:
        return find_budget(given_bytes, backend)
    from ..workers.leftovers import live_workers

    try:
        own = live_workers(runtime_dir)
    except OSError:  # the folder is another user's, and so are its workers
        own = []
    return find_budget(None, backend, own_bytes=held_on_device(own))
