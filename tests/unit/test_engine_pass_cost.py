"""What passes of two sizes say about the cost of a pass and of its tokens; simulated machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.worker.engines.mlx.pass_cost import PassCost
from mlxsup.worker.engines.mlx.prefill import PrefillPacer

PASS_S, TOKEN_S = 0.018, 15e-6
"""Of a large model on a GPU."""


def gpu(cost: int) -> float:
    return PASS_S + TOKEN_S * cost


def learned(costs: Iterable[int], seconds_of: Callable[[int], float] = gpu) -> PassCost:
    found = PassCost()
    for cost in costs:
        found.saw(cost, seconds_of(cost), is_slow=False)
    return found


def burst(pacer: PrefillPacer, rows: int, tokens: int) -> list[int]:
    """The chunks of as many prompts that arrive together."""
    chunks = []
    while tokens > 0:
        longest = min(pacer.chunk(prefill_rows=rows, decode_rows=0), tokens)
        pacer.saw_chunk(
            prefill_rows=rows, longest=longest, decode_rows=0, took_s=gpu(rows * longest)
        )
        chunks.append(longest)
        tokens -= longest
    return chunks


def warm() -> PrefillPacer:
    """A pacer that has seen passes of three sizes."""
    pacer = PrefillPacer(decode_stall_target_s=0.25, step_timeout_s=30.0)
    for size in (8, 128, 1024):
        pacer.saw_chunk(prefill_rows=1, longest=size, decode_rows=0, took_s=gpu(size))
    return pacer


def test_two_sizes_tell_a_pass_from_its_tokens() -> None:
    found = learned([8, 128])
    assert found.pass_s == pytest.approx(PASS_S)
    assert found.unit_s == pytest.approx(TOKEN_S)
    assert found.predict_s(2048) == pytest.approx(gpu(2048))
    assert found.worthwhile == int(PASS_S / TOKEN_S)


def test_sizes_that_are_alike_tell_nothing_of_the_pass() -> None:
    found = learned([8, 16, 31])
    assert found.pass_s == 0.0
    found.saw(64, gpu(64), is_slow=False)
    assert found.pass_s == pytest.approx(PASS_S, rel=0.02)


def test_a_step_that_reads_nothing_is_the_least_that_a_pass_takes() -> None:
    found = PassCost()
    found.saw_none(0.005)
    found.saw(8, 0.013, is_slow=False)
    assert (found.pass_s, found.unit_s) == pytest.approx((0.005, 0.001))
    found.saw(32, 0.005 + 0.001 * 32, is_slow=False)
    assert found.pass_s == pytest.approx(0.005)


def test_a_pass_of_middling_size_is_not_taken_for_slow_tokens() -> None:
    found = learned([8, 64, 16], lambda cost: 1.0 + 0.0625 * cost)
    assert (found.pass_s, found.unit_s) == pytest.approx((1.0, 0.0625))


def test_a_pass_takes_no_less_than_a_step_that_reads_nothing() -> None:
    found = learned([8, 64])
    found.saw_none(0.025)
    assert found.pass_s == 0.025


def test_after_large_passes_are_forgotten_one_that_is_much_larger_counts_at_once() -> None:
    found = learned([8, 1024], lambda cost: 0.001 * cost)
    found.forget_large(8)
    found.saw(32, 0.016, is_slow=False)
    assert found.unit_s == pytest.approx(0.008 / 24)


def test_one_pause_of_the_machine_is_not_the_cost_of_a_pass() -> None:
    found = learned([8, 8, 1024])
    found.saw(8, 0.2, is_slow=False)
    assert found.pass_s == pytest.approx(PASS_S)
    for _ in range(3):
        found.saw(8, 0.2, is_slow=False)
    assert found.pass_s == pytest.approx(0.2, rel=0.01), "three in a row are"


def test_a_first_pass_that_compiles_is_put_right_by_a_larger_one() -> None:
    found = PassCost()
    found.saw(8, 1.5, is_slow=True)
    found.saw(128, gpu(128), is_slow=False)
    assert found.pass_s <= gpu(128)


def test_a_burst_is_read_in_few_passes_once_the_pass_is_known() -> None:
    """Small chunks, that took nearly as long, were taken for a slow machine."""
    assert burst(warm(), rows=16, tokens=32) == [32]
    assert burst(warm(), rows=16, tokens=300) == [128, 172]
    new = PrefillPacer(decode_stall_target_s=0.25, step_timeout_s=30.0)
    assert len(burst(new, rows=16, tokens=32)) > 4


def test_no_chunk_is_mostly_the_pass_however_short_the_stall_should_be() -> None:
    pacer = PrefillPacer(decode_stall_target_s=0.02, step_timeout_s=30.0)
    for size in (8, 128, 1024):
        pacer.saw_chunk(prefill_rows=1, longest=size, decode_rows=0, took_s=gpu(size))
    assert pacer.chunk(prefill_rows=1, decode_rows=4) == int(PASS_S / TOKEN_S)
    assert pacer.chunk(prefill_rows=4, decode_rows=4) == int(PASS_S / TOKEN_S) // 4


def test_a_pass_that_is_slow_itself_stays_below_the_stall_limit() -> None:
    pacer = PrefillPacer(decode_stall_target_s=0.02, step_timeout_s=10.0)
    for size in (8, 32):
        pacer.saw_chunk(prefill_rows=1, longest=size, decode_rows=0, took_s=0.9 + 0.02 * size)
    assert pacer.chunk(prefill_rows=1, decode_rows=4) in (4, 5), "a tenth of the limit, not 45"


@given(
    passes=st.lists(
        st.tuples(st.integers(1, 4096), st.floats(0, 100, allow_nan=False), st.booleans()),
        min_size=1,
    ),
    nothing=st.lists(st.floats(0, 100, allow_nan=False)),
)
def test_estimates_are_never_below_nothing(
    passes: list[tuple[int, float, bool]], nothing: list[float]
) -> None:
    found = PassCost()
    for took_s in nothing:
        found.saw_none(took_s)
    for cost, took_s, is_slow in passes:
        found.saw(cost, took_s, is_slow=is_slow)
        assert found.unit_s is not None
        assert found.unit_s > 0
        assert found.pass_s >= 0
        assert 0 < found.predict_s(1) <= found.predict_s(4096)
        assert found.worthwhile >= 0


@given(
    pass_s=st.floats(0, 1), unit_s=st.floats(1e-6, 0.1), costs=st.lists(st.integers(1, 4096))
)  # fmt: skip
def test_a_steady_machine_is_known_exactly_once_two_sizes_were_seen(
    pass_s: float, unit_s: float, costs: list[int]
) -> None:
    found = learned([8, 64, *costs], lambda cost: pass_s + unit_s * cost)
    if all(cost >= 8 for cost in costs) and unit_s * 64 * 16 >= pass_s + unit_s * 64:
        assert found.predict_s(1024) == pytest.approx(pass_s + unit_s * 1024)
