"""What a model needs, counted from what its layers keep."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.ids import ModelName
from mlxsup.supervisor.core.memory.need import Source
from mlxsup.supervisor.core.memory.room import Fits, FitsWithout, NoRoom, find_room

from support.needs import GIB, GROWTH, MIB, need

# ---------------------------------------------------------------- needs


def test_a_need_is_weights_process_and_a_row() -> None:
    one = need(GIB, least=1024, context=4096, rows=4)
    assert one.fixed_bytes == GIB
    assert one.needed_bytes == GIB + GROWTH + 1024 * MIB
    assert one.whole_row_bytes == GIB + GROWTH + 4096 * MIB
    assert one.wanted_bytes == GIB + 4 * (GROWTH + 4096 * MIB)


def test_what_the_configuration_gives_is_the_need() -> None:
    one = need(GIB, least=1024, context=4096, given=3 * GIB)
    assert (one.needed_bytes, one.whole_row_bytes, one.wanted_bytes) == (3 * GIB,) * 3
    assert one.tokens_in(one.needed_bytes) == 2048 - 256


@pytest.mark.parametrize(
    ("size", "tokens"),
    [(GIB - 1, 0), (GIB + GROWTH, 0), (GIB + GROWTH + 7 * MIB, 7), (99 * GIB, 4096)],
)
def test_the_context_in_so_much_memory(size: int, tokens: int) -> None:
    assert need(GIB, least=1024, context=4096).tokens_in(size) == tokens


def test_the_rows_in_so_much_memory() -> None:
    one = need(GIB, rows=4)
    row = GROWTH + 512 * MIB
    assert one.rows_in(GIB + 3 * row - 1, longest=512) == 2
    assert one.rows_in(GIB + 9 * row, longest=512) == 4
    assert one.rows_in(GIB - 1, longest=512) == 0
    assert one.rows_in(99 * GIB, longest=0) == 0
    assert need(GIB, rows=4, layers=()).rows_in(GIB, longest=512) == 4


def test_a_single_estimate_makes_it_an_estimate() -> None:
    assert need(source=Source.MEASURED).is_measured
    assert not need(source=Source.ESTIMATED).is_measured
    assert need(source=Source.ESTIMATED, given=GIB).is_measured


# ---------------------------------------------------------------- room

A, B, C = ModelName("a"), ModelName("b"), ModelName("c")


def test_there_is_room() -> None:
    assert find_room(3, budget_bytes=10, reserved={A: 7}, may_go=[A]) == Fits(spare_bytes=0)


def test_the_first_who_may_go_goes_first() -> None:
    reserved = {A: 4, B: 4}
    found = find_room(5, budget_bytes=10, reserved=reserved, may_go=[B, A])
    assert found == FitsWithout(models=(B,), spare_bytes=1)


def test_whoever_need_not_go_stays() -> None:
    reserved = {A: 1, B: 8}
    found = find_room(9, budget_bytes=10, reserved=reserved, may_go=[A, B])
    assert found == FitsWithout(models=(B,), spare_bytes=0)


def test_who_may_not_go_stays_and_what_is_missing_is_named() -> None:
    found = find_room(7, budget_bytes=10, reserved={A: 4, B: 4}, may_go=[A])
    assert found == NoRoom(missing_bytes=1)


@given(
    sizes=st.dictionaries(st.sampled_from("abcdefg").map(ModelName), st.integers(0, 20)),
    needed=st.integers(0, 40),
    budget=st.integers(0, 60),
)
def test_those_who_go_are_enough_and_none_of_them_could_stay(
    sizes: dict[ModelName, int], needed: int, budget: int
) -> None:
    may_go = sorted(sizes)[: len(sizes) // 2 + 1]
    found = find_room(needed, budget_bytes=budget, reserved=sizes, may_go=may_go)
    used = sum(sizes.values())
    match found:
        case Fits(spare_bytes=spare):
            assert used + needed + spare == budget
        case FitsWithout(models=models, spare_bytes=spare):
            assert used + needed > budget
            assert set(models) <= set(may_go)
            left = used - sum(sizes[model] for model in models)
            assert left + needed + spare == budget
            assert spare >= 0
            assert all(left + sizes[model] + needed > budget for model in models)
        case NoRoom(missing_bytes=missing):
            kept = used - sum(sizes[model] for model in may_go)
            assert kept + needed - missing == budget
            assert missing > 0
