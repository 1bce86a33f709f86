"""Daemons that may open few files, and how many a process has open."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from .daemon import Daemon


class LimitedDaemon(Daemon):
    """May open that many files.

    Attributes:
        open_files: the limit.
        is_soft: whether the hard limit stays, up to which a daemon raises its own.
    """

    open_files = 4096
    is_soft = False

    def start_command(self) -> list[str]:
        """The command line, under the limit."""
        line = f'ulimit {"-Sn" if self.is_soft else "-n"} {self.open_files}; exec "$@"'
        return ["sh", "-c", line, "sh", *super().start_command()]


@contextmanager
def most_files(process: psutil.Process) -> Iterator[list[int]]:
    """The last item is the most files that the process had open at any look."""
    ended, seen = threading.Event(), [process.num_fds()]

    def look() -> None:
        while not ended.wait(0.01):
            seen.append(max(seen[-1], process.num_fds()))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield seen
    finally:
        ended.set()
        looking.join()
