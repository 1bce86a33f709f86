"""Processes that a test leaves behind on purpose."""

from __future__ import annotations

import gc
import warnings


def collect_unwaited() -> None:
    """Frees the objects of processes that nobody waits for, which Python warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
