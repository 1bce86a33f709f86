"""What a model needs, counted from what its layers keep."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.cache_cost import (
    CHUNK_TOKENS,
    GROWTH_TOKENS,
    cache_bytes,
    tokens_within,
)
from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.ids import ModelName
from mlxsup.supervisor.core.memory.need import Source
from mlxsup.supervisor.core.memory.room import Fits, FitsWithout, NoRoom, find_room

from support.needs import GIB, GROWTH, MIB, need

FULL = CacheLayers(layers=3, token_bytes=10)
WINDOWED = CacheLayers(layers=2, token_bytes=4, window=100)
STATE = CacheLayers(layers=5, row_bytes=7)

# ---------------------------------------------------------------- caches


def test_each_layer_keeps_every_token_and_one_is_there_twice() -> None:
    held = 1000 + GROWTH_TOKENS
    assert cache_bytes([FULL], rows=1, longest=1000) == (3 + 1) * 10 * held
    assert cache_bytes([FULL], rows=4, longest=1000) == 4 * (3 + 1) * 10 * held


def test_a_window_holds_its_tokens_and_the_chunk_that_is_read() -> None:
    assert cache_bytes([WINDOWED], rows=1, longest=50) == 3 * 4 * (50 + GROWTH_TOKENS)
    most = 3 * 4 * (100 + CHUNK_TOKENS)
    assert cache_bytes([WINDOWED], rows=1, longest=10_000) == most
    assert cache_bytes([WINDOWED], rows=1, longest=1_000_000) == most


def test_a_state_takes_the_same_however_long_the_row_is() -> None:
    assert cache_bytes([STATE], rows=2, longest=1) == 2 * (5 + 1) * 7
    assert cache_bytes([STATE], rows=2, longest=100_000) == 2 * (5 + 1) * 7


def test_kinds_of_layers_add_up_and_only_the_largest_is_copied() -> None:
    held = 10 + GROWTH_TOKENS
    each = 3 * 10 * held + 2 * 4 * held + 5 * 7
    assert cache_bytes([FULL, WINDOWED, STATE], rows=1, longest=10) == each + 10 * held


def test_without_rows_or_layers_nothing_is_kept() -> None:
    assert cache_bytes([FULL], rows=0, longest=10) == 0
    assert cache_bytes([], rows=3, longest=10) == 0


layers = st.lists(
    st.builds(
        CacheLayers,
        layers=st.integers(0, 80),
        token_bytes=st.integers(0, 2**20),
        row_bytes=st.integers(0, 2**24),
        window=st.none() | st.integers(1, 8192),
    ),
    max_size=4,
)


@given(layers=layers, rows=st.integers(1, 64), most=st.integers(1, 2**20), size=st.integers(0))
def test_the_longest_context_that_fits_is_found(
    layers: list[CacheLayers], rows: int, most: int, size: int
) -> None:
    tokens = tokens_within(size, layers, rows=rows, most=most)
    assert 0 <= tokens <= most
    if tokens:
        assert cache_bytes(layers, rows=rows, longest=tokens) <= size
    if tokens < most:
        assert cache_bytes(layers, rows=rows, longest=tokens + 1) > size


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
