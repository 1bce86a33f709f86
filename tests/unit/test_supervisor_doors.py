"""Who is let in: the limits, the places for newcomers, and descriptors that are used again."""

from __future__ import annotations

import random

from mlxsup.supervisor.runtime_folder import connections_within, files_needed
from mlxsup.supervisor.sockets.doors import (
    KEPT_FOR_NEWCOMERS,
    MAX_CONNECTIONS,
    MAX_OF_ONE_PROCESS,
    MAX_REFUSED,
    MIN_CONNECTIONS,
    REFUSAL_S,
    Doors,
    Verdict,
)

ADMITTED, REFUSED, TURNED_AWAY = Verdict.ADMITTED, Verdict.REFUSED, Verdict.TURNED_AWAY


def verdicts(doors: Doors, descriptors: range, process: int | None) -> list[Verdict]:
    return [doors.come(descriptor, process, 0.0) for descriptor in descriptors]


def test_a_process_has_its_share_and_no_more_P24() -> None:
    doors = Doors(MAX_CONNECTIONS)
    assert set(verdicts(doors, range(MAX_OF_ONE_PROCESS), 7)) == {ADMITTED}
    assert doors.come(1000, 7, 0.0) is REFUSED
    assert "process 7 has 128 connections" in doors.refusal(1000)
    assert doors.come(1001, 8, 0.0) is ADMITTED
    doors.go(0)
    assert verdicts(doors, range(1002, 1004), 7) == [ADMITTED, REFUSED]
    assert doors.processes == {7, 8}


def test_the_last_places_are_for_processes_that_have_none_P24() -> None:
    doors = Doors(200)
    assert set(verdicts(doors, range(100), 1)) == {ADMITTED}
    said = verdicts(doors, range(100, 150), 2)
    assert said == [ADMITTED] * 36 + [REFUSED] * 14
    newcomers = [doors.come(1000 + n, 100 + n, 0.0) for n in range(KEPT_FOR_NEWCOMERS + 1)]
    assert newcomers == [ADMITTED] * KEPT_FOR_NEWCOMERS + [REFUSED]
    assert doors.admitted == 200


def test_peers_that_cannot_be_told_apart_have_no_share_and_no_places_of_their_own() -> None:
    doors = Doors(400)
    said = verdicts(doors, range(400), None)
    assert said.count(ADMITTED) == 400 - KEPT_FOR_NEWCOMERS


def test_few_refused_ones_wait_and_not_for_long_P24() -> None:
    doors = Doors(MAX_CONNECTIONS)
    verdicts(doors, range(MAX_OF_ONE_PROCESS), 7)
    said = verdicts(doors, range(1000, 1000 + MAX_REFUSED + 1), 7)
    assert said == [REFUSED] * MAX_REFUSED + [TURNED_AWAY]
    assert not doors.knows(1000 + MAX_REFUSED)
    assert doors.take_overdue(REFUSAL_S - 0.01) == []
    doors.go(1000)
    assert doors.take_overdue(REFUSAL_S) == list(range(1001, 1000 + MAX_REFUSED))
    assert doors.take_overdue(REFUSAL_S) == []
    assert doors.refusal(1001) == ""


def test_the_count_is_that_of_the_connections_whatever_ends_unheard_of_P24() -> None:
    dice = random.Random(1)
    doors, there = Doors(50 + KEPT_FOR_NEWCOMERS), dict[int, int]()
    for _ in range(20_000):
        descriptor, process = dice.randrange(80), dice.randrange(4)
        if dice.random() < 0.5:
            doors.go(descriptor)
            there.pop(descriptor, None)
        else:  # its earlier end, if it stood for one, was not heard of
            there.pop(descriptor, None)
            if doors.come(descriptor, process, 0.0) is ADMITTED:
                there[descriptor] = process
        assert doors.admitted == len(there)
    for descriptor in range(80):
        doors.go(descriptor)
    assert doors.admitted == 0
    assert doors.processes == frozenset()


def test_connections_leave_files_for_models_and_for_storms_P24() -> None:
    assert connections_within(20_000, 24) == MAX_CONNECTIONS
    assert connections_within(4096, 24) == MAX_CONNECTIONS
    assert connections_within(files_needed(24), 24) == MIN_CONNECTIONS
    assert files_needed(1) == 2100 + 16 + 128


def test_the_limits_are_those_that_operators_are_told_P24() -> None:
    limits = (MAX_CONNECTIONS, MAX_OF_ONE_PROCESS, KEPT_FOR_NEWCOMERS, MIN_CONNECTIONS)
    assert (*limits, MAX_REFUSED, REFUSAL_S) == (1024, 128, 64, 128, 64, 2.0)


def test_who_is_refused_is_told_why_and_one_that_is_in_is_not_P24() -> None:
    doors = Doors(KEPT_FOR_NEWCOMERS + 1)
    assert doors.come(1, None, 0.0) is ADMITTED
    assert doors.come(2, None, 0.0) is REFUSED
    assert doors.come(3, 9, 0.0) is ADMITTED
    assert doors.come(4, 9, 0.0) is REFUSED
    said = "the daemon has {} connections, and accepts no more of this kind"
    refusals = [doors.refusal(descriptor) for descriptor in (1, 2, 3, 4, 5)]
    assert refusals == ["", said.format(1), "", said.format(2), ""]
    assert [doors.knows(descriptor) for descriptor in range(6)] == [False, *[True] * 4, False]
    assert doors.admitted == 2
    doors = Doors(MAX_CONNECTIONS)
    verdicts(doors, range(MAX_OF_ONE_PROCESS), 7)
    assert doors.come(1000, 7, 5.0) is REFUSED
    assert doors.refusal(1000) == "process 7 has 128 connections, and cannot have more"
    assert doors.take_overdue(6.99) == []
    assert doors.come(1000, 8, 6.0) is ADMITTED
    assert doors.refusal(1000) == ""
    assert doors.take_overdue(9.0) == []
