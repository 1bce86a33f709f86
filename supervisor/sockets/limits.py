"""How many connections there may be, of one process and in all, and how many files are free."""

from __future__ import annotations

import os
import resource
import sys
from collections import Counter

MAX_CONNECTIONS = 1024
"""The limit for all clients together; fewer if the limit of open files is low."""

MAX_OF_ONE_PROCESS = 128

KEPT_FOR_NEWCOMERS = 64
"""This many last places are only for the first connection of a process, so that commands get in."""

MIN_CONNECTIONS = 2 * KEPT_FOR_NEWCOMERS
"""A daemon that could have fewer does not start."""

KEPT_FILES = 64
"""Files that are left for workers: no client is let in while fewer are free."""


class ConnectionLimits:
    """Counts the connections that were let in.

    Attributes:
        max_connections: how many may be let in.
        admitted: how many there are.
    """

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self.admitted = 0
        self._of_process: Counter[int | None] = Counter()  # without zeros

    def refusal(self, process: int | None) -> str:
        """Return why another connection of this process is not let in; empty if it is.

        Args:
            process: its pid; None if the platform does not say.
        """
        count = 0 if process is None else self._of_process[process]
        if count >= MAX_OF_ONE_PROCESS:
            return f"process {process} has {MAX_OF_ONE_PROCESS} connections, which is the limit"
        is_first = process is not None and not count
        free = self.max_connections - self.admitted
        if free <= (0 if is_first else KEPT_FOR_NEWCOMERS):
            return f"the daemon has {self.admitted} connections, which is the limit for this kind"
        return ""

    def add(self, process: int | None) -> None:
        """Count a connection that was let in."""
        self.admitted += 1
        self._of_process[process] += 1

    def remove(self, process: int | None) -> None:
        """Count a connection that was let in and has ended."""
        self.admitted -= 1
        self._of_process[process] -= 1
        if not self._of_process[process]:
            del self._of_process[process]


def free_files() -> int:
    """Return how many more files this process may open now, by its limit; below 0 if it was
    lowered.

    Asked again each time, because the limit of a running process can be changed.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    try:
        used = len(os.listdir("/dev/fd")) - 1  # one is the listing's own
    except OSError:  # there is none left to look with
        return 0
    return limit - used
