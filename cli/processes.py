"""Waiting for processes of others to be gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import psutil

LOOK_INTERVAL_S = 0.05
"""There is no event for the end of another's process that every system has."""


class Watched:
    """Processes that shall end; known by pid and start time, so that no later one is mistaken.

    Args:
        pids: of processes that live now, or have just ended.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._processes = []
        for pid in dict.fromkeys(pids):
            try:
                self._processes.append(psutil.Process(pid))
            except psutil.NoSuchProcess:
                continue

    def alive(self) -> list[int]:
        """The pids of those that have not ended; one that only waits to be reaped has."""
        return [process.pid for process in self._processes if _is_alive(process)]

    def wait(
        self,
        limit_s: float,
        on_wait: Callable[[float, list[int]], None],
        leader: int,
        rest_s: float,
    ) -> list[int]:
        """Returns when all are gone, or those that are left at the limit.

        Args:
            limit_s: how long to wait.
            on_wait: told after a second, and whenever another has gone, how long it has been and
                who is left.
            leader: the pid of the one that ends the others.
            rest_s: how long the others are waited for when it is gone.
        """
        start = time.monotonic()
        told: list[int] | None = None
        rest_until_s = rest_s
        while left := self.alive():
            waited_s = time.monotonic() - start
            if leader in left:
                rest_until_s = waited_s + rest_s
            if waited_s >= min(limit_s, rest_until_s):
                return left
            if waited_s >= 1 and left != told:
                told = left
                on_wait(waited_s, left)
            time.sleep(LOOK_INTERVAL_S)
        return []


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
