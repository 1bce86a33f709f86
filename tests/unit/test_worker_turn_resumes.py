"""Requests that continue an answer of an earlier life, in one turn of the step loop."""

from __future__ import annotations

import pytest

from mlxsup.protocol.ids import pack_tokens
from mlxsup.protocol.states import FinishReason
from mlxsup.protocol.worker_messages import (
    Acceptance,
    Accepted,
    Rejected,
    Resume,
    RowDelta,
    Step,
)
from mlxsup.worker.engines.fake.text import encode_text

from support.turn_bench import A, Bench


@pytest.fixture
def bench() -> Bench:
    return Bench()


def resume_of(fingerprint: str, delivered: str) -> Resume:
    acceptance = Acceptance(
        prompt_tokens=pack_tokens([5, 6, 7]), opening="", parameters={"mine": 1}, seed=1,
        fingerprint=fingerprint,
    )  # fmt: skip
    return Resume(acceptance=acceptance, delivered=pack_tokens(encode_text(delivered)))


def test_a_resumed_request_is_accepted_as_it_was_and_continues_behind_it_F10(
    bench: Bench,
) -> None:
    resume = resume_of("f", "ab")
    bench.dispatch(A, resume=resume)
    assert bench.around.submitted == [(A, b"body", resume)]
    bench.prepare(A, resume=resume)
    bench.loop.turn()
    accepted = bench.sent()[0]
    assert isinstance(accepted, Accepted)
    assert accepted.acceptance == resume.acceptance
    assert bench.engine.rows[A].delivered == encode_text("ab")


def test_a_resume_in_another_model_is_refused_before_it_is_prepared_F10(bench: Bench) -> None:
    bench.dispatch(A, resume=resume_of("g", "ab"))
    [rejected] = bench.sent()
    assert isinstance(rejected, Rejected)
    assert (rejected.key, rejected.error["code"]) == (A, "worker_crashed")
    assert (bench.around.submitted, bench.loop.open_keys) == ([], frozenset())


def test_a_resumed_answer_that_was_whole_ends_without_a_step_F10(bench: Bench) -> None:
    resume = resume_of("f", "ab")
    bench.dispatch(A, resume=resume)
    bench.prepare(A, resume=resume, max_tokens=2)
    assert not bench.loop.turn()
    end = RowDelta(key=A, finish=FinishReason.LENGTH)
    assert bench.sent()[1:] == [Step(step=0, rows=[end], between_steps=1)]
    assert bench.engine.rows == {}
