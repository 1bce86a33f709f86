"""How engines share a device: by hand, and for any order of steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.ids import ModelName
from mlxsup.supervisor.core.sharing.device_time import DeviceTime

A, B, C = (ModelName(name) for name in "abc")


def test_an_engine_alone_pays_for_its_whole_step() -> None:
    device = DeviceTime()
    device.begins(A, 10.0)
    assert device.cost_s(A, 1.5, 12.0) == 1.5
    assert device.cost_s(A, 2.0, 14.0) == 2.0


def test_two_engines_at_once_pay_half_each_also_while_the_step_of_the_other_is_under_way() -> None:
    device = DeviceTime()
    device.begins(A, 10.0)
    device.begins(B, 10.0)
    assert device.cost_s(A, 1.0, 11.0) == 0.5
    assert device.cost_s(A, 1.0, 12.0) == 0.5
    assert device.cost_s(B, 2.0, 12.0) == 1.0, "its step began before those of the other"


def test_only_the_time_that_was_shared_counts_less() -> None:
    device = DeviceTime()
    device.begins(A, 0.0)
    device.begins(B, 3.0)
    assert device.cost_s(A, 4.0, 4.0) == 3.5
    device.rests(B, 5.0)
    assert device.cost_s(A, 4.0, 8.0) == 3.5


def test_an_engine_that_rests_or_is_gone_is_not_counted() -> None:
    device = DeviceTime()
    for engine in (A, B, C):
        device.begins(engine, 0.0)
    device.rests(B, 0.0)
    device.rests(B, 0.0)
    assert device.cost_s(A, 1.0, 1.0) == 0.5
    device.rests(C, 1.0)
    assert device.cost_s(A, 1.0, 2.0) == 1.0


def test_time_between_two_periods_of_work_is_nobodys() -> None:
    device = DeviceTime()
    device.begins(A, 0.0)
    device.rests(A, 1.0)
    device.begins(B, 100.0)
    device.begins(A, 101.0)
    assert device.cost_s(B, 2.0, 102.0) == 1.5


def test_more_work_does_not_begin_it_again() -> None:
    device = DeviceTime()
    device.begins(A, 0.0)
    device.begins(B, 1.0)
    device.begins(A, 1.0)
    assert device.cost_s(A, 2.0, 2.0) == 1.5


def test_messages_that_arrive_together_count_by_who_works_now() -> None:
    device = DeviceTime()
    device.begins(A, 5.0)
    device.begins(B, 5.0)
    assert device.cost_s(A, 0.25, 5.0) == 0.125


def test_an_engine_that_nobody_announced_works_from_its_step_on() -> None:
    device = DeviceTime()
    device.begins(A, 1.0)
    assert device.cost_s(B, 1.0, 2.0) == 0.5
    assert device.cost_s(A, 1.0, 2.0) == 1.0


moves = st.lists(
    st.tuples(
        st.sampled_from(["begins", "rests", "steps"]),
        st.sampled_from([A, B, C]),
        st.floats(min_value=0.0, max_value=10.0),
        st.floats(min_value=0.0, max_value=1.0),
    ),
    max_size=60,
)


@given(moves=moves)
def test_engines_are_never_charged_more_than_the_time_that_passed(
    moves: list[tuple[str, ModelName, float, float]],
) -> None:
    """Steps of one engine do not overlap, and it has begun before the first."""
    device = DeviceTime()
    now, charged_s, heard_at = 0.0, 0.0, dict[ModelName, float]()
    for what, engine, pause_s, share in moves:
        now += pause_s
        if what == "begins":
            device.begins(engine, now)
            heard_at.setdefault(engine, now)
        elif what == "rests":
            device.rests(engine, now)
            heard_at.pop(engine, None)
        elif engine in heard_at:
            took_s = (now - heard_at[engine]) * share
            cost_s = device.cost_s(engine, took_s, now)
            assert took_s / 3 - 1e-9 <= cost_s <= took_s
            charged_s += cost_s
            heard_at[engine] = now
    assert charged_s <= now + 1e-6


@pytest.mark.parametrize("engines", [1, 2, 5])
def test_engines_that_all_work_are_charged_the_time_that_passed(engines: int) -> None:
    device = DeviceTime()
    names = [ModelName(f"m{number}") for number in range(engines)]
    for name in names:
        device.begins(name, 0.0)
    charged_s = 0.0
    for moment in range(1, 41):
        for place, name in enumerate(names):
            if moment % (place + 1) == 0:  # each with steps of another length
                charged_s += device.cost_s(name, place + 1.0, float(moment))
    ended = [40 - 40 % (place + 1) for place in range(engines)]
    assert charged_s == pytest.approx(sum(ended) / engines)
