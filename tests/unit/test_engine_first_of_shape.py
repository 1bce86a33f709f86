"""What the first step of a shape teaches the pacer: that a GPU prepares it costs no token."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlxsup.worker.engines.mlx.pace import Pace
from mlxsup.worker.engines.mlx.prefill import FIRST_CHUNK, LARGEST_CHUNK, PrefillPacer
from mlxsup.worker.engines.mlx.shapes import SeenShapes

PASS_S, TOKEN_S = 0.0055, 17e-6
PREPARED_S = 0.4
PROMPTS, TOKENS = 16, 91
STEP_TIMEOUT_S = 30.0
PREDICTIONS = 4.0
"""How many times its prediction a step may take beyond the limit."""


def machine(cost: int) -> float:
    return PASS_S + TOKEN_S * cost


def shown() -> PrefillPacer:
    """As the warm-up leaves it, on a GPU that was prepared for nothing that it is shown."""
    pacer = PrefillPacer(decode_stall_target_s=0.25, step_timeout_s=STEP_TIMEOUT_S)
    pacer.is_first = True
    for size in (FIRST_CHUNK, 128, 1024):
        assert size == FIRST_CHUNK or pacer.shows_chunk(size, 0.1)
        read(pacer, machine(size), prompts=1, tokens=size)
    pacer.is_first = False
    return pacer


def read(
    pacer: PrefillPacer, took_s: float, *, prompts: int = PROMPTS, tokens: int = TOKENS
) -> None:
    """A pass over that many tokens of each prompt."""
    pacer.saw_chunk(prefill_rows=prompts, longest=tokens, decode_rows=0, took_s=took_s)


def burst_s(pacer: PrefillPacer) -> float:
    """How long a burst should take."""
    return pacer.predict_chunk_s(prefill_rows=PROMPTS, longest=TOKENS)


def test_what_is_shown_counts_also_in_the_first_step_of_its_shape() -> None:
    assert burst_s(shown()) == pytest.approx(machine(PROMPTS * TOKENS), rel=0.1)
    pacer = shown()
    assert pacer.shows_chunk(2048, 0.1)
    pacer.is_first = True
    read(pacer, 3 * machine(2048), prompts=1, tokens=2048)
    assert pacer.predict_chunk_s(prefill_rows=1, longest=2048) > 2 * machine(2048)


def test_a_burst_of_a_new_shape_does_not_end_the_waiting_for_others() -> None:
    """Otherwise its tokens seem to cost more than the pass, and the next burst does not gather."""
    pacer = shown()
    before = burst_s(pacer), pacer.shared_pass_s(TOKENS)
    pacer.is_first = True
    read(pacer, PREPARED_S)
    assert (burst_s(pacer), pacer.shared_pass_s(TOKENS)) == before
    assert before[1] == pytest.approx(PASS_S, rel=0.1)


def test_the_second_step_of_a_shape_is_believed() -> None:
    pacer = shown()
    read(pacer, PREPARED_S)
    assert burst_s(pacer) == pytest.approx(PREPARED_S, rel=0.1)
    assert pacer.shared_pass_s(TOKENS) == 0.0


def test_a_first_step_that_is_quicker_than_expected_is_believed() -> None:
    pacer = shown()
    read(pacer, PREPARED_S)
    pacer.is_first = True
    read(pacer, machine(PROMPTS * TOKENS))
    assert burst_s(pacer) < 0.8 * PREPARED_S


def test_a_first_step_that_comes_near_the_stall_limit_is_believed() -> None:
    pacer = shown()
    pacer.is_first = True
    read(pacer, 0.15 * STEP_TIMEOUT_S)
    assert burst_s(pacer) == pytest.approx(0.15 * STEP_TIMEOUT_S, rel=0.1)


def test_before_two_sizes_were_seen_the_first_step_is_all_that_is_known() -> None:
    pacer = PrefillPacer(decode_stall_target_s=0.25, step_timeout_s=STEP_TIMEOUT_S)
    pacer.is_first = True
    read(pacer, 0.2, prompts=1, tokens=FIRST_CHUNK)
    read(pacer, 1.0, prompts=1, tokens=16)
    assert pacer.predict_chunk_s(prefill_rows=1, longest=16) == pytest.approx(1.0, rel=0.1)


@given(
    unit_s=st.floats(1e-9, 10.0),
    pass_s=st.floats(0.0, 10.0),
    largest=st.integers(32, 2**31),
    real_pass_s=st.floats(0.0, 1.0),
    real_token_s=st.floats(1e-6, 0.1),
)
@example(unit_s=1e-9, pass_s=1.0, largest=2**20, real_pass_s=0.0, real_token_s=0.1)
def test_no_pace_has_a_worker_taken_for_stuck_although_first_steps_are_not_believed(
    unit_s: float, pass_s: float, largest: int, real_pass_s: float, real_token_s: float
) -> None:
    pacer = PrefillPacer(decode_stall_target_s=0.25, step_timeout_s=STEP_TIMEOUT_S)
    read(pacer, real_pass_s + real_token_s * FIRST_CHUNK, prompts=1, tokens=FIRST_CHUNK)
    pace = Pace(unit_s=unit_s, pass_s=pass_s, largest_cost=largest, decode_s=0.0, decode_rows=1)
    pacer.resume(pace)
    shapes = SeenShapes()
    for _ in range(30):
        chunk = pacer.chunk(prefill_rows=1, decode_rows=0)
        assert 1 <= chunk <= LARGEST_CHUNK
        shape = (0, 1, chunk)
        took_s = real_pass_s + real_token_s * chunk
        predicted_s = pacer.predict_chunk_s(prefill_rows=1, longest=chunk)
        assert took_s < STEP_TIMEOUT_S + PREDICTIONS * predicted_s
        pacer.is_first = shapes.is_new(shape)
        shapes.saw(shape)
        read(pacer, took_s, prompts=1, tokens=chunk)
