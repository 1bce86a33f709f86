"""The clients' sockets: who is let in, whose they are, what is open on them, and their turns."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from mlxsup.protocol.client_messages import (
    Cancel,
    Deltas,
    Done,
    Event,
    Failed,
    Generate,
    Reply,
    StatusQuery,
    Subscribe,
)
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import TERMINAL, ConnectionId, Generation, ModelName, RequestId
from mlxsup.protocol.states import FinishReason
from mlxsup.supervisor.process_identity import process_start, session_of
from mlxsup.supervisor.sockets import listener as listener_module
from mlxsup.supervisor.sockets.clients import Client
from mlxsup.supervisor.sockets.connection import Owner, Turns
from mlxsup.supervisor.sockets.limits import (
    KEPT_FILES,
    KEPT_FOR_NEWCOMERS,
    MAX_CONNECTIONS,
    MAX_OF_ONE_PROCESS,
    ConnectionLimits,
    free_files,
)
from mlxsup.supervisor.sockets.listener import Listener
from mlxsup.supervisor.sockets.outbox import Tally
from mlxsup.supervisor.sockets.peer import Names, credentials_of, end
from mlxsup.supervisor.sockets.worker_link import WorkerLink

from support.eventually_async import eventually_async


def come(limits: ConnectionLimits, process: int | None, count: int = 1) -> int:
    """How many of so many connections are let in."""
    admitted = 0
    for _ in range(count):
        if not limits.refusal(process):
            limits.add(process)
            admitted += 1
    return admitted


def test_a_process_has_its_share_and_no_more_P24() -> None:
    limits = ConnectionLimits(MAX_CONNECTIONS)
    assert come(limits, 7, 200) == MAX_OF_ONE_PROCESS
    assert limits.refusal(7) == "process 7 has 128 connections, which is the limit"
    assert come(limits, 8) == 1
    limits.remove(7)
    assert (come(limits, 7, 2), limits.admitted) == (1, MAX_OF_ONE_PROCESS + 1)


def test_the_last_places_are_for_processes_that_have_none_P24() -> None:
    limits = ConnectionLimits(200)
    assert come(limits, 1, 100) == 100
    assert come(limits, 2, 50) == 36
    assert limits.refusal(2) == "the daemon has 136 connections, which is the limit for this kind"
    newcomers = [come(limits, 100 + n) for n in range(KEPT_FOR_NEWCOMERS + 1)]
    assert newcomers == [1] * KEPT_FOR_NEWCOMERS + [0]
    assert limits.admitted == 200
    limits.max_connections = 250
    assert come(limits, 999) == 1
    unknown = come(ConnectionLimits(400), None, 400)
    assert unknown == 400 - KEPT_FOR_NEWCOMERS, "which have no share and no places of their own"


def test_process_whose_connections_have_ended_is_forgotten() -> None:
    limits = ConnectionLimits(200)
    for process in range(3):
        come(limits, process, 2)
    for process in (0, 0, 1):
        limits.remove(process)
    assert (limits.admitted, dict(limits._of_process)) == (3, {1: 1, 2: 2})


def test_the_free_files_are_those_of_this_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    before = free_files()
    with socket.socket(), socket.socket():
        assert free_files() == before - 2
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft - 7, hard))
    assert free_files() == before - 7


class Stage:
    """A listener whose `accept` can be made to fail."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "c.sock"
        self.taken: list[socket.socket] = []
        self.warnings: list[str] = []
        self.listener = Listener(
            self.path,
            self.taken.append,
            kept_files=KEPT_FILES,
            warn=self.warnings.append,
        )
        self.clients: list[socket.socket] = []

    def knock(self) -> None:
        client = socket.socket(socket.AF_UNIX)
        client.connect(str(self.path))
        self.clients.append(client)

    async def taken_in_all(self, count: int) -> None:
        await eventually_async(lambda: len(self.taken) == count)

    def close(self) -> None:
        self.listener.close()
        for one in (*self.taken, *self.clients):
            one.close()


