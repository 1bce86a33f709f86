"""The worker's socket: one DEALER to the supervisor, owned by the owner thread, never blocking it.

What cannot be sent at once waits in an outbox that the step loop flushes before it steps again, so
that a worker whose supervisor has stopped reading stops stepping and holds a bounded number of
messages. Other threads and signal handlers may call `wake`, and nothing else.
"""

from __future__ import annotations

import socket
import time
from collections import deque

import zmq

from mlxsup.protocol.codec import MAX_FRAME_BYTES, DecodeError, Decoder, encode
from mlxsup.protocol.worker_messages import SUPERVISOR_TO_WORKER, MessageToWorker, WorkerMessage

HIGH_WATER_MARK = 32
"""Messages each way; a step is one message, so this is also how far a worker runs ahead."""

# Plain integers: arithmetic on the enumerations costs more than the calls that use them.
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = _NOBLOCK | int(zmq.SNDMORE)
_POLLIN = int(zmq.POLLIN)


class LinkBrokenError(Exception):
    """The supervisor sent something that it never should; the message says what."""


class Link:
    """Messages to and from the supervisor.

    Attributes:
        sent, received: messages so far; one that waits in the outbox counts as sent.

    Args:
        endpoint: where the supervisor listens for this worker alone.
    """

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.set(zmq.RCVHWM, HIGH_WATER_MARK)
        self._socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self.sent = self.received = 0
        self._outbox: deque[list[bytes]] = deque()
        self._decoder = Decoder(SUPERVISOR_TO_WORKER, is_strict=False)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._wake_receiver.fileno(), zmq.POLLIN)

    @property
    def is_closed(self) -> bool:
        """True if its socket is closed."""
        return bool(self._socket.closed)

    def wake(self) -> None:
        """Ends the current `wait`, or the next one; from any thread or signal handler."""
        try:
            self._wake_sender.send(b"\0")
        except OSError:
            pass  # full: a wake is already on its way; closed: nobody waits any longer

    def receive(self) -> MessageToWorker | None:
        """Return the next message from the supervisor, or None if there is none yet.

        Raises:
            LinkBrokenError: the frames are not a message.
        """
        # After each step there is mostly nothing: a look costs a fifth of an error that says so.
        if not self._socket.getsockopt(zmq.EVENTS) & _POLLIN:  # type: ignore[operator]
            return None
        frames = self._socket.recv_multipart(zmq.NOBLOCK)
        self.received += 1
        try:
            return self._decoder.decode(frames)
        except DecodeError as error:
            raise LinkBrokenError(f"the daemon sent no message: {error.message}") from None

    def send(self, message: WorkerMessage) -> None:
        """Sends now or, if there is no room, later; in order."""
        self.send_frames(encode(message))

    def send_frames(self, frames: list[bytes]) -> None:
        """Sends raw frames, in order with the messages."""
        self.sent += 1
        self._outbox.append(frames)
        self.flush()

    def flush(self) -> bool:
        """Sends what there is room for, and returns whether nothing is left."""
        while self._outbox:
            try:
                # `send_multipart` takes twice as long. If the first frame has room, all have.
                *first, last = self._outbox[0]
                for frame in first:
                    self._socket.send(frame, _MORE)
                self._socket.send(last, _NOBLOCK)
            except zmq.Again:
                return False
            self._outbox.popleft()
        return True

    def wait(self, timeout_s: float | None) -> None:
        """Blocks until a message has come, `wake` was called, or there is room for the outbox."""
        wanted = zmq.POLLIN | zmq.POLLOUT if self._outbox else zmq.POLLIN
        self._poller.register(self._socket, wanted)
        self._poller.poll(None if timeout_s is None else max(0, int(timeout_s * 1000) + 1))
        try:
            while self._wake_receiver.recv(4096):
                pass
        except BlockingIOError:
            pass

    def drop(self) -> None:
        """Ends the connection for good: a fault that the fake engine causes on demand."""
        if self._socket in self._poller:
            self._poller.unregister(self._socket)
        self._socket.close()
        self._socket = self._context.socket(zmq.DEALER)

    def close(self, linger_s: float) -> None:
        """Sends what is left, for at most this long, and closes.

        What the supervisor has no room for at that moment is lost with the connection (measured,
        libzmq 4.3.5: a receiver at its high-water mark drops what waits behind it when the peer
        closes), so its mark must lie well above what it can be behind.
        """
        until = time.monotonic() + linger_s
        while not self.flush() and (left_s := until - time.monotonic()) > 0:
            self._socket.poll(int(left_s * 1000) + 1, zmq.POLLOUT)
        left_s = max(0.0, until - time.monotonic())
        self._socket.close(linger=int(left_s * 1000))
        self._context.term()
        self._wake_receiver.close()
        self._wake_sender.close()
