"""A pacer that begins with what an earlier life has learned, on machines that are played."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlxsup.worker.engines.mlx.pace import Pace
from mlxsup.worker.engines.mlx.prefill import (
    CAUTION,
    FIRST_CHUNK,
    FIXED_CHUNK,
    HEADROOM,
    IDLE_TARGET_S,
    LARGEST_CHUNK,
    STEP_TIMEOUT_SHARE,
    PrefillPacer,
)

PASS_S, TOKEN_S = 0.018, 15e-6
STEP_TIMEOUT_S = 30.0
PREDICTIONS = 4.0
"""How many times its prediction a step may take beyond the limit."""


def machine(*, pass_s: float = PASS_S, token_s: float = TOKEN_S) -> Callable[[int], float]:
    return lambda cost: pass_s + token_s * cost


def new_pacer(*, is_fixed: bool = False) -> PrefillPacer:
    return PrefillPacer(
        decode_stall_target_s=0.25, step_timeout_s=STEP_TIMEOUT_S, is_fixed=is_fixed
    )


def read(pacer: PrefillPacer, tokens: int, takes: Callable[[int], float]) -> list[int]:
    """The chunks of a prompt."""
    chunks = []
    while tokens > 0:
        chunk = min(pacer.chunk(prefill_rows=1, decode_rows=0), tokens)
        pacer.saw_chunk(prefill_rows=1, longest=chunk, decode_rows=0, took_s=takes(chunk))
        chunks.append(chunk)
        tokens -= chunk
    return chunks


def resumed(pace: Pace, takes: Callable[[int], float]) -> PrefillPacer:
    """A pacer as the warm-up of a later life leaves it."""
    pacer = new_pacer()
    read(pacer, FIRST_CHUNK, takes)
    pacer.resume(pace)
    return pacer


def learned(takes: Callable[[int], float], tokens: int = 8000) -> Pace:
    pacer = new_pacer()
    read(pacer, tokens, takes)
    pacer.saw_decode(rows=2, took_s=takes(2))
    pace = pacer.learned()
    assert pace is not None
    return pace


def test_a_pace_is_learned_once_two_sizes_have_told_the_parts_apart() -> None:
    pacer = new_pacer()
    assert pacer.learned() is None
    pacer.saw_chunk(prefill_rows=1, longest=8, decode_rows=0, took_s=machine()(8))
    pacer.saw_chunk(prefill_rows=1, longest=31, decode_rows=0, took_s=machine()(31))
    assert pacer.learned() is None
    pacer.saw_chunk(prefill_rows=4, longest=256, decode_rows=0, took_s=machine()(1024))
    pacer.saw_decode(rows=3, took_s=0.01)
    pace = pacer.learned()
    assert pace is not None
    assert (pace.pass_s, pace.unit_s) == pytest.approx((PASS_S, TOKEN_S))
    assert (pace.largest_cost, pace.decode_s, pace.decode_rows) == (1024, 0.01, 3)


def test_the_first_prompt_of_a_later_life_is_not_read_in_small_chunks() -> None:
    takes = machine()
    assert len(read(resumed(learned(takes), takes), 2000, takes)) == 1
    afresh = new_pacer()
    read(afresh, FIRST_CHUNK, takes)
    assert len(read(afresh, 2000, takes)) > 5


def test_until_a_chunk_was_read_a_token_counts_as_slower_than_it_was() -> None:
    takes = machine(pass_s=0.0, token_s=0.01)
    pace = learned(takes)
    pacer = resumed(pace, takes)
    target_s = HEADROOM * IDLE_TARGET_S
    first = pacer.chunk(prefill_rows=1, decode_rows=0)
    assert first == int(target_s / (CAUTION * pace.unit_s))
    read(pacer, first, takes)
    assert pacer.chunk(prefill_rows=1, decode_rows=0) == pytest.approx(target_s / 0.01, rel=0.02)


def test_what_was_not_measured_in_this_life_is_not_kept_as_learned() -> None:
    """Otherwise each life would make the pace slower by the caution of the next."""
    takes = machine()
    pace = learned(takes)
    pacer = resumed(pace, takes)
    assert pacer.learned() is None
    read(pacer, FIRST_CHUNK, takes)
    assert pacer.learned() is None
    pacer.saw_chunk(prefill_rows=1, longest=500, decode_rows=0, took_s=takes(500))
    kept = pacer.learned()
    assert kept is not None
    assert kept.unit_s == pytest.approx(pace.unit_s, rel=0.05)


@pytest.mark.parametrize("slower", [1.0, 3.0, 30.0])
@pytest.mark.parametrize(("pass_s", "token_s"), [(PASS_S, TOKEN_S), (0.0, 0.02), (0.2, 0.002)])
def test_a_machine_that_has_become_slower_is_not_taken_for_stuck(
    slower: float, pass_s: float, token_s: float
) -> None:
    pace = learned(machine(pass_s=pass_s, token_s=token_s))
    takes = machine(pass_s=slower * pass_s, token_s=slower * token_s)
    pacer = resumed(pace, takes)
    for _ in range(20):
        chunk = pacer.chunk(prefill_rows=1, decode_rows=0)
        predicted_s = pacer.predict_chunk_s(prefill_rows=1, longest=chunk)
        took_s = takes(chunk)
        if slower <= 3.0:
            assert took_s <= STEP_TIMEOUT_SHARE * STEP_TIMEOUT_S
        assert took_s < STEP_TIMEOUT_S + PREDICTIONS * predicted_s
        pacer.saw_chunk(prefill_rows=1, longest=chunk, decode_rows=0, took_s=took_s)


@given(
    unit_s=st.floats(1e-9, 10.0),
    pass_s=st.floats(0.0, 10.0),
    largest=st.integers(32, 2**31),
    real_pass_s=st.floats(0.0, 1.0),
    real_token_s=st.floats(1e-6, 0.1),
)
@example(unit_s=1e-9, pass_s=1.0, largest=2**20, real_pass_s=0.0, real_token_s=0.1)
def test_no_pace_has_a_worker_taken_for_stuck(
    unit_s: float, pass_s: float, largest: int, real_pass_s: float, real_token_s: float
) -> None:
    """Whatever is in the file: a token is never free, and what this life measures wins."""
    pace = Pace(unit_s=unit_s, pass_s=pass_s, largest_cost=largest, decode_s=0.0, decode_rows=1)
    takes = machine(pass_s=real_pass_s, token_s=real_token_s)
    pacer = resumed(pace, takes)
    for _ in range(30):
        chunk = pacer.chunk(prefill_rows=1, decode_rows=0)
        assert 1 <= chunk <= LARGEST_CHUNK
        predicted_s = pacer.predict_chunk_s(prefill_rows=1, longest=chunk)
        assert predicted_s > 0
        assert takes(chunk) < STEP_TIMEOUT_S + PREDICTIONS * predicted_s
        pacer.saw_chunk(prefill_rows=1, longest=chunk, decode_rows=0, took_s=takes(chunk))


def test_decoding_is_predicted_from_the_first_step() -> None:
    takes = machine()
    pace = replace(learned(takes), decode_s=0.04, decode_rows=4)
    assert resumed(pace, takes).predict_decode_s(8) == pytest.approx(0.08)
    slow = resumed(pace, lambda cost: 3 * takes(cost))
    assert slow.predict_decode_s(4) == pytest.approx(0.12, rel=0.01)


# ---------------------------------------------------------------- what the warm-up shows


def test_a_size_that_is_shown_is_read_in_one_pass_and_once() -> None:
    takes, pacer = machine(), new_pacer()
    for size in (FIRST_CHUNK, 128, 1024):
        assert size == FIRST_CHUNK or pacer.shows_chunk(size, 0.1)
        assert read(pacer, size, takes) == [size]
    assert read(pacer, 4000, takes) == [LARGEST_CHUNK, 4000 - LARGEST_CHUNK]


def test_a_step_that_reads_nothing_leaves_the_size_for_the_next() -> None:
    pacer = new_pacer()
    read(pacer, FIRST_CHUNK, machine())
    assert pacer.shows_chunk(128, 0.1)
    pacer.saw_chunk(prefill_rows=0, longest=0, decode_rows=0, took_s=0.01)
    assert pacer.chunk(prefill_rows=1, decode_rows=0) == 128


def test_a_size_is_shown_only_while_that_is_cheap() -> None:
    pacer = new_pacer()
    assert not pacer.shows_chunk(128, 0.1), "nothing was measured"
    pacer.saw_chunk(prefill_rows=1, longest=8, decode_rows=0, took_s=0.101)
    assert not pacer.shows_chunk(128, 0.1)
    assert pacer.chunk(prefill_rows=1, decode_rows=0) == 16


def test_fixed_chunks_are_never_shown_another_size() -> None:
    pacer = new_pacer(is_fixed=True)
    pacer.saw_chunk(prefill_rows=1, longest=8, decode_rows=0, took_s=0.001)
    assert not pacer.shows_chunk(128, 0.1)
    assert pacer.chunk(prefill_rows=1, decode_rows=0) == FIXED_CHUNK


def test_what_had_kernels_compiled_is_forgotten() -> None:
    pacer = new_pacer()
    pacer.saw_chunk(prefill_rows=1, longest=8, decode_rows=0, took_s=1.5)
    pacer.saw_decode(rows=4, took_s=20.0)
    pacer.forget()
    assert pacer.predict_chunk_s(prefill_rows=1, longest=8) == 0.0
    assert pacer.predict_decode_s(4) == 0.0
    assert pacer.chunk(prefill_rows=1, decode_rows=0) == FIRST_CHUNK