def run(body: Callable[[Stage], Awaitable[None]]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="mlxsup-t-", dir="/tmp"))

    async def main() -> None:
        stage = Stage(folder)
        try:
            async with asyncio.timeout(60):
                await body(stage)
        finally:
            stage.close()

    try:
        asyncio.run(main())
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    "number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EPERM]
)
@pytest.mark.parametrize("retry_s", [3600.0, 0.0], ids=["nothing spins", "it is tried again"])
def test_a_client_that_cannot_be_accepted_waits(
    number: int, retry_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "RETRY_S", retry_s)

    async def body(stage: Stage) -> None:
        tries = 0

        def accept(self: socket.socket) -> tuple[socket.socket, object]:
            nonlocal tries
            tries += 1
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patched:
            patched.setattr(socket.socket, "accept", accept)
            stage.knock()
            await eventually_async(lambda: tries >= (1 if retry_s else 3))
            for _ in range(100 if retry_s else 0):
                await asyncio.sleep(0)  # a round of the loop
                assert tries == 1
        assert stage.warnings == [os.strerror(number)]
        if not retry_s:
            await stage.taken_in_all(1)

    run(body)


def test_no_client_takes_one_of_the_last_files(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(stage: Stage) -> None:
        free = KEPT_FILES + 3
        monkeypatch.setattr(listener_module, "free_files", lambda: free - len(stage.taken))
        for _ in range(5):
            stage.knock()
        await eventually_async(lambda: bool(stage.warnings))
        assert len(stage.taken) == 3
        monkeypatch.setattr(listener_module, "WARNING_INTERVAL_S", 0.0)
        free += 1
        await stage.taken_in_all(4)
        await eventually_async(lambda: len(stage.warnings) >= 2)

    run(body)


def test_a_socket_is_made_again_and_those_in_its_queue_are_taken() -> None:
    async def body(stage: Stage) -> None:
        assert stage.listener.is_reachable
        stage.knock()
        stage.path.unlink()
        assert not stage.listener.is_reachable
        stage.listener.bind_again()
        assert stage.listener.is_reachable
        stage.knock()
        await stage.taken_in_all(2)

    run(body)


def test_the_file_of_another_is_not_removed_at_the_end() -> None:
    async def body(stage: Stage) -> None:
        stage.path.unlink()
        stage.path.write_text("another one's")
        stage.listener.close()
        assert stage.path.read_text() == "another one's"

    run(body)


def test_a_socket_that_cannot_be_made_again_leaves_the_old_one_open() -> None:
    async def body(stage: Stage) -> None:
        moved = stage.path.with_name("moved")
        stage.path.rename(moved)
        stage.path.mkdir()
        with pytest.raises(OSError, match=r"directory|permitted"):
            stage.listener.bind_again()
        stage.path.rmdir()
        moved.rename(stage.path)
        stage.knock()
        await stage.taken_in_all(1)

    run(body)


NO_PID = 2**22 + 1
"""Above the pids of Linux and macOS."""

PLAIN = Generate(id=RequestId("r"), model=ModelName("m"), client="me")
OF_TERMINAL = Generate(id=RequestId("r"), model=ModelName("m"), client=TERMINAL)


@contextlib.contextmanager
def two_of_one_session() -> Iterator[tuple[int, int]]:
    """The leader of a session and its child; the tests' own session may be led from outside their
    container, which is not seen inside it."""
    program = "import os; child = os.fork(); child and print(child, flush=True); os.read(0, 1)"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as leader:
        assert leader.stdout is not None
        yield leader.pid, int(leader.stdout.readline())


def test_a_process_has_one_name_with_its_pid_and_one_that_is_not_found_has_none() -> None:
    pid = os.getpid()
    assert Names.of_process(pid).of(PLAIN) == f"process {pid}@{process_start(pid)}"
    assert Names.of_process(os.getppid()).of(PLAIN) not in ("", Names.of_process(pid).of(PLAIN))
    for pid_or_none in (None, NO_PID):
        names = Names.of_process(pid_or_none)
        assert names.of(PLAIN) == names.of(OF_TERMINAL) == ""


def test_processes_of_one_session_have_one_name_for_it_if_they_want_to() -> None:
    with two_of_one_session() as (leader, other):
        mine, its = Names.of_process(leader), Names.of_process(other)
        assert mine.of(PLAIN) != its.of(PLAIN)
        assert session_of(other) == session_of(leader) == f"{leader}@{process_start(leader)}"
        assert mine.of(OF_TERMINAL) == its.of(OF_TERMINAL) == f"terminal {session_of(leader)}"
        assert mine.of(StatusQuery(id=RequestId("r"))) == mine.of(PLAIN)


def test_session_without_a_leader_is_no_account() -> None:
    command = [sys.executable, "-c", "import os; print(os.getpid(), flush=True); input()"]
    orphan = [sys.executable, "-c", f"import subprocess; subprocess.Popen({command!r})"]
    with subprocess.Popen(
        orphan, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as leader:
        assert leader.stdout is not None
        pid = int(leader.stdout.readline())
        leader.wait()
        names = Names.of_process(pid)
        assert session_of(pid) is None
        assert names.of(OF_TERMINAL) == names.of(PLAIN) != ""


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="the system does not say")
def test_the_process_and_the_user_of_a_connection_are_found(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        child = os.fork()
        if not child:
            with socket.socket(socket.AF_UNIX) as mine:
                mine.connect(str(tmp_path / "s"))
                mine.recv(1)
            os._exit(0)
        accepted, _ = listener.accept()
        assert credentials_of(accepted) == (child, os.getuid())
        end(accepted)
        os.waitpid(child, 0)
        assert credentials_of(accepted) == (None, None)


def test_ending_a_connection_with_unread_bytes_is_no_reset() -> None:
    """To close with something unread would be a reset, which tells of a daemon that has died."""
    here, there = socket.socketpair()
    there.sendall(b"x" * 50_000)
    here.sendall(b"last words")
    end(here)
    assert there.recv(100) == b"last words"
    assert there.recv(100) == b""
    there.close()


ID = RequestId("a")


def test_the_books_hold_what_was_said_until_its_end_was_sent() -> None:
    async def body() -> None:
        accepted, peer = socket.socketpair()
        connection = Client(
            Owner(), Turns(lambda: 0.0), accepted,
            tally=Tally(), id=ConnectionId(b"\0abcd"), pid=None, refusal="",
        )  # fmt: skip
        assert not connection.has_anything_open
        connection.note_said(Generate(id=ID, model=ModelName("m"), body=b""))
        assert (connection.has_anything_open, connection.has_open("b")) == (True, False)
        for id in ("s", "t"):
            connection.note_said(Subscribe(id=RequestId(id)))
        assert (connection.has_open("s"), connection.has_open("t")) == (False, True)
        connection.note_said(Cancel(id=RequestId("s")))
        connection.note_sent(Deltas(deltas=[]))
        connection.note_sent(Event(id=RequestId("t"), value={}))
        connection.note_sent(Reply(id=RequestId("s"), value={}))
        connection.note_said(Cancel(id=ID))
        assert (connection.open, connection.subscription) == ({"a"}, "t")
        connection.note_sent(Done(id=ID, seq=1, finish_reason=FinishReason.STOP))
        assert (connection.open, connection.has_anything_open) == (set(), True)
        connection.note_sent(Failed(id=RequestId("t"), error=RemoteError(ErrorCode.INTERNAL, "m")))
        assert not connection.has_anything_open
        for say in (Subscribe, Cancel):
            connection.note_said(say(id=RequestId("s")))
        assert not connection.has_anything_open
        connection.close()
        peer.close()

    asyncio.run(body())


def test_a_link_without_room_for_beats_is_none_and_leaves_no_socket_open(tmp_path: Path) -> None:
    (tmp_path / "w1.sock.beat").mkdir()

    async def body() -> None:
        before = len(os.listdir("/dev/fd"))
        with pytest.raises(OSError, match=r"directory|permitted|in use"):
            WorkerLink(
                tmp_path / "w1.sock", model=ModelName("m"), generation=Generation(1),
                token="t", post=print, turns=Turns(lambda: 0.0),
            )  # fmt: skip
        assert len(os.listdir("/dev/fd")) == before
        assert not (tmp_path / "w1.sock").exists()

    asyncio.run(body())
