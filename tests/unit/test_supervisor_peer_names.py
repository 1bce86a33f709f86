"""The process behind a connection has one name, whatever number its connection has."""

from __future__ import annotations

import os
import subprocess
import sys

from mlxsup.protocol.client_messages import Generate, StatusQuery
from mlxsup.protocol.ids import TERMINAL, ModelName, RequestId
from mlxsup.supervisor.process_identity import process_identity, process_start, session_of
from mlxsup.supervisor.sockets.peer_names import PeerNames

NOBODY = 2**22 + 1
"""Above the pids of Linux and macOS."""

PLAIN = Generate(id=RequestId("r"), model=ModelName("m"), client="somebody")
OF_TERMINAL = Generate(id=RequestId("r"), model=ModelName("m"), client=TERMINAL)


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
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    names = PeerNames()
    names.come(7, os.getpid())
    names.come(8, other.pid)
    assert names.of(7, PLAIN) != names.of(8, PLAIN)
    leader = os.getsid(0)
    assert session_of(other.pid) == f"{leader}@{process_start(leader)}"
    assert names.of(7, OF_TERMINAL) == names.of(8, OF_TERMINAL) == f"terminal {session_of(0)}"
    assert names.of(7, StatusQuery(id=RequestId("r"))) == names.of(7, PLAIN)
    other.communicate()
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
        names.come(9, os.getpid())
        assert session_of(pid) is None
        assert names.of(8, OF_TERMINAL) == names.of(8, PLAIN) != ""
        assert names.of(9, OF_TERMINAL).startswith("terminal ")
