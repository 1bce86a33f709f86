"""The process behind a connection has one name, whatever number its connection has."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from mlxsup.protocol.client_messages import Generate, StatusQuery
from mlxsup.protocol.ids import TERMINAL, ModelName, RequestId
from mlxsup.supervisor.process_identity import process_identity, process_start, session_of
from mlxsup.supervisor.sockets.peer_names import PeerNames

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


def test_connections_of_one_process_have_one_name_and_it_has_its_pid() -> None:
    names = PeerNames()
    names.come(7, os.getpid())
    names.come(9, os.getpid())
    assert (
        names.of(7, PLAIN)
        == names.of(9, PLAIN)
        == f"process {os.getpid()}@{process_start(os.getpid())}"
    )
    names.come(8, os.getppid())
    assert names.of(8, PLAIN) not in ("", names.of(7, PLAIN))


def test_a_process_that_is_not_found_has_no_name() -> None:
    names = PeerNames()
    names.come(7, None)
    names.come(8, NOBODY)
    assert (names.of(7, PLAIN), names.of(8, PLAIN), names.of(9, PLAIN)) == ("", "", "")


def test_a_descriptor_that_is_used_again_is_another_connection() -> None:
    names = PeerNames()
    names.come(7, os.getpid())
    names.go(7)
    assert names.of(7, PLAIN) == ""
    names.come(7, os.getpid())
    names.come(7, None)
    assert names.of(7, PLAIN) == ""
    names.go(8)


def test_the_start_of_a_process_is_part_of_what_identifies_it() -> None:
    identity, start = process_identity(os.getpid()), process_start(os.getpid())
    assert identity is not None
    assert start is not None
    assert identity.startswith(f"{os.getpid()}@")
    assert identity.endswith(start)
    assert process_start(NOBODY) is None


def test_processes_of_one_session_have_one_name_for_it_if_they_want_to() -> None:
    names = PeerNames()
    with two_of_one_session() as (leader, other):
        names.come(7, leader)
        names.come(8, other)
        assert names.of(7, PLAIN) != names.of(8, PLAIN)
        assert session_of(other) == session_of(leader) == f"{leader}@{process_start(leader)}"
        assert names.of(7, OF_TERMINAL) == names.of(8, OF_TERMINAL)
        assert names.of(7, OF_TERMINAL) == f"terminal {session_of(leader)}"
        assert names.of(7, StatusQuery(id=RequestId("r"))) == names.of(7, PLAIN)
    names.go(7)
    assert names.of(7, OF_TERMINAL) == ""


def test_another_session_is_another_account_and_one_without_a_leader_is_none() -> None:
    command = [sys.executable, "-c", "import os; print(os.getpid(), flush=True); input()"]
    orphan = [sys.executable, "-c", f"import subprocess; subprocess.Popen({command!r})"]
    names = PeerNames()
    with subprocess.Popen(
        orphan, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as leader:
        assert leader.stdout is not None
        pid = int(leader.stdout.readline())
        names.come(7, leader.pid)
        leader.wait()
        names.come(8, pid)
        assert session_of(pid) is None
        assert names.of(8, OF_TERMINAL) == names.of(8, PLAIN) != ""
    with two_of_one_session() as (other_leader, _):
        names.come(9, other_leader)
        assert names.of(9, OF_TERMINAL).startswith("terminal ")
