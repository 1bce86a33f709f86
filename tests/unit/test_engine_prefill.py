"""The pacing of prefill chunks, on simulated machines."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.worker.engines.mlx.prefill import (
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


def test_no_chunk_is_larger_than_the_engine_wants_them() -> None:
    pacer = PrefillPacer(
        decode_stall_target_s=0.25, step_timeout_s=STEP_TIMEOUT_S, largest_chunk=256
    )
    sizes = [size for size, _ in prefill(pacer, 2000, lambda cost: 0.005 + 1e-5 * cost)]
    assert max(sizes) == 256
    assert sizes.index(256) <= 6


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


def test_the_pass_of_a_prompt_can_be_shared_unless_its_tokens_take_longer() -> None:
    pacer = make_pacer()
    assert pacer.shared_pass_s(1) == 0.0, "nothing was measured"
    for cost in (8, 1024):
        pacer.saw_chunk(prefill_rows=1, longest=cost, decode_rows=0, took_s=0.018 + cost * 0.00002)
    assert pacer.shared_pass_s(850) == pytest.approx(0.018)
    assert pacer.shared_pass_s(950) == 0.0


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


# ---------------------------------------------------------------- the arithmetic, by hand


def pass_s(pacer: PrefillPacer) -> float:
    """What a pass costs beside its tokens."""
    return pacer.predict_chunk_s(prefill_rows=1, longest=0)


@pytest.mark.parametrize(
    ("target_s", "step_timeout_s", "busy_s", "idle_s"),
    [(0.25, 30.0, 0.175, 1.4), (60.0, 30.0, 2.1, 1.4), (60.0, 10.0, 0.7, 0.7)],
)
def test_seven_tenths_of_the_nearest_limit_are_planned_for(
    target_s: float, step_timeout_s: float, busy_s: float, idle_s: float
) -> None:
    pacer = make_pacer(target_s, step_timeout_s)
    assert pacer.target_s(decode_rows=1) == pytest.approx(busy_s)
    assert pacer.target_s(decode_rows=0) == pytest.approx(idle_s)


def test_chunks_before_any_measurement() -> None:
    sizes = [make_pacer().chunk(prefill_rows=rows, decode_rows=0) for rows in (0, 1, 3, 8, 9)]
    assert sizes == [8, 8, 2, 1, 1]
    fixed = PrefillPacer(decode_stall_target_s=0.25, step_timeout_s=30.0, is_fixed=True)
    assert fixed.chunk(prefill_rows=1, decode_rows=0) == 256


def test_a_chunk_fills_the_planned_time_behind_the_cost_of_a_pass() -> None:
    pacer = make_pacer()
    pacer.saw_chunk(prefill_rows=2, longest=50, decode_rows=0, took_s=0.97)  # 9.7 ms a token
    assert pacer.chunk(prefill_rows=1, decode_rows=0) == 144
    assert pacer.chunk(prefill_rows=2, decode_rows=0) == 72
    assert pacer.chunk(prefill_rows=1, decode_rows=1) == 18
    pacer.saw_decode(rows=1, took_s=0.1)
    assert pacer.chunk(prefill_rows=1, decode_rows=0) == 134


def test_a_chunk_at_most_doubles_and_has_its_limits() -> None:
    pacer = make_pacer()
    pacer.saw_chunk(prefill_rows=1, longest=10, decode_rows=0, took_s=0.001)
    assert pacer.chunk(prefill_rows=1, decode_rows=0) == 20
    assert pacer.chunk(prefill_rows=3, decode_rows=0) == 6
    pacer.saw_chunk(prefill_rows=1, longest=4, decode_rows=0, took_s=0.001)
    assert pacer.chunk(prefill_rows=1, decode_rows=0) == 20, "twice the largest, not the latest"
    pacer.saw_chunk(prefill_rows=2, longest=2000, decode_rows=0, took_s=0.001)
    assert pacer.chunk(prefill_rows=1, decode_rows=0) == 2048
    slow = make_pacer()
    slow.saw_chunk(prefill_rows=1, longest=8, decode_rows=0, took_s=80.0)
    assert slow.chunk(prefill_rows=1, decode_rows=0) == 1


@pytest.mark.parametrize(("known", "chunk"), [(2047, 140), (2048, 16)])
def test_from_2048_known_tokens_on_chunks_grow_anew(known: int, chunk: int) -> None:
    pacer = make_pacer()
    pacer.saw_chunk(prefill_rows=1, longest=100, decode_rows=0, took_s=0.999)
    pacer.begins_deep(known)
    assert pacer.chunk(prefill_rows=1, decode_rows=0) == chunk


def test_a_slower_decode_step_counts_at_once_and_a_faster_one_by_three_tenths() -> None:
    pacer, predicted = make_pacer(), []
    for rows, took_s in ((1, 0.1), (1, 0.05), (2, 0.2), (2, 0.2), (1, 0.3), (1, 0.4)):
        pacer.saw_decode(rows=rows, took_s=took_s)
        predicted.append((pacer.predict_decode_s(1), pacer.predict_decode_s(4)))
    assert predicted == [
        pytest.approx((0.1, 0.4)),
        pytest.approx((0.085, 0.34)),
        pytest.approx((0.2, 0.4)),
        pytest.approx((0.2, 0.4)),
        pytest.approx((0.23, 0.92)),  # slower with fewer rows: what that says is not clear
        pytest.approx((0.4, 1.6)),
    ]


def test_the_cost_of_a_pass_is_the_least_seen_and_drifts_up() -> None:
    pacer, seen = make_pacer(), []
    pacer.saw_chunk(prefill_rows=1, longest=10, decode_rows=0, took_s=1.0)
    seen.append(pass_s(pacer))
    for took_s in (0.5, 0.2, 0.7, 0.3):
        pacer.saw_decode(rows=1, took_s=took_s)
        seen.append(pass_s(pacer))
    assert seen == pytest.approx([0.0, 0.5, 0.2, 0.21, 0.2118])


@pytest.mark.parametrize(
    ("decode_rows", "took_s", "unit_s"),
    [
        (1, 2.4, 0.16),  # less the decode part and the pass
        (2, 2.4, 0.12),  # the decode part of two rows
        (0, 2.4, 0.20),
        (1, 0.6, 0.0075),  # half of the step, and of that a quarter, are the chunk's in any case
        (0, 0.0, 1e-10),
    ],
)
def test_what_a_token_cost_is_what_the_rest_of_the_step_leaves(
    decode_rows: int, took_s: float, unit_s: float
) -> None:
    pacer = make_pacer()
    pacer.saw_decode(rows=1, took_s=0.4)
    pacer.saw_chunk(prefill_rows=2, longest=5, decode_rows=decode_rows, took_s=took_s)
    assert pacer.predict_chunk_s(prefill_rows=2, longest=3) == pytest.approx(
        0.4 + 6 * unit_s, abs=0, rel=1e-12
    )


def unit_after(*chunks: tuple[int, float]) -> float:
    """Seconds for each token, after chunks of these lengths and durations."""
    pacer = make_pacer()
    for longest, took_s in chunks:
        pacer.saw_chunk(prefill_rows=1, longest=longest, decode_rows=0, took_s=took_s)
    return pacer.predict_chunk_s(prefill_rows=1, longest=1) - pass_s(pacer)


def test_a_faster_token_counts_by_three_tenths_and_a_slower_one_at_once() -> None:
    assert unit_after((100, 1.0)) == pytest.approx(0.01)
    assert unit_after((100, 1.0), (100, 0.5)) == pytest.approx(0.0085)
    assert unit_after((100, 1.0), (100, 2.0)) == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("longest", "took_s", "is_believed"),
    [(24, 0.1749, False), (24, 0.1751, True), (25, 0.1749, True), (24, 0.16, False)],
)
def test_a_small_chunk_says_that_tokens_are_slow_only_if_it_was_slow_itself(
    longest: int, took_s: float, is_believed: bool
) -> None:
    """A quarter of the largest is large enough; what was planned for a target of 0.25 s is slow."""
    unit_s = unit_after((100, 0.5), (longest, took_s))
    assert unit_s == pytest.approx(took_s / longest if is_believed else 0.005)
