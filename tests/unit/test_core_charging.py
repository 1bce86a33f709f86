"""Who pays for a step: by hand for each rule, and for any step."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.protocol.ids import RequestKey, pack_tokens
from mlxsup.protocol.states import Channel, FinishReason
from mlxsup.protocol.worker_messages import PrefillProgress, RowDelta, Step
from mlxsup.supervisor.core.sharing.charging import Charges, charge

A, B, C = (RequestKey(number) for number in (1, 2, 3))


def token(key: RequestKey) -> RowDelta:
    return RowDelta(key=key, text="x", tokens=pack_tokens([9]))


def gone(key: RequestKey) -> RowDelta:
    return RowDelta(key=key, finish=FinishReason.CANCELLED)


def read(key: RequestKey, computed: int, *, done: int | None = None) -> PrefillProgress:
    """By default from the beginning of the prompt."""
    return PrefillProgress(
        key=key, done=computed if done is None else done, total=1000, computed=computed
    )


def charged(
    *,
    rows: list[RowDelta] | None = None,
    prefill: list[PrefillProgress] | None = None,
    took_s: float = 1.0,
    decode_s: float = 0.0,
    between_steps: int = 0,
    engine_s: float | None = None,
    read_before: dict[RequestKey, float] | None = None,
) -> Charges:
    step = Step(
        step=1,
        rows=rows or [],
        prefill=prefill or [],
        took_s=took_s,
        decode_s=decode_s,
        between_steps=between_steps,
    )
    before = read_before or {}
    cost_s = took_s if engine_s is None else engine_s
    return charge(step, cost_s, lambda key: before.get(key, 0.0))


def test_of_a_step_without_a_duration_those_who_read_pay_all() -> None:
    found = charged(rows=[token(A)], prefill=[read(B, 10)], took_s=0.0, decode_s=0.5, engine_s=1.0)
    assert found == Charges(requests={A: 0.0, B: 1.0})


def test_rows_that_decode_pay_equal_parts_whatever_was_predicted() -> None:
    for decode_s in (0.0, 0.25, 1.0):
        found = charged(rows=[token(A), token(B)], decode_s=decode_s)
        assert found == Charges(requests={A: 0.5, B: 0.5})


def test_a_row_pays_once_even_if_its_token_made_several_pieces() -> None:
    pieces = [token(A), RowDelta(key=A, text="!", channel=Channel.REASONING), token(B)]
    assert charged(rows=pieces) == Charges(requests={A: 0.5, B: 0.5})


def test_a_row_that_ended_without_a_token_was_computed_like_the_others() -> None:
    end = RowDelta(key=A, finish=FinishReason.STOP)
    assert charged(rows=[end, token(B)]) == Charges(requests={A: 0.5, B: 0.5})


def test_rows_that_left_between_two_steps_pay_nothing() -> None:
    found = charged(rows=[gone(A), gone(B), token(C)], between_steps=2)
    assert found == Charges(requests={C: 1.0})


def test_rows_that_read_pay_by_the_tokens_computed_for_them() -> None:
    found = charged(prefill=[read(A, 30), read(B, 10)])
    assert found == Charges(requests={A: 0.75, B: 0.25})


def test_known_tokens_are_free() -> None:
    found = charged(prefill=[read(A, 10, done=900), read(B, 30)])
    assert found == Charges(requests={A: 0.25, B: 0.75})
    waiting = charged(rows=[token(A)], prefill=[read(B, 0, done=5)], decode_s=0.25)
    assert waiting == Charges(requests={A: 1.0}), "nothing was read, so the rest is decode, too"


def test_the_decode_part_is_what_was_predicted_and_the_rest_is_for_the_prompts() -> None:
    found = charged(rows=[token(A), token(B)], prefill=[read(C, 8)], took_s=2.0, decode_s=0.5)
    assert found == Charges(requests={A: 0.25, B: 0.25, C: 1.5})


def test_nobody_decoded_so_the_prompts_pay_for_everything() -> None:
    found = charged(rows=[gone(B)], between_steps=1, prefill=[read(A, 8)], decode_s=0.5)
    assert found == Charges(requests={A: 1.0})


def test_a_shared_device_makes_every_part_smaller() -> None:
    found = charged(rows=[token(A)], prefill=[read(C, 8)], took_s=2.0, decode_s=0.5, engine_s=1.0)
    assert found == Charges(requests={A: 0.25, C: 0.75})


def test_what_was_read_before_is_repeated_and_its_request_pays_for_the_rest_alone() -> None:
    half = charged(prefill=[read(A, 10)], read_before={A: 5.0})
    assert half == Charges(requests={A: 0.5}, repeated_s=0.5)
    beyond = charged(prefill=[read(A, 10, done=20)], read_before={A: 10.0})
    assert beyond == Charges(requests={A: 1.0})
    whole = charged(prefill=[read(A, 10)], read_before={A: math.inf})
    assert whole == Charges(requests={}, repeated_s=1.0)


def test_a_row_that_reads_and_decodes_in_one_step_pays_for_both() -> None:
    found = charged(rows=[token(A)], prefill=[read(A, 10)], decode_s=0.25)
    assert found == Charges(requests={A: 1.0})


def test_a_step_that_computed_nothing_is_paid_by_nobody() -> None:
    assert charged() == Charges(requests={}, nobody_s=1.0)
    assert charged(rows=[gone(A)], between_steps=1) == Charges(requests={}, nobody_s=1.0)


@pytest.mark.parametrize(("decode_s", "paid"), [(-1.0, 0.0), (5.0, 1.0)])
def test_a_prediction_beyond_the_step_counts_as_all_of_it(decode_s: float, paid: float) -> None:
    found = charged(rows=[token(A)], prefill=[read(B, 1)], decode_s=decode_s)
    assert found.requests == {A: paid, B: 1.0 - paid}


keys = st.integers(min_value=1, max_value=6).map(RequestKey)
progress = st.builds(
    PrefillProgress,
    key=keys,
    done=st.integers(min_value=0, max_value=5000),
    total=st.just(5000),
    computed=st.integers(min_value=-5, max_value=5000),
)
steps = st.builds(
    Step,
    step=st.just(1),
    rows=st.lists(keys.map(token), max_size=8),
    prefill=st.lists(progress, max_size=6, unique_by=lambda row: row.key),
    took_s=st.floats(min_value=0.0, max_value=100.0),
    decode_s=st.floats(min_value=0.0, max_value=100.0),
    between_steps=st.integers(min_value=-1, max_value=9),
)


@given(
    step=steps,
    engine_s=st.floats(min_value=0.0, max_value=100.0),
    before=st.dictionaries(keys, st.one_of(st.just(math.inf), st.floats(0.0, 6000.0))),
)
def test_the_parts_are_what_the_step_cost_and_nobody_is_paid_for_it(
    step: Step, engine_s: float, before: dict[RequestKey, float]
) -> None:
    found = charge(step, engine_s, lambda key: before.get(key, 0.0))
    parts = [*found.requests.values(), found.repeated_s, found.nobody_s]
    assert all(part >= -1e-9 for part in parts)
    assert math.isclose(sum(parts), engine_s, rel_tol=1e-9, abs_tol=1e-9)
    computed = {row.key for row in step.rows[max(step.between_steps, 0) :]}
    computed |= {row.key for row in step.prefill if row.computed > 0}
    assert found.requests.keys() <= computed
