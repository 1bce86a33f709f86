"""Run inside a supervisor: time its loop, and count what strangers say at its workers' sockets.

The counts lie in a file that both processes map, so that reading them asks nothing of the loop.
"""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

import zmq

STRANGER = b"stranger"
"""The routing id of hostile peers, and the end of their beats."""

Take = Callable[[list[bytes]], None]


class Slot(IntEnum):
    """What each number of the file counts."""

    STRANGERS = 0
    EARLY = 1
    """Strangers' messages that came before any of the worker."""
    BEATS = 2
    LONGEST_CALL_NS = 3
    """CPU time of the longest callback of the loop."""


class Counters:
    """The mapped file, which is made if it is not there."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * len(Slot)))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8 * len(Slot))
        self._numbers = memoryview(self._map).cast("Q")

    def __getitem__(self, slot: Slot) -> int:
        return self._numbers[slot]

    def __setitem__(self, slot: Slot, value: int) -> None:
        self._numbers[slot] = value


def setup(path: Path) -> str:
    """Return the lines of Python that a supervisor runs to be counted."""
    tests = Path(__file__).parents[1]
    return (
        f"sys.path.append({str(tests)!r})\nfrom campaign.instrument import install\n"
        f"install(Path({str(path)!r}))\n"
    )


def install(path: Path) -> None:
    """Count from now on, and let strangers find the sockets of workers that have connected."""
    from mlxsup.protocol.folders import BEAT_SUFFIX
    from mlxsup.supervisor.sockets.transport import LoopSocket
    from mlxsup.supervisor.sockets.worker_link import WorkerLink

    counters, call, make = Counters(path), asyncio.Handle._run, LoopSocket.__init__

    def timed(self: asyncio.Handle) -> None:
        start_ns = time.thread_time_ns()
        try:
            call(self)
        finally:
            took_ns = time.thread_time_ns() - start_ns
            counters[Slot.LONGEST_CALL_NS] = max(counters[Slot.LONGEST_CALL_NS], took_ns)

    def made(self: Any, socket: Any, take: Take, *more: Any, **named: Any) -> None:
        path, has_worker = str(socket.getsockopt(zmq.LAST_ENDPOINT)), False

        def counted(frames: list[bytes]) -> None:
            nonlocal has_worker
            is_stranger = frames[0].startswith(STRANGER)
            has_worker |= not is_stranger
            take(frames)
            counters[Slot.STRANGERS] += is_stranger
            counters[Slot.EARLY] += is_stranger and not has_worker

        def counted_beat(frames: list[bytes]) -> None:
            counters[Slot.BEATS] += frames[-1].endswith(STRANGER)
            take(frames)

        if BEAT_SUFFIX in path:
            make(self, socket, counted_beat, *more, **named)
        else:
            make(self, socket, counted if ".sock" in path else take, *more, **named)

    for owner, name, method in (
        (asyncio.Handle, "_run", timed),
        (LoopSocket, "__init__", made),
        (WorkerLink, "_hide", lambda self, path: None),
    ):
        setattr(owner, name, method)
