"""What the caches of a batch take."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.cache_cost import (
    CHUNK_TOKENS,
    GROWTH_TOKENS,
    cache_bytes,
    joining_bytes,
    tokens_within,
)
from mlxsup.protocol.cache_layers import CacheLayers

FULL = CacheLayers(layers=3, token_bytes=10)
WINDOWED = CacheLayers(layers=2, token_bytes=4, window=100)
STATE = CacheLayers(layers=5, row_bytes=7)


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


def test_a_cache_grows_by_256_tokens_and_a_step_reads_2048_at_most() -> None:
    assert (GROWTH_TOKENS, CHUNK_TOKENS) == (256, 2048)


def test_a_row_that_joins_needs_room_for_the_next_tokens_of_all_and_one_alone_does_not() -> None:
    alone = cache_bytes([FULL], rows=1, longest=100)
    assert joining_bytes([FULL], [100]) == alone
    grown = cache_bytes([FULL], rows=3, longest=300 + GROWTH_TOKENS)
    assert joining_bytes([FULL], [100, 300, 7]) == grown
