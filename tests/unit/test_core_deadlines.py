"""What is due next: one time for each subject, taken in the order of the times."""

from __future__ import annotations

from mlxsup.protocol.ids import ModelName, RequestKey
from mlxsup.supervisor.core.deadlines import Deadlines

A, B, C = (ModelName(name) for name in "abc")


def test_subjects_are_due_at_their_time_and_not_before() -> None:
    deadlines = Deadlines()
    assert (deadlines.earliest(), deadlines.take_due(1e9), len(deadlines)) == (None, [], 0)
    deadlines.set(A, 3.0)
    deadlines.set(RequestKey(7), 1.0)
    deadlines.set(B, 2.0)
    assert (deadlines.earliest(), len(deadlines)) == (1.0, 3)
    assert deadlines.take_due(0.9) == []
    assert deadlines.take_due(2.0) == [7, B]
    assert (deadlines.earliest(), len(deadlines)) == (3.0, 1)
    assert deadlines.take_due(3.0) == [A]
    assert (deadlines.take_due(1e9), len(deadlines)) == ([], 0)


def test_equal_times_are_taken_in_the_order_in_which_they_were_set() -> None:
    deadlines = Deadlines()
    for subject in (C, A, RequestKey(2), B, RequestKey(1)):
        deadlines.set(subject, 1.0)
    assert deadlines.take_due(1.0) == [C, A, 2, B, 1]


def test_the_latest_time_of_a_subject_counts_whether_earlier_later_or_none() -> None:
    deadlines = Deadlines()
    deadlines.set(A, 2.0)
    deadlines.set(A, 5.0)
    assert (deadlines.earliest(), deadlines.take_due(4.0)) == (5.0, [])
    deadlines.set(A, 1.0)
    assert deadlines.take_due(4.0) == [A]
    assert deadlines.take_due(9.0) == [], "once"
    deadlines.set(A, 10.0)
    deadlines.set(A, None)
    deadlines.set(B, None)
    assert (deadlines.earliest(), deadlines.take_due(1e9), len(deadlines)) == (None, [], 0)
    deadlines.set(A, 10.0)
    assert deadlines.take_due(10.0) == [A], "set anew, to the same time as before"


def test_what_is_set_again_to_its_own_time_costs_nothing() -> None:
    deadlines = Deadlines()
    for _ in range(1000):
        deadlines.set(A, 1.0)
    assert deadlines.held == 1


def test_times_that_are_put_off_again_and_again_are_forgotten() -> None:
    deadlines = Deadlines()
    for number in range(64):
        deadlines.set(A, float(number))
    assert deadlines.held == 64, "few enough to be left alone"
    deadlines.set(A, 64.0)
    assert deadlines.held == 1
    assert deadlines.take_due(1e9) == [A]


def test_no_more_than_four_times_for_each_subject_are_kept() -> None:
    deadlines = Deadlines()
    subjects = [RequestKey(number) for number in range(20)]
    for when in range(4):
        for subject in subjects:
            deadlines.set(subject, 1000.0 - when - subject / 100)
    assert deadlines.held == 80
    deadlines.set(subjects[0], 1.0)
    assert deadlines.held == 20
    assert deadlines.earliest() == 1.0, "in order still"
    assert deadlines.take_due(1e9) == [0, *range(19, 0, -1)]
