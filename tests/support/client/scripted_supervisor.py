"""A supervisor that does as a test says: a plain ROUTER that speaks the protocol's messages."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import zmq

from mlxsup.protocol.client_messages import (
    CLIENT_MESSAGES,
    Alive,
    Cancel,
    ClientMessage,
    Deltas,
    Done,
    Failed,
    Generate,
    Ping,
    Reply,
    StatusQuery,
    Usage,
)
from mlxsup.protocol.codec import Decoder, encode
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import RequestId, pack_tokens
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import FinishReason

from support.client.pieces import piece

M = TypeVar("M", bound=Message)

TICK_MS = 100


class Peer:
    """One client's connection to the scripted supervisor."""

    def __init__(self, router: zmq.Socket[bytes], routing_id: bytes) -> None:
        self._router = router
        self._routing_id = routing_id

    def send(self, message: Message) -> None:
        """Send a message of the protocol."""
        self.send_frames(encode(message))

    def send_frames(self, frames: list[bytes]) -> None:
        self._router.send_multipart([self._routing_id, *frames])


Script = Callable[[Peer, ClientMessage], None]
"""Called in the supervisor's thread for each message that comes."""


class ScriptedSupervisor:
    """A supervisor that runs a script on its own thread.

    Args:
        socket_path: where to listen.
        script: what to do with each message.
        is_alive_sent: whether `Alive` goes to every connection that was ever heard of.
    """

    def __init__(self, socket_path: Path, script: Script, *, is_alive_sent: bool = True) -> None:
        self.endpoint = f"ipc://{socket_path}"
        self.received: list[ClientMessage] = []
        self._script = script
        self._is_alive_sent = is_alive_sent
        self._decoder = Decoder(CLIENT_MESSAGES, is_strict=True)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.SNDHWM, 0)  # a full ROUTER drops silently
        self._router.bind(self.endpoint)
        self._stop_asked = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scripted-supervisor")
        self._thread.start()

    def stop(self) -> None:
        """Close the socket, as the death of a supervisor does. Twice is harmless."""
        self._stop_asked.set()
        self._thread.join()
        self._context.term()

    def got(self, kind: type[M]) -> list[M]:
        """The messages of this kind that came so far."""
        return [message for message in self.received if isinstance(message, kind)]

    def _run(self) -> None:
        peers: dict[bytes, Peer] = {}
        try:
            while not self._stop_asked.is_set():
                if not self._router.poll(TICK_MS):
                    for peer in peers.values() if self._is_alive_sent else ():
                        peer.send(Alive())
                    continue
                routing_id, *frames = self._router.recv_multipart()
                message = self._decoder.decode(frames)
                self.received.append(message)
                peer = peers.setdefault(routing_id, Peer(self._router, routing_id))
                self._script(peer, message)
        finally:
            self._router.close(linger=500)


@contextlib.contextmanager
def scripted_supervisor(
    socket_path: Path, script: Script, *, is_alive_sent: bool = True
) -> Iterator[ScriptedSupervisor]:
    """A scripted supervisor that is stopped at the end of the block."""
    supervisor = ScriptedSupervisor(socket_path, script, is_alive_sent=is_alive_sent)
    try:
        yield supervisor
    finally:
        supervisor.stop()


def answer(peer: Peer, message: Message, **values: Any) -> None:
    """Answer a command with these values."""
    assert isinstance(message, CLIENT_MESSAGES)
    peer.send(Reply(id=message.id, value=values))


def send_pieces(peer: Peer, request_id: RequestId, pieces: list[str], first_seq: int = 0) -> None:
    """Send each piece as one `Deltas`; its token id is its place in the stream."""
    for seq, text in enumerate(pieces, first_seq):
        delta = piece(request_id, seq, text, tokens=pack_tokens([seq]))
        peer.send(Deltas(deltas=[delta]))


def finish(
    peer: Peer, request_id: RequestId, count: int, reason: FinishReason = FinishReason.STOP
) -> None:
    """End a stream after that many pieces."""
    usage = Usage(prompt_tokens=3, completion_tokens=count, engine_s=0.25)
    peer.send(Done(id=request_id, seq=count, finish_reason=reason, usage=usage, seed=7))


def fail(peer: Peer, request_id: str, code: str, message: str, **detail: Any) -> None:
    """End a request or a command with an error."""
    error = RemoteError(ErrorCode(code), message, retryable=False, detail=detail)
    peer.send(Failed(id=request_id, error=error))


def say_hello(peer: Peer, message: Message) -> None:
    """A script: five pieces for every request, a reply to a ping, and nothing else."""
    if isinstance(message, Generate):
        send_pieces(peer, message.id, ["He", "llo", ",", " you", "!"])
        finish(peer, message.id, 5)
    elif isinstance(message, Ping):
        answer(peer, message)


class OpenStreams:
    """A script whose streams give one piece and stay open until they are cancelled."""

    def __init__(self) -> None:
        self.open: list[RequestId] = []

    def __call__(self, peer: Peer, message: Message) -> None:
        """Act on one message."""
        if isinstance(message, Generate):
            self.open.append(message.id)
            send_pieces(peer, message.id, ["one"])
        elif isinstance(message, Cancel) and message.id in self.open:
            self.open.remove(message.id)
            finish(peer, message.id, 1, FinishReason.CANCELLED)
        elif isinstance(message, Ping):
            answer(peer, message)
        elif isinstance(message, StatusQuery):
            answer(peer, message, models=[{"name": "m"}])
