"""The pacing of prefill chunks, on simulated machines."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlxsup.worker.prefill import (
    DEEP,
    FIRST_CHUNK,
    FIXED_CHUNK,
    LARGEST_CHUNK,
    SMALLEST_CHUNK,
    PrefillPacer,
)

STEP_TIMEOUT_S = 30.0


def make_pacer(target_s: float = 0.25, step_timeout_s: float = STEP_TIMEOUT_S) -> PrefillPacer:
    return PrefillPacer(decode_stall_target_s=target_s, step_timeout_s=step_timeout_s)


def prefill(
    pacer: PrefillPacer,
    tokens: int,
    seconds_of: Callable[[int], float],
    *,
    rows: int = 1,
    decode_rows: int = 0,
    decode_s: float = 0.0,
) -> list[tuple[int, float]]:
    """Every chunk of a prompt, with the seconds that it alone took."""
    chunks = []
    while tokens > 0:
        longest = min(pacer.chunk(prefill_rows=rows, decode_rows=decode_rows), tokens)
        took_s = seconds_of(rows * longest)
        pacer.saw_chunk(
            prefill_rows=rows,
            longest=longest,
            decode_rows=decode_rows,
            took_s=took_s + decode_s * bool(decode_rows),
        )
        chunks.append((longest, took_s))
        tokens -= longest
    return chunks


def test_the_first_chunk_is_small_and_shared_by_the_rows() -> None:
    pacer = make_pacer()
    assert pacer.chunk(prefill_rows=1, decode_rows=0) == FIRST_CHUNK
    assert pacer.chunk(prefill_rows=4, decode_rows=0) == FIRST_CHUNK // 4
    assert pacer.chunk(prefill_rows=64, decode_rows=0) == SMALLEST_CHUNK


def test_nothing_is_predicted_before_anything_was_measured() -> None:
    pacer = make_pacer()
    assert pacer.predict_chunk_s(prefill_rows=3, longest=100) == 0.0
    assert pacer.predict_decode_s(3) == 0.0


@pytest.mark.parametrize("unit_s", [0.1, 0.03, 0.001, 1e-5])
def test_chunks_stay_below_the_limits_on_any_machine_C9_F5(unit_s: float) -> None:
    idle = prefill(make_pacer(), 3000, lambda cost: 0.01 + unit_s * cost)
    assert all(took_s <= 2.0 for _, took_s in idle)
    busy = prefill(make_pacer(), 3000, lambda cost: 0.01 + unit_s * cost, decode_rows=2)
    assert all(took_s <= 0.25 for _, took_s in busy[1:])


def test_a_tenth_of_the_step_limit_bounds_every_chunk_F5() -> None:
    pacer = make_pacer(target_s=60.0, step_timeout_s=1.0)
    chunks = prefill(pacer, 500, lambda cost: 0.01 * cost, decode_rows=1)
    assert all(took_s <= 0.1 for _, took_s in chunks)


def test_a_fast_machine_gets_large_chunks_within_few_steps() -> None:
    chunks = prefill(make_pacer(), 20_000, lambda cost: 0.005 + 1e-5 * cost)
    sizes = [size for size, _ in chunks]
    assert max(sizes) == LARGEST_CHUNK
    assert sizes.index(LARGEST_CHUNK) <= 12


def test_growth_is_gradual() -> None:
    sizes = [size for size, _ in prefill(make_pacer(), 20_000, lambda cost: 1e-5 * cost)]
    assert all(later <= 2 * earlier for earlier, later in pairwise(sizes))


def test_a_machine_that_slows_down_is_followed_at_once() -> None:
    pacer = make_pacer()
    prefill(pacer, 2000, lambda cost: 0.01 * cost)
    slow = prefill(pacer, 300, lambda cost: 0.05 * cost)
    assert all(took_s <= 2.0 for _, took_s in slow[1:])


def test_short_prompts_do_not_make_long_ones_slow() -> None:
    """A chunk of two tokens is nearly all overhead; it must not count as a slow machine."""
    pacer = make_pacer()
    pacer.saw_decode(rows=1, took_s=0.015)
    prefill(pacer, 20_000, lambda cost: 0.015 + 1e-4 * cost)
    before = pacer.chunk(prefill_rows=1, decode_rows=0)
    for _ in range(20):
        prefill(pacer, 2, lambda cost: 0.015 + 1e-4 * cost)
    assert pacer.chunk(prefill_rows=1, decode_rows=0) >= before // 2


def test_a_row_that_begins_deep_is_read_in_small_chunks_first_C9() -> None:
    """Behind 35,000 tokens of a prefix cache each token costs five times as much."""
    pacer = make_pacer()
    prefill(pacer, 2000, lambda cost: 0.001 * cost, decode_rows=2)
    pacer.begins_deep(35_000)
    deep = prefill(pacer, 2000, lambda cost: 0.005 * cost, decode_rows=2)
    assert all(took_s <= 0.25 for _, took_s in deep)
    assert max(size for size, _ in deep) > 30, "they grow again"


def test_a_row_that_begins_behind_few_known_tokens_changes_nothing() -> None:
    pacer = make_pacer()
    prefill(pacer, 2000, lambda cost: 0.001 * cost, decode_rows=2)
    before = pacer.chunk(prefill_rows=1, decode_rows=2)
    pacer.begins_deep(DEEP - 1)
    assert pacer.chunk(prefill_rows=1, decode_rows=2) == before


def test_rows_share_the_cost() -> None:
    pacer = make_pacer()
    prefill(pacer, 2000, lambda cost: 0.01 * cost)
    alone = pacer.chunk(prefill_rows=1, decode_rows=0)
    assert pacer.chunk(prefill_rows=4, decode_rows=0) == pytest.approx(alone / 4, abs=1)


def test_decode_is_predicted_for_more_rows_than_were_seen() -> None:
    pacer = make_pacer()
    pacer.saw_decode(rows=2, took_s=0.1)
    assert pacer.predict_decode_s(2) == pytest.approx(0.1)
    assert pacer.predict_decode_s(4) == pytest.approx(0.2)
    assert pacer.predict_decode_s(0) == 0.0


@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 8),
            st.integers(0, 8),
            st.floats(0, 100, allow_nan=False),
        ),
        max_size=60,
    )
)
def test_chunks_are_always_in_range(steps: list[tuple[int, int, float]]) -> None:
    pacer = make_pacer()
    for prefill_rows, decode_rows, took_s in steps:
        longest = pacer.chunk(prefill_rows=prefill_rows, decode_rows=decode_rows)
        assert SMALLEST_CHUNK <= longest <= LARGEST_CHUNK
        if prefill_rows:
            pacer.saw_chunk(
                prefill_rows=prefill_rows, longest=longest, decode_rows=decode_rows, took_s=took_s
            )
        elif decode_rows:
            pacer.saw_decode(rows=decode_rows, took_s=took_s)
        assert pacer.predict_chunk_s(prefill_rows=prefill_rows, longest=longest) >= 0
        assert pacer.predict_decode_s(decode_rows) >= 0


def test_a_fixed_chunk_depends_on_nothing_measured() -> None:
    pacer = PrefillPacer(decode_stall_target_s=0.25, step_timeout_s=30.0, is_fixed=True)
    assert pacer.chunk(prefill_rows=3, decode_rows=0) == FIXED_CHUNK
    pacer.saw_chunk(prefill_rows=1, longest=8, decode_rows=0, took_s=5.0)
    assert pacer.chunk(prefill_rows=1, decode_rows=4) == FIXED_CHUNK
    # The stall limit follows the prediction, so that a slow machine is not taken for stuck.
    assert pacer.predict_chunk_s(prefill_rows=1, longest=FIXED_CHUNK) > 30


def test_a_chunk_is_predicted_by_what_a_token_has_cost_and_a_pass_beside_it_F5() -> None:
    pacer = make_pacer()
    pacer.saw_chunk(prefill_rows=1, longest=10, decode_rows=0, took_s=1.0)
    assert pacer.predict_chunk_s(prefill_rows=2, longest=20) == pytest.approx(4.0)
    pacer.saw_chunk(prefill_rows=1, longest=0, decode_rows=0, took_s=9.0)
    assert pacer.predict_chunk_s(prefill_rows=2, longest=20) == pytest.approx(4.0)
    pacer.saw_decode(rows=1, took_s=0.5)
    assert pacer.predict_chunk_s(prefill_rows=2, longest=20) == pytest.approx(4.5)
    assert pacer.predict_decode_s(0) == 0.0
