"""The synchronous client when nobody answers, or nobody does any longer."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
import zmq

from mlxsup.client import Client, ConnectionLost
from mlxsup.protocol.client_messages import (
    Deltas,
    Generate,
)
from mlxsup.protocol.ids import pack_tokens
from mlxsup.protocol.message import Message

from support.eventually import eventually
from support.pieces import piece
from support.scripted_supervisor import (
    OpenStreams,
    Peer,
    finish,
    say_hello,
    scripted_supervisor,
)


def test_nobody_listening_is_said_at_once(path: Path) -> None:
    with Client(f"ipc://{path}") as client:
        with pytest.raises(ConnectionLost, match=r"no daemon answers at .*mlxsup start"):
            client.status()
        with pytest.raises(ConnectionLost):
            client.complete("m", prompt="x")


def test_stale_socket_file_is_as_no_daemon_E6(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    assert path.exists()
    with Client(f"ipc://{path}") as client, pytest.raises(ConnectionLost, match="no daemon"):
        client.ping()


def test_a_connection_that_is_turned_away_is_lost_at_once_and_says_why_P24(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        told = threading.Event()

        def turn_away() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.shutdown(socket.SHUT_RDWR)
                told.wait(60.0)

        turning = threading.Thread(target=turn_away)
        turning.start()
        with Client(f"ipc://{path}") as client, pytest.raises(ConnectionLost) as caught:
            client.ping()
        told.set()
        turning.join()
    assert "turned the connection away" in caught.value.message
    assert caught.value.is_turned_away


def test_a_connection_that_ends_before_it_is_answered_was_turned_away_P24(path: Path) -> None:
    listening, heard = threading.Event(), threading.Event()

    def listen_once() -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.bind(f"ipc://{path}")
            listening.set()
            heard.set() if router.poll(30_000) else None

    listener = threading.Thread(target=listen_once)
    listener.start()
    assert listening.wait(60.0)
    with Client(f"ipc://{path}") as client, pytest.raises(ConnectionLost) as caught:
        client.ping()
    listener.join()
    assert heard.is_set()
    assert "ended the connection before it answered" in caught.value.message
    assert caught.value.is_turned_away


def test_death_of_the_supervisor_is_connection_lost_and_the_client_goes_on_P2(path: Path) -> None:
    with Client(f"ipc://{path}") as client:
        with scripted_supervisor(path, OpenStreams()):
            streams = [client.generate("m", prompt="x") for _ in range(3)]
            cancelled = client.generate("m", prompt="x")
            for stream in [*streams, cancelled]:
                assert next(stream).text == "one"
        for stream in streams:
            with pytest.raises(ConnectionLost, match="is gone"):
                next(stream)
        with scripted_supervisor(path, say_hello) as supervisor:
            assert client.complete("m", prompt="x").text == "Hello, you!"
            # Nothing is sent a second time.
            assert len(supervisor.got(Generate)) == 1


def test_what_was_sent_before_the_death_is_not_lost_H7(path: Path) -> None:
    def script(peer: Peer, message: Message) -> None:
        if isinstance(message, Generate):
            for start in range(0, 3000, 10):
                pieces = [
                    piece(message.id, n, "x", tokens=pack_tokens([n]))
                    for n in range(start, start + 10)
                ]
                peer.send(Deltas(deltas=pieces))
            finish(peer, message.id, 3000)

    with Client(f"ipc://{path}") as client:
        with scripted_supervisor(path, script) as supervisor:
            stream = client.generate("m", prompt="x")
            eventually(lambda: supervisor.got(Generate))
        assert len(list(stream)) == 3000
        assert stream.result.token_ids == list(range(3000))


def test_silent_supervisor_is_connection_lost_P2(path: Path) -> None:
    script = OpenStreams()
    with (
        scripted_supervisor(path, script, is_alive_sent=False) as supervisor,
        Client(supervisor.endpoint) as client,
    ):
        stream = client.generate("m", prompt="x")
        next(stream)
        with pytest.raises(ConnectionLost, match="silent"):
            next(stream)
