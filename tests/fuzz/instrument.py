"""Runs inside the supervisor: counts what its sockets hand over, and times its loop.

The counts lie in a file that both processes map, so that reading them asks nothing of the loop
that is judged.
"""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from mlxsup.protocol.folders import BEAT_SUFFIX

if TYPE_CHECKING:
    from mlxsup.supervisor.core.events import Event
    from mlxsup.supervisor.sockets.connection import Connection

Take = Callable[[list[bytes]], None]

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

    def has(self, slot: Slot, value: int) -> bool:
        """Whether a number has come so far."""
        return self._numbers[slot] >= value


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
    _watch_sockets(counters)


def _replace(owner: type, name: str, method: object) -> None:
    """Puts another method in the place of one."""
    setattr(owner, name, method)


def _time_calls(counters: Counters) -> None:
    call, clock = asyncio.Handle._run, time.thread_time_ns

    def timed(self: asyncio.Handle) -> None:
        start_ns = clock()
        try:
            call(self)
        finally:
            took_ns = clock() - start_ns
            if took_ns > counters[Slot.LONGEST_CALL_NS]:
                counters[Slot.LONGEST_CALL_NS] = took_ns

    _replace(asyncio.Handle, "_run", timed)


def _watch_sockets(counters: Counters) -> None:
    """Each socket's messages are counted on their way to whom they are handed to.

    Whose a worker's socket is, its endpoint says; whom it takes for the worker, the event
    that follows that one's HELLO.
    """
    from mlxsup.protocol.worker_messages import Hello
    from mlxsup.supervisor.core.events import WorkerSaid
    from mlxsup.supervisor.sockets.clients import Clients
    from mlxsup.supervisor.sockets.transport import LoopSocket, Socket
    from mlxsup.supervisor.sockets.worker_link import WorkerLink

    make_socket, make_link = LoopSocket.__init__, WorkerLink.__init__
    make_clients = Clients.__init__
    greetings: list[Event] = []

    def socket_made(
        self: LoopSocket, socket: Socket, take: Take, on_drained: Callable[[], None] | None = None
    ) -> None:
        endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        name = endpoint.rstrip(b"\0").decode().rpartition("/")[2]
        if name.endswith(BEAT_SUFFIX):
            take = _count_beats(counters, take)
        elif name.endswith(".sock"):
            take = _count_strangers(counters, take, greetings)
        make_socket(self, socket, take, on_drained)

    def link_made(
        self: WorkerLink, *arguments: Any, post: Callable[[Event], None], **named: Any
    ) -> None:
        def note_and_post(event: Event) -> None:
            if isinstance(event, WorkerSaid) and isinstance(event.message, Hello):
                greetings.append(event)
            post(event)

        make_link(self, *arguments, post=note_and_post, **named)

    def clients_made(self: Clients, *arguments: Any, **named: Any) -> None:
        make_clients(self, *arguments, **named)
        vars(self)["_take"] = _count_marked(counters, self._take)

    _replace(Clients, "__init__", clients_made)
    _replace(LoopSocket, "__init__", socket_made)
    _replace(WorkerLink, "__init__", link_made)
    # Strangers find the sockets of workers that have connected.
    _replace(WorkerLink, "_hide", lambda self, path: None)


def _count_marked(
    counters: Counters, take: Callable[[Connection, list[bytes]], None]
) -> Callable[[Connection, list[bytes]], None]:
    marked = set[bytes]()

    def counted(connection: Connection, frames: list[bytes]) -> None:
        if connection.id not in marked and MARK in frames[0]:
            marked.add(connection.id)
        if connection.id in marked:
            counters[Slot.ARRIVED] += 1
        take(connection, frames)

    return counted


def _count_strangers(counters: Counters, take: Take, greetings: list[Event]) -> Take:
    worker: bytes | None = None

    def counted(frames: list[bytes]) -> None:
        nonlocal worker
        was_greeted = worker is not None
        greetings.clear()
        take(frames)
        if greetings:
            worker = frames[0]
        if worker != frames[0]:
            counters[Slot.STRANGERS] += 1
            if not was_greeted:
                counters[Slot.EARLY_STRANGERS] += 1

    return counted


def _count_beats(counters: Counters, take: Take) -> Take:
    def counted(frames: list[bytes]) -> None:
        if MARK in frames[-1]:
            counters[Slot.BEATS] += 1
        take(frames)

    return counted
