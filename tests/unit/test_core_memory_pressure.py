"""How far the budget is lowered while others need memory: at once, in steps, and not for ever."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.text import GIB
from mlxsup.supervisor.core.memory.pressure import (
    CALM_S,
    STEPS,
    Reading,
    Squeeze,
    Strain,
    room_bytes,
    squeezed,
)

WHOLE = 5000
STEP = WHOLE // STEPS


def reading(available: int, strain: Strain = Strain.UNSAID) -> Reading:
    return Reading(available_bytes=available, kept_free_bytes=100, strain=strain)


def after(*rooms: int | None, start: Squeeze | None = None, whole: int = WHOLE) -> Squeeze:
    """What is left after one room a second."""
    state = start or Squeeze()
    for second, room in enumerate(rooms):
        state = squeezed(state, room, whole, float(second))
    return state


@pytest.mark.parametrize(
    ("available", "strain", "room"),
    [
        (100, Strain.UNSAID, 1000),
        (350, Strain.UNSAID, 1250),
        (0, Strain.UNSAID, 900),
        (350, Strain.STALLED, 1150),
        (0, Strain.EASY, None),
    ],
)
def test_the_room_is_what_models_hold_and_what_is_available_less_what_stays_free(
    available: int, strain: Strain, room: int | None
) -> None:
    assert room_bytes(reading(available, strain), 1000) == room
    assert room_bytes(None, 1000) is None
    assert room_bytes(reading(0), 40) == 0, "never below nothing"


def test_a_shortage_says_what_is_available_and_what_stays_free() -> None:
    short = Reading(available_bytes=GIB // 2, kept_free_bytes=GIB, place="in this control group")
    said = "512.0 MiB is available in this control group, and 1.00 GiB must stay free"
    assert short.shortage == said
    stalled = Reading(available_bytes=GIB, kept_free_bytes=GIB, strain=Strain.STALLED)
    assert stalled.shortage == (
        "1.00 GiB is available on this machine, processes wait for memory, and 2.00 GiB must"
        " stay free"
    )


def test_it_is_lowered_at_once_to_the_step_below_the_room() -> None:
    assert after(WHOLE) == Squeeze()
    assert after(WHOLE - 1).limit_bytes == WHOLE - STEP
    assert after(4000).limit_bytes == 4000
    assert after(3999, 3001).limit_bytes == 3000
    assert after(0).limit_bytes == 0


def test_it_is_raised_after_ten_calm_seconds_and_keeps_a_step_to_spare() -> None:
    assert CALM_S == 10.0
    seconds = int(CALM_S)
    low = [1000]
    assert after(*low, *[3050] * seconds).limit_bytes == 1000
    assert after(*low, *[3050] * (seconds + 1)).limit_bytes == 2900, "a step less than the room"
    assert after(*low, *[WHOLE + STEP - 1] * (seconds + 1)).limit_bytes == WHOLE - STEP
    assert after(*low, *[WHOLE + STEP] * (seconds + 1)) == Squeeze()
    assert after(*low, *[1000 + STEP] * 100).limit_bytes == 1000, "not for a single step"


def test_a_dip_begins_the_ten_seconds_afresh_or_bounds_what_it_is_raised_to() -> None:
    calm = [4000] * int(CALM_S)
    assert after(1000, *calm, 1000 + STEP, *calm).limit_bytes == 1000
    assert after(1000, *calm[1:], 2000, 4000).limit_bytes == 2000 - STEP


def test_nothing_is_lowered_if_nothing_limits_models() -> None:
    assert after(1000, None) == Squeeze()
    assert after(1000, None, 2000).limit_bytes == 2000


rooms = st.lists(st.integers(0, 2 * WHOLE), min_size=1, max_size=60)
wholes = st.integers(1, 2 * WHOLE)


@given(rooms, wholes)
def test_it_never_exceeds_the_budget_nor_the_room_that_there_is(
    series: list[int], whole: int
) -> None:
    state = Squeeze()
    for second, room in enumerate(series):
        state = squeezed(state, room, whole, float(second))
        left = whole if state.limit_bytes is None else state.limit_bytes
        assert 0 <= left <= min(whole, room)


@given(rooms, wholes)
def test_it_comes_back_whole_once_there_is_room_again(series: list[int], whole: int) -> None:
    state = after(*series, whole=whole)
    enough = whole + max(1, whole // STEPS)
    for second in range(2 * int(CALM_S) + 2):  # twice, if there was too little once before
        state = squeezed(state, enough, whole, 1000.0 + second)
    assert state == Squeeze()


@given(
    st.integers(STEP, WHOLE), st.lists(st.integers(0, STEP), min_size=1, max_size=200), st.data()
)
def test_noise_of_a_step_lowers_it_and_raises_it_no_more(
    base: int, noise: list[int], data: st.DataObject
) -> None:
    """However long it lasts: each step at most once, and only down."""
    state = squeezed(Squeeze(), base, WHOLE, 0.0)
    limits, now = [state.limit_bytes], 0.0
    for one in noise:
        now += data.draw(st.sampled_from([0.1, 1.0, 30.0]))
        state = squeezed(state, base - STEP // 2 + one, WHOLE, now)
        limits.append(state.limit_bytes)
    changes = [pair for pair in pairwise(limits) if pair[0] != pair[1]]
    assert len(changes) <= 1, changes
