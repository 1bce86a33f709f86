"""Who is let in: the limits, and the places for newcomers."""

from __future__ import annotations

import random
import resource
import socket
from collections import Counter

import pytest

from mlxsup.supervisor.runtime_folder import connections_within, files_needed
from mlxsup.supervisor.sockets.limits import (
    KEPT_FOR_NEWCOMERS,
    MAX_CONNECTIONS,
    MAX_OF_ONE_PROCESS,
    MIN_CONNECTIONS,
    ConnectionLimits,
    free_files,
)


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
    assert limits.refusal(7) == "process 7 has 128 connections, and cannot have more"
    assert come(limits, 8) == 1
    limits.remove(7)
    assert come(limits, 7, 2) == 1


def test_the_last_places_are_for_processes_that_have_none_P24() -> None:
    limits = ConnectionLimits(200)
    assert come(limits, 1, 100) == 100
    assert come(limits, 2, 50) == 36
    assert limits.refusal(2) == "the daemon has 136 connections, and accepts no more of this kind"
    newcomers = [come(limits, 100 + n) for n in range(KEPT_FOR_NEWCOMERS + 1)]
    assert newcomers == [1] * KEPT_FOR_NEWCOMERS + [0]
    assert limits.admitted == 200
    limits.max_connections = 250
    assert come(limits, 999) == 1


def test_peers_that_cannot_be_told_apart_have_no_share_and_no_places_of_their_own() -> None:
    assert come(ConnectionLimits(400), None, 400) == 400 - KEPT_FOR_NEWCOMERS


def test_the_count_is_that_of_the_connections_P24() -> None:
    dice = random.Random(1)
    limits, there = ConnectionLimits(50 + KEPT_FOR_NEWCOMERS), Counter[int]()
    for _ in range(20_000):
        process = dice.randrange(4)
        if dice.random() < 0.4 and there[process]:
            limits.remove(process)
            there[process] -= 1
        else:
            there[process] += come(limits, process)
        assert limits.admitted == there.total()
        assert all(count <= MAX_OF_ONE_PROCESS for count in there.values())


def test_connections_leave_files_for_models_P24() -> None:
    assert connections_within(4096, 24) == MAX_CONNECTIONS
    assert connections_within(files_needed(24), 24) == MIN_CONNECTIONS


def test_the_free_files_are_those_of_this_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    before = free_files()
    with socket.socket(), socket.socket():
        assert free_files() == before - 2
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft - 7, hard))
    assert free_files() == before - 7
