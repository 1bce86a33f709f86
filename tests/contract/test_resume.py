"""An answer resumes in another life of the worker as if nothing had happened."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsup.protocol.codec import Decoder, encode
from mlxsup.protocol.ids import RequestKey, pack_tokens, unpack_tokens
from mlxsup.protocol.states import FinishReason
from mlxsup.protocol.worker_messages import SUPERVISOR_TO_WORKER, Acceptance, Dispatch, Resume

from support.worker.loop_driver import LoopDriver, check_every_resume

LENGTH = 32
PROMPT = "Once upon a time there was a fox 🦊 who"

CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "top_p": 0.95, "seed": 11},
}
DRAWN = [
    pytest.param(name, marks=[pytest.mark.draws] if parameters else [])
    for name, parameters in CASES.items()
]

ONE_OF_EACH_ENGINE = ["fake", pytest.param("together", marks=pytest.mark.mlx)]
SHORT = pytest.param("short", marks=pytest.mark.mlx)


@pytest.mark.bits
@pytest.mark.parametrize("case", DRAWN)
def test_resumed_at_every_token_equals_the_undisturbed_answer_F10(
    worker: LoopDriver, case: str
) -> None:
    whole = worker.answer(prompt=PROMPT, max_tokens=LENGTH, **CASES[case])
    assert len(whole.tokens) == LENGTH
    check_every_resume(worker, whole)


@pytest.mark.bits
@pytest.mark.parametrize("make", ONE_OF_EACH_ENGINE, indirect=True, scope="module")
def test_a_seed_that_the_worker_chose_is_kept_at_every_token_F10(worker: LoopDriver) -> None:
    """The step loop chooses it before the engine is asked, so that one model is enough."""
    whole = worker.answer(prompt=PROMPT, max_tokens=LENGTH, temperature=0.8)
    check_every_resume(worker, whole)


@pytest.mark.bits
def test_half_a_stop_string_goes_on_rightly_F10(worker: LoopDriver) -> None:
    """Stops are matched against text; how its tokens were drawn makes no difference."""
    parameters: dict[str, Any] = {"prompt": PROMPT, "max_tokens": LENGTH}
    free = worker.answer(**parameters)
    text = free.text
    # Across a token's border, and a second one that only begins to match, again and again.
    stop = text[len(text) // 2 : len(text) // 2 + 7]
    stops = [stop, text[3:6] + "\0", text[20:22] + "\0"]
    whole = worker.answer(stop=stops, **parameters)
    assert whole.finish is FinishReason.STOP
    assert whole.text == text[: text.index(stop)]
    check_every_resume(worker, whole)


@pytest.mark.draws
@pytest.mark.bits
def test_a_resume_changes_no_other_answer_F10_C10(worker: LoopDriver) -> None:
    parameters: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": LENGTH}
    whole = worker.answer(prompt=PROMPT, **parameters)
    other = worker.answer(prompt="another", **parameters)
    first = worker.dispatch(prompt="another", **parameters)
    while len(worker.answers[first].tokens) < 5:
        worker.turn()
    resumed = worker.dispatch(whole.resume_after(20))
    second = worker.dispatch(prompt="short", max_tokens=3)
    got = worker.finish(first, resumed, second)
    assert got[0].tokens == other.tokens
    assert got[1].tokens == whole.tokens[20:]


def test_the_acceptance_holds_all_that_was_asked_F10(worker: LoopDriver) -> None:
    whole = worker.answer(prompt=PROMPT, max_tokens=5, temperature=0.5, stop=["zz"], seed=9)
    assert whole.acceptance is not None
    assert whole.acceptance.seed == 9
    parameters = whole.acceptance.parameters
    assert parameters["max_tokens"] == 5
    assert parameters["temperature"] == 0.5
    assert parameters["stop"] == ["zz"]
    assert not parameters.keys() & {"prompt", "messages", "prompt_tokens"}


@pytest.mark.parametrize("make", ["fake", SHORT], indirect=True, scope="module")
def test_the_budget_of_a_default_max_tokens_counts_from_the_prompt_F10(worker: LoopDriver) -> None:
    """What fits into the context is decided once: a longer prompt does not shorten the answer.

    The step loop decides it before the engine is asked, so that one model is enough.
    """
    whole = worker.answer(prompt_tokens=[40] * (worker.facts.context_length - 96))
    assert whole.acceptance is not None
    assert len(whole.tokens) == whole.acceptance.parameters["max_tokens"] == 96
    rest = worker.answer(whole.resume_after(50))
    assert rest.tokens == whole.tokens[50:]
    assert rest.finish is FinishReason.LENGTH


def test_a_changed_model_is_told_with_the_tokens_sent_F10(worker: LoopDriver) -> None:
    whole = worker.answer(prompt=PROMPT, max_tokens=8)
    made = whole.acceptance
    assert made is not None
    other = Acceptance(
        prompt_tokens=made.prompt_tokens,
        opening=made.opening,
        parameters=made.parameters,
        seed=made.seed,
        fingerprint="another",
    )
    refused = worker.answer(Resume(acceptance=other, delivered=pack_tokens(whole.tokens[:3])))
    assert refused.error is not None
    assert refused.error["code"] == "worker_crashed"
    assert "the model changed" in refused.error["message"]
    assert refused.error["detail"] == {"tokens_sent": 3}
    assert not worker.loop.open_keys


@pytest.mark.parametrize("extra", [0, 1])
def test_an_answer_that_was_complete_ends_without_a_row_F10(worker: LoopDriver, extra: int) -> None:
    whole = worker.answer(prompt=PROMPT, max_tokens=6)
    delivered = (whole.tokens * 2)[: 6 + extra]
    assert whole.acceptance is not None
    resume = Resume(acceptance=whole.acceptance, delivered=pack_tokens(delivered))
    rest = worker.answer(resume)
    assert (rest.tokens, rest.finish) == ([], FinishReason.LENGTH)
    assert not worker.engine.has_rows()


def test_a_resumed_request_can_be_cancelled_D3(worker: LoopDriver) -> None:
    whole = worker.answer(prompt=PROMPT, max_tokens=LENGTH)
    key = worker.dispatch(whole.resume_after(9))
    worker.turn()
    worker.cancel(key)
    assert worker.finish(key)[0].finish is FinishReason.CANCELLED
    assert not worker.engine.has_rows()


def test_a_resume_travels_F10() -> None:
    acceptance = Acceptance(
        prompt_tokens=pack_tokens([1, 2]),
        opening="<think>",
        parameters={"stop": ["a"], "temperature": 0.5},
        seed=5,
        fingerprint="f",
    )
    resume = Resume(acceptance=acceptance, delivered=pack_tokens([70_000]))
    sent = Dispatch(key=RequestKey(3), resume=resume)
    received = Decoder(SUPERVISOR_TO_WORKER, is_strict=False).decode(encode(sent))
    assert received == sent
    assert unpack_tokens(resume.delivered) == [70_000]
