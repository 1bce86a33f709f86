"""The process at the other end of a connection, its names, and how a connection is ended."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxsup.protocol.client_messages import Generate, StatusQuery
from mlxsup.protocol.ids import TERMINAL, ModelName, RequestId
from mlxsup.supervisor.process_identity import process_identity, process_start, session_of
from mlxsup.supervisor.sockets.peer import Names, credentials_of, end

NOBODY = 2**22 + 1
"""Above the pids of Linux and macOS."""

PLAIN = Generate(id=RequestId("r"), model=ModelName("m"), client="somebody")
OF_TERMINAL = Generate(id=RequestId("r"), model=ModelName("m"), client=TERMINAL)


@contextlib.contextmanager
def two_of_one_session() -> Iterator[tuple[int, int]]:
    """The leader of a session and its child; the tests' own session may be led from outside their
    container, which nobody inside it can see."""
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
    for nobody in (None, NOBODY):
        assert Names.of_process(nobody).of(PLAIN) == Names.of_process(nobody).of(OF_TERMINAL) == ""


def test_the_start_of_a_process_is_part_of_what_identifies_it() -> None:
    identity, start = process_identity(os.getpid()), process_start(os.getpid())
    assert identity is not None
    assert start is not None
    assert identity.startswith(f"{os.getpid()}@")
    assert identity.endswith(start)
    assert process_start(NOBODY) is None


def test_processes_of_one_session_have_one_name_for_it_if_they_want_to() -> None:
    with two_of_one_session() as (leader, other):
        mine, its = Names.of_process(leader), Names.of_process(other)
        assert mine.of(PLAIN) != its.of(PLAIN)
        assert session_of(other) == session_of(leader) == f"{leader}@{process_start(leader)}"
        assert mine.of(OF_TERMINAL) == its.of(OF_TERMINAL) == f"terminal {session_of(leader)}"
        assert mine.of(StatusQuery(id=RequestId("r"))) == mine.of(PLAIN)


def test_another_session_is_another_account_and_one_without_a_leader_is_none() -> None:
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
    with two_of_one_session() as (other_leader, _):
        assert Names.of_process(other_leader).of(OF_TERMINAL).startswith("terminal ")


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


def test_a_peer_whose_words_were_not_read_reads_all_of_its_own_and_then_a_clean_end() -> None:
    """To close with something unread would be a reset, which tells of a daemon that has died."""
    here, there = socket.socketpair()
    there.sendall(b"x" * 50_000)
    here.sendall(b"last words")
    end(here)
    assert there.recv(100) == b"last words"
    assert there.recv(100) == b""
    there.close()
