"""The steps that a load runs before READY, as progress: each renews the limit of a stalled load.

Nobody knows how many there will be. With CUDA each of them may compile kernels for half a minute,
so all of them together may take longer than `load_stall_timeout_s`; none of them may.
"""

from __future__ import annotations

from collections.abc import Callable

HALF = 200
"""After this many steps half of the way from the weights to READY is shown."""

MOST = 100_000
"""A load with more steps than this never ends: they are no longer progress."""


class LoadSteps:
    """Counts the steps of one load.

    Args:
        show: takes the progress of the load.
        begin: the progress before the first step, below 1.
    """

    def __init__(self, show: Callable[[float], None], begin: float) -> None:
        self._show = show
        self._begin = begin
        self._taken = 0

    def __call__(self) -> None:
        """Another step has ended, or the first one begins."""
        self._show(self._begin + (1.0 - self._begin) * self._taken / (self._taken + HALF))
        self._taken = min(self._taken + 1, MOST)
