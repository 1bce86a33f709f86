"""How many more models may begin to load now."""

from __future__ import annotations

from collections.abc import Iterable

from .lifecycle.life import Life


class LoadTurns:
    """The turns that are free; a load holds one from its spawn to READY or to its exit.

    A load after a crash only waits for others of its kind, so that a model that was serving comes
    back without waiting for one that never was; every other load waits for all.

    Args:
        lives: of every model.
        most: how many may load at the same time, of each kind.
    """

    def __init__(self, lives: Iterable[Life], most: int) -> None:
        loading = [life for life in lives if life.is_loading]
        self._free = most - len(loading)
        self._free_after_crash = most - sum(life.is_after_crash for life in loading)

    def is_open(self, *, is_after_crash: bool) -> bool:
        """Whether such a load may begin."""
        return (self._free_after_crash if is_after_crash else self._free) > 0

    def take(self, *, is_after_crash: bool) -> None:
        """Such a load begins."""
        self._free -= 1
        self._free_after_crash -= is_after_crash
