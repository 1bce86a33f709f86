"""Runs a function over many seeds, on all cores."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def over_seeds(function: Callable[[int], T], seeds: int) -> list[T]:
    """What the function returns for each seed from 1, in order."""
    cores = os.cpu_count() or 1
    with ProcessPoolExecutor(cores) as pool:
        chunk = max(1, seeds // (cores * 8))
        return list(pool.map(function, range(1, seeds + 1), chunksize=chunk))
