"""Requests that come together: one pass reads them all, and nobody waits for long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from mlxsup.protocol.states import FinishReason
from mlxsup.protocol.worker_messages import Accepted, Step
from mlxsup.worker.engines.fake.engine import FakeEngine
from mlxsup.worker.engines.fake.text import answer_tokens, encode_text

from support.launch_specs import SPEC
from support.loop_driver import LoopDriver
from support.worker_harness import WorkerHarness

PLACES = 16
DEAR = {"pass_s": 0.02}


@pytest.fixture
def driver() -> Iterator[LoopDriver]:
    """A loop with its threads, on a clock that stands still: no wait ends because of the time."""
    engine = FakeEngine(replace(SPEC, max_concurrency=PLACES, fake=DEAR))
    facts = engine.load(lambda phase, at: None)
    made = LoopDriver(engine, facts, PLACES, clock=lambda: 0.0)
    yield made
    made.close()
    engine.close()


def test_sixteen_requests_at_once_are_read_in_one_step(driver: LoopDriver) -> None:
    keys = [driver.dispatch(prompt=f"canary {n}", max_tokens=9) for n in range(PLACES)]
    for n, answer in enumerate(driver.finish(*keys)):
        assert answer.tokens == answer_tokens(encode_text(f"canary {n}"), 9)
    steps = [message for message in driver.messages if isinstance(message, Step)]
    assert [len(step.prefill) for step in steps] == [PLACES, *[0] * 8]
    assert [len(step.rows) for step in steps] == [PLACES] * 9


def test_streams_of_a_real_worker_are_whole_however_they_gather_C4() -> None:
    with WorkerHarness(max_concurrency=PLACES, fake=DEAR) as worker:
        worker.wait_until_ready()
        for size in (PLACES, 1, 3):
            prompts = [f"canary {n} of {size}" for n in range(size)]
            keys = [worker.dispatch(prompt, max_tokens=9) for prompt in prompts]
            for prompt, stream in zip(prompts, worker.finish(*keys), strict=True):
                assert stream.tokens == answer_tokens(encode_text(prompt), 9)
        assert worker.ask_for_exit() == 0


def test_a_prompt_that_takes_long_to_prepare_is_not_waited_for() -> None:
    with WorkerHarness(fake=DEAR) as worker:
        worker.wait_until_ready()
        quick = worker.dispatch("quick", max_tokens=3)
        slow = worker.dispatch("[[tokenize slow=600]]")
        (stream,) = worker.finish(quick)
        assert stream.finish is FinishReason.LENGTH
        assert sum(isinstance(message, Accepted) for message in worker.messages) == 1
        worker.cancel(slow)
        (cancelled,) = worker.finish(slow)
        assert cancelled.finish is FinishReason.CANCELLED
        assert worker.ask_for_exit() == 0
