"""Waiting until processes of others are gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import psutil

LOOK_INTERVAL_S = 0.05
"""How often to look: not every system has an event for the end of another's process."""


class Watched:
    """Processes that must end; known by pid and start time, so that a later one is not mistaken.

    Args:
        pids: of processes that are alive now or have just ended.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._processes = []
        for pid in dict.fromkeys(pids):
            try:
                self._processes.append(psutil.Process(pid))
            except psutil.NoSuchProcess:
                continue

    def alive(self) -> list[int]:
        """The pids of those that have not ended; one that only waits to be reaped has ended."""
        return [process.pid for process in self._processes if _is_alive(process)]

    def wait(
        self,
        limit_s: float,
        on_wait: Callable[[float, list[int]], None],
        leader: int,
        rest_s: float,
    ) -> list[int]:
        """Returns when all are gone, or at the limit; gives the pids that are left.

        Args:
            limit_s: how long to wait.
            on_wait: called after a second and whenever another is gone, with how long it has been
                and who is left.
            leader: the pid of the process that ends the others.
            rest_s: how long to wait for the others once the leader is gone.
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
