"""Which connection a descriptor of libzmq's stands for, and whose it is."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxsup.supervisor.sockets.peers import connection_at, process_of, turn_away


class Listener:
    """A listening socket with one client and the connection between them."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen()
        self.client = socket.socket(socket.AF_UNIX)
        self.client.connect(self.path)
        self.accepted, _ = self.listener.accept()

    def close(self) -> None:
        for one in (self.client, self.accepted, self.listener):
            one.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="mlxsup-t-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def open_(folder: Path) -> Iterator[Listener]:
    listener = Listener(folder / "c.sock")
    yield listener
    listener.close()


def test_the_connection_behind_a_descriptor_is_found_and_left_open(open_: Listener) -> None:
    with connection_at(open_.accepted.fileno(), open_.path) as peer:
        assert peer is not None
        assert peer.fileno() != open_.accepted.fileno()
        assert peer.getsockname() == open_.path
        duplicate = peer.fileno()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(duplicate)
    open_.client.sendall(b"still there")
    assert open_.accepted.recv(100) == b"still there"


def test_whatever_else_a_descriptor_stands_for_is_none(open_: Listener, folder: Path) -> None:
    other = Listener(folder / "other.sock")
    pair = socket.socketpair()
    with (
        (folder / "file").open("w") as file,
        socket.create_server(("127.0.0.1", 0)) as internet,
        socket.create_connection(internet.getsockname()) as there,
    ):
        for descriptor in (
            other.accepted.fileno(),  # came in elsewhere
            open_.client.fileno(),  # the other end
            open_.listener.fileno(),  # has no peer
            pair[0].fileno(),
            there.fileno(),
            file.fileno(),
            999_999,
        ):
            before = sorted(os.listdir("/dev/fd"))
            with connection_at(descriptor, open_.path) as peer:
                assert peer is None, descriptor
            assert len(os.listdir("/dev/fd")) == len(before), "nothing is left open"
    other.close()
    for one in pair:
        one.close()


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="the system does not say")
def test_the_process_of_a_connection_is_named(open_: Listener) -> None:
    assert process_of(open_.accepted) == os.getpid()
    read, write = os.pipe()
    child = os.fork()
    if not child:  # connects, and waits to be let go
        os.close(write)
        with socket.socket(socket.AF_UNIX) as mine:
            mine.connect(open_.path)
            os.read(read, 1)
        os._exit(0)
    os.close(read)
    accepted, _ = open_.listener.accept()
    with accepted:
        assert process_of(accepted) == child
    os.close(write)
    os.waitpid(child, 0)


def test_a_connection_that_has_ended_has_no_process(open_: Listener) -> None:
    open_.accepted.close()
    assert process_of(open_.accepted) is None


def test_who_is_turned_away_reads_the_end_and_so_does_the_holder(open_: Listener) -> None:
    with connection_at(open_.accepted.fileno(), open_.path) as peer:
        assert peer is not None
        turn_away(peer)
        turn_away(peer)
    assert open_.client.recv(10) == b""
    assert open_.accepted.recv(10) == b""
    open_.accepted.close()
    turn_away(open_.accepted)
