"""The thread that owns a synchronous client's connection; sockets are not thread-safe."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable

import zmq

from .connection import Connection

Task = Callable[[Connection], None]


class IoThread:
    """Runs a connection: carries out what other threads post, and pumps.

    Args:
        endpoint: where the supervisor listens.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        # Bounded by what the client's owner has open at once.
        self._tasks: deque[Task] = deque()
        self._is_closing = False
        # Reentrant, because a signal handler may cancel while its thread is in here.
        self._lock = threading.RLock()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        # A daemon thread: a client that was not closed must not keep the interpreter from exiting.
        self._thread = threading.Thread(target=self._run, name="mlxsup-client", daemon=True)
        self._thread.start()

    def post(self, task: Task) -> bool:
        """Make the thread call this with its connection; False if the client is closed.

        Never blocks on the connection.
        """
        with self._lock:
            if self._is_closing:
                return False
            self._tasks.append(task)
            self._wake()
        return True

    def close(self) -> None:
        """End what is open, flush, and end the thread; a second time does nothing."""
        with self._lock:
            if not self._is_closing:
                self._is_closing = True
                self._wake()
        self._thread.join()
        self._waker.close()
        self._woken.close()

    def _wake(self) -> None:
        try:
            self._waker.send(b"\0")
        except BlockingIOError:
            # It has already been woken.
            pass

    def _run(self) -> None:
        connection = Connection(self._endpoint)
        try:
            while not self._is_closing:
                self._run_tasks(connection)
                is_more = connection.pump()
                self._wait(connection, is_more)
        finally:
            # Even if the loop above broke, no reader may wait for an answer for ever.
            with self._lock:
                self._is_closing = True
            self._run_tasks(connection)
            connection.close()
            connection.terminate()

    def _run_tasks(self, connection: Connection) -> None:
        while self._tasks:
            self._tasks.popleft()(connection)

    def _wait(self, connection: Connection, is_more: bool) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        link = connection.link
        if link is not None and link.monitor is not None:
            poller.register(link.socket, zmq.POLLIN | (zmq.POLLOUT if link.has_unsent else 0))
            poller.register(link.monitor, zmq.POLLIN)
        timeout_ms: int | None = None
        if is_more:
            timeout_ms = 0
        elif (delay_s := connection.delay_s) is not None:
            timeout_ms = int(delay_s * 1000) + 1
        poller.poll(timeout_ms)
        try:
            while self._woken.recv(4096):
                pass
        except BlockingIOError:
            pass
