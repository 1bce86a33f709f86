"""The process behind a connection has one name, whatever number its connection has."""

from __future__ import annotations

import os

from mlxsup.supervisor.process_identity import process_identity, process_start
from mlxsup.supervisor.sockets.peer_names import PeerNames

NOBODY = 2**22 + 1
"""Above the pids of Linux and macOS."""


def test_connections_of_one_process_have_one_name_and_it_has_its_pid() -> None:
    names = PeerNames()
    names.come(7, os.getpid())
    names.come(9, os.getpid())
    assert names.of(7) == names.of(9) == f"process {os.getpid()}@{process_start(os.getpid())}"
    names.come(8, os.getppid())
    assert names.of(8) not in ("", names.of(7))


def test_a_process_that_is_not_found_has_no_name() -> None:
    names = PeerNames()
    names.come(7, None)
    names.come(8, NOBODY)
    assert (names.of(7), names.of(8), names.of(9)) == ("", "", "")


def test_a_descriptor_that_is_used_again_is_another_connection() -> None:
    names = PeerNames()
    names.come(7, os.getpid())
    names.go(7)
    assert names.of(7) == ""
    names.come(7, os.getpid())
    names.come(7, None)
    assert names.of(7) == ""
    names.go(8)


def test_the_start_of_a_process_is_part_of_what_identifies_it() -> None:
    identity, start = process_identity(os.getpid()), process_start(os.getpid())
    assert identity is not None
    assert start is not None
    assert identity.startswith(f"{os.getpid()}@")
    assert identity.endswith(start)
    assert process_start(NOBODY) is None
