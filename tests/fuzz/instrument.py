"""Runs inside the supervisor: counts what its sockets hand over, and times its loop.

The counts lie in a file that both processes map, so that reading them asks nothing of the loop
that is judged.
"""

from __future__ import annotations

import asyncio
import mmap
import time
from enum import IntEnum
from pathlib import Path
from typing import Any

MARK = b"hostile connection"
"""A connection counts from the message that holds this; a frame of a beat's socket that holds it
counts by itself."""

BYTES = 8


class Slot(IntEnum):
    """Where each number is."""

    ARRIVED = 0
    """Messages that came from marked connections of the client socket, the mark included."""
    STRANGERS = 1
    """Messages of a worker's socket that were not its worker's."""
    EARLY_STRANGERS = 2
    """Those of them that came before the worker's HELLO."""
    BEATS = 3
    """Marked messages of a socket for heartbeats."""
    LONGEST_CALL_NS = 4
    """CPU time of the longest callback of the loop."""


class Counters:
    """The mapped file."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), BYTES * len(Slot))
        self._numbers = memoryview(self._map).cast("Q")

    @staticmethod
    def create(path: Path) -> Counters:
        """A new file, all zero."""
        path.write_bytes(bytes(BYTES * len(Slot)))
        return Counters(path)

    def __getitem__(self, slot: Slot) -> int:
        return self._numbers[slot]

    def __setitem__(self, slot: Slot, value: int) -> None:
        self._numbers[slot] = value


def setup(path: Path) -> str:
    """The lines of Python that a supervisor runs to be counted."""
    tests = Path(__file__).parents[1]
    return f"""
sys.path.append({str(tests)!r})
from fuzz.instrument import install
install(Path({str(path)!r}))
"""


def install(path: Path) -> None:
    """Counts from now on."""
    counters = Counters(path)
    _time_calls(counters)
    _count_clients(counters)
    _count_strangers(counters)


def _time_calls(counters: Counters) -> None:
    call, clock = asyncio.Handle._run, time.thread_time_ns

    def timed(self: asyncio.Handle) -> Any:
        start_ns = clock()
        try:
            return call(self)
        finally:
            took_ns = clock() - start_ns
            if took_ns > counters[Slot.LONGEST_CALL_NS]:
                counters[Slot.LONGEST_CALL_NS] = took_ns

    asyncio.Handle._run = timed  # type: ignore[method-assign]


def _count_clients(counters: Counters) -> None:
    from mlxsup.supervisor.sockets.clients import Clients

    take, marked = Clients._take, set[bytes]()

    def counted(self: Clients, frames: list[bytes]) -> None:
        if frames[0] not in marked and MARK in frames[1]:
            marked.add(frames[0])
        if frames[0] in marked:
            counters[Slot.ARRIVED] += 1
        take(self, frames)

    Clients._take = counted  # type: ignore[method-assign]


def _count_strangers(counters: Counters) -> None:
    from mlxsup.supervisor.sockets.worker_link import WorkerLink

    take, take_beat = WorkerLink._take, WorkerLink._take_beat

    def counted(self: WorkerLink, frames: list[bytes]) -> None:
        was_greeted = self._peer is not None
        take(self, frames)
        if self._peer != frames[0]:
            counters[Slot.STRANGERS] += 1
            if not was_greeted:
                counters[Slot.EARLY_STRANGERS] += 1

    def counted_beat(self: WorkerLink, frames: list[bytes]) -> None:
        if MARK in frames[-1]:
            counters[Slot.BEATS] += 1
        take_beat(self, frames)

    WorkerLink._take = counted  # type: ignore[method-assign]
    WorkerLink._take_beat = counted_beat  # type: ignore[method-assign]
